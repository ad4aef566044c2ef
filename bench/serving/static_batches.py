"""The static baseline: `transformers.generate` in batches of fixed membership.

Requests form batches of c in order of arrival. A batch is padded on the left to its longest prompt and runs until its
longest output is done; only then does the next one start. Only requested tokens count. The tokens that a row generates
beyond its own `max_tokens`, while other rows of its batch continue, are the loss that continuous batching avoids.
"""

import time
from collections.abc import Sequence
from typing import Any, Self

from bench.load import LoadResult, RequestRecord
from bench.trace import TraceRequest


class StaticBatches:
    """A model that is loaded once, for several runs. Only this class needs torch and transformers."""

    def __init__(self, model: str, dtype: str = "float32") -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._use(loaded.eval().to(device))

    @classmethod
    def of(cls, model: Any) -> Self:
        """Makes batches for a transformers model that is already on its device."""
        batches = cls.__new__(cls)
        batches._use(model)
        return batches

    def _use(self, model: Any) -> None:
        import torch

        self._torch = torch
        self._model = model
        self._device = model.device

    @property
    def model(self) -> Any:
        """The transformers model, on its device."""
        return self._model

    @property
    def is_on_gpu(self) -> bool:
        return bool(self._device.type == "cuda")

    @property
    def vocab_size(self) -> int:
        """Number of logits per position."""
        return int(self._model.config.vocab_size)

    def run(self, trace: Sequence[TraceRequest], concurrency: int) -> LoadResult:
        """Runs the trace, one batch after the other."""
        records: list[RequestRecord] = []
        start_s = time.perf_counter()
        for first in range(0, len(trace), concurrency):
            records.extend(self._run_batch(trace[first : first + concurrency]))
        return LoadResult(concurrency, time.perf_counter() - start_s, tuple(records))

    def _run_batch(self, batch: Sequence[TraceRequest]) -> list[RequestRecord]:
        torch = self._torch
        token_ids, mask = left_padded([request.prompt_token_ids for request in batch])
        num_steps = max(request.max_tokens for request in batch)
        clock = _StepClock(torch)
        sent_s = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=torch.tensor(token_ids, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                max_new_tokens=num_steps,
                min_new_tokens=num_steps,
                do_sample=False,
                num_beams=1,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[clock],
            )
        if output.shape[1] != len(token_ids[0]) + num_steps:
            raise RuntimeError(f"generate() made {output.shape[1] - len(token_ids[0])} of {num_steps} tokens")
        return [
            RequestRecord(
                sent_s,
                tuple(clock.times_s[: request.max_tokens]),
                len(request.prompt_token_ids),
                request.max_tokens,
            )
            for request in batch
        ]


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns token ids and attention mask, both [num_prompts, longest prompt]; left padding has id 0, mask 0."""
    longest = max(len(prompt) for prompt in prompts)
    token_ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return token_ids, mask


class _StepClock:
    """A stopping criterion that never stops generation; it records when each step's tokens were ready."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.times_s: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if input_ids.is_cuda:
            self._torch.cuda.synchronize()
        self.times_s.append(time.perf_counter())
        return self._torch.zeros(input_ids.shape[0], dtype=self._torch.bool, device=input_ids.device)
