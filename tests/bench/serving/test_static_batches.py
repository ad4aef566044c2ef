"""Static batches on a random model: only requested tokens count."""

from pathlib import Path

import pytest
import torch

from bench.serving.static_batches import StaticBatches, left_padded
from bench.trace import TraceRequest


def test_prompts_are_padded_on_the_left() -> None:
    assert left_padded([[5], [6, 7, 8], [9, 10]]) == (
        [[0, 0, 5], [6, 7, 8], [0, 9, 10]],
        [[0, 0, 1], [1, 1, 1], [0, 1, 1]],
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        eos_token_id=list(range(20)),  # every token is EOS, which has to be ignored
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_batch_runs_to_its_longest_output_and_counts_requested_tokens(model: Path) -> None:
    trace = [TraceRequest((3, 4, 5), 2), TraceRequest((6,), 5), TraceRequest((7, 8), 3)]
    batches = StaticBatches(str(model))
    assert batches.vocab_size == 20
    result = batches.run(trace, 2)
    assert [record.num_output_tokens for record in result.records] == [2, 5, 3]
    assert [len(record.arrivals_s) for record in result.records] == [2, 5, 3]
    first, second, third = result.records
    assert first.sent_s == second.sent_s  # one batch
    assert first.arrivals_s == second.arrivals_s[:2]
    assert third.sent_s >= second.arrivals_s[-1]  # the next batch waits for the longest output of this one
