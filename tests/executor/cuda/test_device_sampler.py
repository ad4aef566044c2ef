"""Sampling on the device equals `executor.sampling.sampler` row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor.cuda import sampler as device_sampler
from executor.cuda.device_slots import DeviceSlots, slot_changes
from executor.cuda.sampler import sample, sampling_arrays
from executor.cuda.step_arrays import StepArrays, send
from executor.cuda.upload import Upload
from executor.plans.limits import PlanLimits
from executor.plans.plan import Admission, SequenceParams, StepPlan
from executor.sampling.sampler import sample as sample_on_host
from executor.slots.sampling_table import SamplingTable
from tests.support.cuda.runner_pair import DEVICE
from tests.support.executor.plan_driver import ints

NUM_ROWS, VOCAB_SIZE = 24, 700
LIMITS = PlanLimits(
    vocab_size=VOCAB_SIZE,
    max_model_len=64,
    block_size=4,
    num_blocks=9,
    max_num_seqs=NUM_ROWS,
    max_num_batched_tokens=NUM_ROWS,
)


def random_params(random: np.random.Generator, row: int) -> SequenceParams:
    return SequenceParams(
        max_total_tokens=60,
        min_total_tokens=int(random.choice([0, 40])),
        temperature=float(random.choice([0.0, 0.3, 1.0, 4.0])),
        top_k=int(random.choice([0, 0, 1, 2, 90, 300, VOCAB_SIZE, 1 << 20])),
        top_p=float(random.choice([1.0, 1.0, 0.99, 0.5, 1e-6])),
        min_p=float(random.choice([0.0, 0.0, 0.3, 1.0])),
        seed=int(random.integers(1 << 63)) * 2 + row % 2,
        eos_token_ids=random.integers(0, VOCAB_SIZE, 5).astype(np.int32),
        stop_token_ids=random.integers(0, VOCAB_SIZE, 2).astype(np.int32),
    )


def logits_of(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator) * 3
    if kind == "ties":
        return (logits / 3).round()
    if kind == "flat":
        return torch.zeros(NUM_ROWS, VOCAB_SIZE) * torch.where(logits > 0, 1.0, -1.0)
    if kind == "mostly -inf":
        return logits.masked_fill(logits < 5.0, -torch.inf)
    return logits


@pytest.mark.parametrize("kind", ["random", "ties", "flat", "mostly -inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tokens_equal_those_of_the_host_sampler(kind, dtype, working, monkeypatch) -> None:
    monkeypatch.setattr(device_sampler, "MAX_NUMBERS", 3 * VOCAB_SIZE)
    random = np.random.default_rng(11)
    logits = logits_of(kind).to(dtype)
    table, upload = SamplingTable(NUM_ROWS, VOCAB_SIZE), Upload(working)
    on_device = DeviceSlots(NUM_ROWS, LIMITS.max_blocks_per_seq, VOCAB_SIZE, DEVICE)
    num_tokens = random.integers(1, 50, NUM_ROWS).astype(np.int32)
    slots = random.permutation(NUM_ROWS).astype(np.int32)
    for _ in range(2):
        admissions = tuple(
            Admission(slot, ints(*[1] * int(num_tokens[slot])), 0, ints(1), random_params(random, slot))
            for slot in range(NUM_ROWS)
        )
        for admission in admissions:
            table.set(admission.slot, admission.params)
        on_device.apply(send(slot_changes(StepPlan(1, 1, admissions=admissions), LIMITS), upload))
        draw = table.draw(slots, num_tokens[slots])
        expected = sample_on_host(logits.clone(), draw)
        token_ids = torch.full((NUM_ROWS,), -1, dtype=torch.int32, device=DEVICE)
        sent = send(StepArrays(sampling=sampling_arrays(draw), decode_slots=slots), upload)
        sample(logits.clone().to(DEVICE), sent.decode_slots, on_device, sent.sampling, token_ids)
        assert token_ids.tolist() == expected.tolist()
        assert sent.sampling.banned is not None
        assert sent.sampling.uniforms is not None


def test_a_greedy_step_sends_nothing() -> None:
    table = SamplingTable(2, VOCAB_SIZE)
    for slot in range(2):
        table.set(slot, SequenceParams(max_total_tokens=9, top_k=5, top_p=0.1))
    draw = table.draw(ints(0, 1), ints(3, 3))
    assert draw.is_plain_greedy
    assert sampling_arrays(draw) is None
