"""Greedy output equals transformers token for token, for each family and any batching."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.executor.checkpoints import FAMILIES, RandomCheckpoint, make_checkpoint
from tests.support.executor.plan_driver import LogitsRecorder, PlanDriver, generate

NUM_TOKENS = 24
LENGTHS = (1, 2, 5, 16, 17, 31, 40, 3)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_prompt_equals_transformers(name, checkpoint, make_runner) -> None:
    source = checkpoint(name)
    prompt = source.prompt(37)
    expected = source.greedy(prompt, NUM_TOKENS)
    assert len(set(expected)) > NUM_TOKENS // 2, "the checkpoint repeats itself, so it is a poor oracle"
    assert generate(make_runner(source.directory), [prompt], NUM_TOKENS) == [expected]


@pytest.mark.parametrize("max_chunk", [1 << 20, 7, 1])
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_in_one_batch_equal_transformers(name, max_chunk, checkpoint, make_runner) -> None:
    source = checkpoint(name)
    prompts = [source.prompt(length) for length in LENGTHS]
    expected = [source.greedy(prompt, 8) for prompt in prompts]
    assert generate(make_runner(source.directory), prompts, 8, max_chunk) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name, checkpoint, make_runner) -> None:
    source = checkpoint(name)
    tokens = source.prompt(45)
    expected = source.logits(tokens)
    runner = make_runner(source.directory)
    recorder = LogitsRecorder(runner)
    for length in (1, 14, 45):
        driver = PlanDriver(runner)
        driver.admit(tokens[:length], 1)
        driver.step()
        torch.testing.assert_close(recorder.last[0], expected[length - 1], atol=2e-4, rtol=2e-4)


def test_dynamic_rope_beyond_the_original_length_equals_transformers(checkpoint, make_runner) -> None:
    source = checkpoint("llama-dynamic")
    prompt = source.prompt(50)
    runner = make_runner(source.directory, max_model_len=128)
    assert generate(runner, [prompt], 60) == [source.greedy(prompt, 60)]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3"])
def test_fast_kernels_equal_transformers(name, checkpoint, make_runner) -> None:
    source = checkpoint(name)
    prompts = [source.prompt(length) for length in LENGTHS]
    runner = make_runner(source.directory, kernels="auto", block_size=16)
    assert generate(runner, prompts, NUM_TOKENS, 19) == [source.greedy(prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_half_precision_logits_are_close_to_float32(name, dtype, checkpoint, make_runner) -> None:
    source = checkpoint(name)
    prompt = source.prompt(30)
    runner = make_runner(source.directory, dtype=dtype)
    recorder = LogitsRecorder(runner)
    driver = PlanDriver(runner)
    driver.admit(prompt, 1)
    driver.step()
    expected = source.logits(prompt)[-1]
    assert recorder.last.dtype == getattr(torch, dtype)
    distance = (recorder.last[0].float() - expected).norm() / expected.norm()
    assert distance < (0.05 if dtype == "bfloat16" else 0.01)


def test_the_checkpoints_own_dtype_is_the_default(tmp_path, make_runner) -> None:
    source = make_checkpoint("llama", tmp_path / "float32")
    source.model.to(torch.bfloat16).save_pretrained(tmp_path / "bfloat16")
    for dtype in ("auto", "float32"):
        runner = make_runner(tmp_path / "bfloat16", dtype=dtype)
        assert runner.model.pool.dtype == (torch.bfloat16 if dtype == "auto" else torch.float32)
        assert len(generate(runner, [source.prompt(5)], 4)[0]) == 4


def test_shards_load_like_one_file(tmp_path, make_runner) -> None:
    source = make_checkpoint("qwen2", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompt = source.prompt(9)
    assert generate(make_runner(tmp_path), [prompt], 8) == [source.greedy(prompt, 8)]


@pytest.mark.parametrize(
    ("name", "changes"), [("mistral-window", {"layer_types": ["full_attention", "sliding_attention"]})]
)
def test_fields_that_the_class_does_not_save_are_read_as_by_transformers(name, changes, tmp_path, make_runner) -> None:
    make_checkpoint(name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    source = RandomCheckpoint(name, AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tmp_path)
    prompt = source.prompt(37)
    assert generate(make_runner(tmp_path), [prompt], NUM_TOKENS) == [source.greedy(prompt, NUM_TOKENS)]
