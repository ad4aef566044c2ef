"""The expected tokens of sequences: from transformers' logits processors, or a few lines of NumPy if it has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

if TYPE_CHECKING:
    from executor.plans.plan import SequenceParams
    from tests.support.executor.checkpoints import RandomCheckpoint


def changed_logits(logits: torch.Tensor, tokens: list[int], params: SequenceParams) -> torch.Tensor:
    """Returns the changed logits[vocab_size] float32 of the token that follows `tokens`."""
    processors = LogitsProcessorList()
    if params.allowed_token_ids.size:
        allowed = params.allowed_token_ids.tolist()
        processors.append(PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, num_beams=1))
    if params.bias_token_ids.size:
        pairs = zip(params.bias_token_ids.tolist(), params.bias_values.tolist(), strict=True)
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in pairs]))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores = processors(torch.tensor([tokens]), logits.float().unsqueeze(0).clone())[0].numpy().copy()
    for token in range(len(scores)):
        num_times = tokens[params.num_prompt_tokens :].count(token)
        scores[token] -= np.float32(params.frequency_penalty) * np.float32(num_times)
        scores[token] -= np.float32(params.presence_penalty) * np.float32(num_times > 0)
    if len(tokens) < params.min_total_tokens:
        scores[params.eos_token_ids] = scores[params.stop_token_ids] = -np.inf
    return torch.from_numpy(scores)


def greedy(source: RandomCheckpoint, prompt: list[int], num_tokens: int, params: SequenceParams) -> list[int]:
    tokens, ends = list(prompt), [*params.eos_token_ids.tolist(), *params.stop_token_ids.tolist()]
    for _ in range(num_tokens):
        tokens.append(int(changed_logits(source.logits(tokens)[-1], tokens, params).argmax()))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


def logprobs_of(logits: torch.Tensor, token: int, num_others: int) -> list[tuple[int, float, int]]:
    """Returns (token, log-probability, rank) of the token, then of the most likely ones."""
    values = torch.log_softmax(logits.double(), dim=-1)
    order = torch.sort(logits.double(), descending=True, stable=True).indices.tolist()
    return [(one, float(values[one]), order.index(one) + 1) for one in (token, *order[:num_others])]
