"""The last layer computes the logit rows alone. Their bits are those of a step in which all rows make logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import kernels
from executor.checkpoints.model_config import parse_model_config
from executor.checkpoints.random_weights import RandomCheckpoint
from executor.models.decoder import Decoder
from executor.models.eager import EagerModel
from executor.models.program import ProgramModel
from executor.models.weights import expected_shapes, load_weights
from executor.slots.launch import Launch
from kernels import reference
from kernels.cpu.softmax import CHUNK

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 120, 1024

# Tokens in the pool before the step, and tokens of the step: decodes first. Two contexts are longer than a chunk.
CONTEXTS = ((CHUNK + 190, 1), (33, 1), (CHUNK - 12, 40), (0, 9), (70, 5))
STARTS = np.cumsum([0, *(count for _, count in CONTEXTS)])

LOGIT_ROWS = {
    "none": [],
    "last rows": [0, 1, 41, 50, 55],
    "beams behind": [1, 50, 0, 41],
    "no decodes": [41],
    "rows of two sequences that follow each other": [48, 49, 50, 51, 52],
    "last rows, then whole prompts": [0, 1, 41, 50, *range(2, 42), *range(42, 50)],
    "last row, then the one before": [50, 49],
    "a part of a prompt and one row of another": [0, *range(7, 30), 53],
    "more sequences than slots": [41, 50, 55, 1, 30, 0],
}


def make_launch(logit_rows: list[int]) -> Launch:
    """Returns the step of `CONTEXTS`; sequence s uses row 2 * s + 1 of the block tables."""
    numbers = np.random.default_rng(3)
    slots = np.arange(1, 2 * len(CONTEXTS), 2, dtype=np.int32)
    tables = np.zeros((2 * len(CONTEXTS), MAX_MODEL_LEN // BLOCK_SIZE), np.int32)
    blocks = iter(numbers.permutation(np.arange(1, NUM_BLOCKS)))
    positions, mapping = [], []
    for slot, (before, count) in zip(slots, CONTEXTS, strict=True):
        for column in range(-(-(before + count) // BLOCK_SIZE)):
            tables[slot, column] = next(blocks)
        own = np.arange(before, before + count)
        positions.extend(own)
        mapping.extend(tables[slot, own // BLOCK_SIZE] * BLOCK_SIZE + own % BLOCK_SIZE)
    return Launch(
        num_decodes=sum(count == 1 for _, count in CONTEXTS),
        token_ids=numbers.integers(0, 97, len(positions), dtype=np.int32),
        positions=np.array(positions, np.int32),
        slot_mapping=np.array(mapping, np.int64),
        slots=slots,
        query_starts=STARTS.astype(np.int32),
        context_lens=np.array([before + count for before, count in CONTEXTS], np.int32),
        logit_rows=np.array(logit_rows, np.int64),
        block_tables=tables,
    )


def only_decodes(launch: Launch, logit_rows: list[int]) -> Launch:
    """Returns the decodes of the step alone."""
    count = launch.num_decodes
    return replace(
        launch,
        token_ids=launch.token_ids[:count],
        positions=launch.positions[:count],
        slot_mapping=launch.slot_mapping[:count],
        slots=launch.slots[:count],
        query_starts=launch.query_starts[: count + 1],
        context_lens=launch.context_lens[:count],
        logit_rows=np.array(logit_rows, np.int64),
    )


def compute(model: ProgramModel | EagerModel, launch: Launch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits of the step, and the pool after it."""
    torch.manual_seed(5)
    model.pool.normal_()
    logits = model.forward(launch)
    return logits.clone(), model.pool.clone()


class Models:
    """A model in the CPU's kernels, and the same model in reference kernels."""

    def __init__(self, architecture: str, num_layers: int, dtype: torch.dtype, **settings: object) -> None:
        config = parse_model_config(
            {
                "architectures": [architecture],
                "vocab_size": 97,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": num_layers,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": MAX_MODEL_LEN,
                **settings,
            }
        )
        device = torch.device("cpu")
        checkpoint = RandomCheckpoint(expected_shapes(config), dtype, device)
        shape = (num_layers, NUM_BLOCKS, 2, 2, BLOCK_SIZE, 32)
        fast = kernels.select(device)
        weights = load_weights(checkpoint, config, dtype, device, fast)
        decoder = Decoder(config, weights, fast, MAX_MODEL_LEN)
        self.program = ProgramModel(decoder, torch.zeros(shape, dtype=dtype), max_num_rows=64, max_num_seqs=5)
        plain = load_weights(checkpoint, config, dtype, device, reference)
        self.eager = EagerModel(
            Decoder(config, plain, reference, MAX_MODEL_LEN), reference, torch.zeros(shape, dtype=dtype)
        )


@pytest.fixture(
    scope="module",
    params=[
        ("LlamaForCausalLM", 2, torch.float32, {}),
        ("LlamaForCausalLM", 1, torch.float32, {}),
        ("Qwen3ForCausalLM", 2, torch.bfloat16, {}),
        ("MistralForCausalLM", 2, torch.float32, {"sliding_window": 37}),
    ],
    ids=["llama", "one layer", "qwen3", "window"],
)
def models(request: pytest.FixtureRequest) -> Models:
    architecture, num_layers, dtype, settings = request.param
    return Models(architecture, num_layers, dtype, **settings)


@pytest.mark.parametrize("rows", LOGIT_ROWS.values(), ids=LOGIT_ROWS)
def test_logits_do_not_depend_on_which_rows_make_them(models: Models, rows: list[int]) -> None:
    all_logits, written = compute(models.program, make_launch(list(range(STARTS[-1]))))
    logits, pool = compute(models.program, make_launch(rows))
    assert torch.equal(logits, all_logits[rows])
    assert torch.equal(pool, written)


@pytest.mark.parametrize("rows", [[0, 1], [1], [], [1, 0]])
def test_decodes_that_make_no_logits_change_nothing(models: Models, rows: list[int]) -> None:
    launch = make_launch([])
    all_logits, written = compute(models.program, only_decodes(launch, [0, 1]))
    logits, pool = compute(models.program, only_decodes(launch, rows))
    assert torch.equal(logits, all_logits[rows])
    assert torch.equal(pool, written)


@pytest.mark.parametrize("rows", [LOGIT_ROWS["last rows"], LOGIT_ROWS["last rows, then whole prompts"]])
def test_logits_and_kv_are_those_of_the_reference(models: Models, rows: list[int]) -> None:
    expected, expected_pool = compute(models.eager, make_launch(rows))
    logits, pool = compute(models.program, make_launch(rows))
    tolerance = 1e-4 if expected.dtype is torch.float32 else 4e-2
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(pool, expected_pool, atol=tolerance, rtol=tolerance)
