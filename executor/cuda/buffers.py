"""Device memory that the runner holds besides weights and KV pool."""

from dataclasses import dataclass

import torch
from torch import Tensor

from executor.cuda.device_slots import DeviceSlots
from executor.models.decoder import Decoder
from executor.plans.plan import EndReason
from kernels import AttentionShape
from kernels.triton import RESULT_FIELDS, DecodePlanner, close_rows


class DecodeRows:
    """Buffers for the rows of decode-only steps, max_num_seqs of each.

    `slots` is sent; the others are computed from it.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        def numbers(dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_num_seqs, dtype=dtype, device=device)

        self.slots = numbers(torch.int32)
        self.token_ids = numbers(torch.int32)
        self.positions = numbers(torch.int32)
        self.context_lens = numbers(torch.int32)
        self.slot_mapping = numbers(torch.int64)


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Device memory that lives as long as the runner. It is allocated before the KV pool, which takes the rest.

    logits[max_num_seqs, vocab_size] of decode steps that sample, one buffer for all of their graphs;
    next_tokens[max_num_seqs] and results[max_num_seqs, RESULT_FIELDS], int32; peaks[max_num_seqs] float32, the largest
    logit of each row that samples, as the model made it.
    """

    on_device: DeviceSlots
    planner: DecodePlanner
    rows: DecodeRows
    logits: Tensor
    next_tokens: Tensor
    peaks: Tensor
    results: Tensor

    @classmethod
    def allocate(
        cls, model: Decoder, shape: AttentionShape, max_num_seqs: int, max_model_len: int, device: torch.device
    ) -> "StepBuffers":
        config = model.config
        max_blocks_per_seq = -(-max_model_len // shape.block_size)
        return cls(
            on_device=DeviceSlots(max_num_seqs, max_blocks_per_seq, config.vocab_size, device),
            planner=DecodePlanner(shape, device, max_num_seqs, max_model_len, config.windows),
            rows=DecodeRows(max_num_seqs, device),
            logits=torch.zeros((max_num_seqs, config.vocab_size), dtype=model.dtype, device=device),
            next_tokens=torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
            peaks=torch.zeros(max_num_seqs, dtype=torch.float32, device=device),
            results=torch.zeros((max_num_seqs, RESULT_FIELDS), dtype=torch.int32, device=device),
        )

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that the buffers take. The rows are too small to count."""
        return self.on_device.num_bytes + self.planner.num_bytes + self.logits.nbytes

    def note_peaks(self, logits: Tensor) -> None:
        """Keeps the largest of each row of logits[R, vocab_size]; NaN propagates. Call it before logits are changed."""
        self.peaks[: len(logits)].copy_(logits.amax(dim=-1))

    def close(self, slots: Tensor) -> None:
        """Appends next_tokens to the sequences of the slots, and writes the step's results."""
        num_rows = len(slots)
        close_rows(
            self.on_device.states,
            self.on_device.end_kinds,
            slots,
            self.next_tokens[:num_rows],
            self.peaks[:num_rows],
            self.results[:num_rows],
            EndReason.LENGTH,
            EndReason.NOT_FINITE,
        )
