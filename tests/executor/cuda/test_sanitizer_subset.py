"""A few short runs that launch every kind of step, for `compute-sanitizer`, which slows a GPU down a hundredfold.

    compute-sanitizer --tool memcheck python -m pytest -p no:xdist tests/executor/cuda/test_sanitizer_subset.py

The same with `--tool racecheck`. Each run is also compared with the reference.
"""

from __future__ import annotations

import pytest

from tests.support.cuda.comparison import run_stream
from tests.support.cuda.random_streams import RandomStream
from tests.support.cuda.runner_pair import DEVICE, FinishingRunner, make_pair
from tests.support.executor.plan_driver import PlanDriver

pytestmark = pytest.mark.timeout(1800)


# Without a GPU there is nothing to sanitize, and test_runner.py compares these streams and families: one run is enough.
STREAMS = [("llama-biases", 48), ("qwen2-window", 49), ("qwen3", 20)]


@pytest.mark.parametrize(("name", "seed"), STREAMS if DEVICE.type == "cuda" else STREAMS[:1])
def test_a_short_stream(name, seed, checkpoint) -> None:
    """Prompts in chunks, decodes in graphs, copies of blocks and forks, greedy and drawn."""
    both = make_pair(checkpoint(name).directory, DEVICE, captures=True, max_num_seqs=4)
    stream = RandomStream(both.reference.limits, seed)
    run_stream(both, stream, num_ahead=2, num_steps=10)
    assert min(stream.seen["row"], stream.seen["row of a prompt"]) > 0


def test_a_context_of_several_chunks(checkpoint) -> None:
    """A prompt in two pieces after which decode attention reduces several chunks."""
    both, source = make_pair(checkpoint("llama").directory, DEVICE, max_num_batched_tokens=80), checkpoint("llama")
    outputs = []
    for runner in (FinishingRunner(both.cuda), both.reference):
        driver = PlanDriver(runner)
        sequence = driver.admit(source.prompt(90), 3, max_chunk=60)
        driver.run()
        outputs.append(sequence.output)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 3


def test_changed_logits_reports_and_beams(checkpoint) -> None:
    """Steps that wait for their own results."""
    both, source = make_pair(checkpoint("llama").directory, DEVICE), checkpoint("llama")
    results = []
    for runner in (FinishingRunner(both.cuda), both.reference):
        driver = PlanDriver(runner)
        driver.admit(source.prompt(4), 3, repetition_penalty=1.3, num_logprobs=2, num_prompt_logprobs=1)
        beam = driver.admit(source.prompt(3), 5, num_candidates=3)
        driver.step()
        driver.step(branches=((beam, beam, 7),))
        results.append([output.token_ids.tolist() for output in driver.outputs])
        assert driver.outputs[0].reports.candidates is not None
    assert results[0] == results[1]
