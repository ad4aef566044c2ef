"""Step times of the roofline model, compared with figures computed by hand."""

import pytest

from planning.devices import DEVICES, parse_bytes
from planning.errors import PlanningError
from planning.known_models import KNOWN_MODELS
from planning.roofline import Efficiencies, Roofline
from scheduler.core.inspect.step_load import StepLoad

H100 = DEVICES["h100"]
LLAMA_8B = KNOWN_MODELS["llama-3.1-8b"]
PLAIN = Efficiencies(
    bandwidth=1.0, attention=1.0, compute=1.0, prefill=1.0, link=1.0, overhead_s=0.0, all_reduce_latency_s=0.0
)

TABLE = 128_256 * 4_096
MATRICES = 32 * (2 * 4_096 * 4_096 + 2 * 4_096 * 1_024 + 3 * 4_096 * 14_336)
NORMS = 32 * 2 * 4_096 + 4_096


def test_a_decode_reads_the_weights_and_its_context() -> None:
    cost = Roofline(LLAMA_8B, H100, efficiencies=PLAIN)
    weights_s = 2 * (MATRICES + NORMS + TABLE) / 3.35e12
    kv_s = 1_000 * 131_072 / 3.35e12
    assert cost.step_s(StepLoad(1, 1_000, num_sampled=1)) == pytest.approx(weights_s + kv_s)
    assert weights_s == pytest.approx(4.48e-3, rel=1e-3)


def test_64_decodes_at_1024_tokens_at_the_bandwidth_of_copies() -> None:
    """Reading 15.0 GB of weights and 64 x 1,024 x 131,072 bytes of KV at 3.0 TB/s takes 7.9 ms."""
    reached = Efficiencies(
        bandwidth=3.0 / 3.35, attention=3.0 / 3.35, compute=1.0, prefill=1.0, link=1.0, overhead_s=0.0
    )
    step_s = Roofline(LLAMA_8B, H100, efficiencies=reached).step_s(StepLoad(64, 64 * 1_024, num_sampled=64))
    assert step_s == pytest.approx((15.01e9 + 8.59e9) / 3.0e12, rel=1e-3)


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    cost = Roofline(LLAMA_8B, H100, efficiencies=PLAIN)
    num_pairs = 4_096 * 4_097 // 2
    products_s = 2 * 4_096 * MATRICES / 989e12
    head_s = 2 * TABLE / 3.35e12  # one row: reading the matrix takes longer than multiplying with it
    attention_s = 4 * num_pairs * 32 * 32 * 128 / 989e12
    step_s = cost.step_s(StepLoad(0, 0, 1, 4_096, num_pairs, 1))
    assert step_s == pytest.approx(products_s + head_s + attention_s)


def test_eight_devices_share_the_work_and_add_all_reduces() -> None:
    model = KNOWN_MODELS["llama-3-70b"]
    latency = Efficiencies(
        bandwidth=1.0, attention=1.0, compute=1.0, prefill=1.0, link=0.5, overhead_s=1e-3, all_reduce_latency_s=5e-6
    )
    matrices = 80 * (2 * 8_192 * 8_192 + 2 * 8_192 * 1_024 + 3 * 8_192 * 28_672) / 8
    norms = 80 * 2 * 8_192 + 8_192
    head = 128_256 * 8_192 / 8
    read_s = 2 * (matrices + norms + head) / 3.35e12
    kv_s = 10_000 * 40_960 / 3.35e12
    talk_s = 160 * (5e-6 + 16 * (2 * 7 / 8 * 8_192 * 2) / (450e9 * 0.5))
    step_s = Roofline(model, H100, tensor_parallel=8, efficiencies=latency).step_s(StepLoad(16, 10_000, num_sampled=16))
    assert step_s == pytest.approx(1e-3 + read_s + kv_s + talk_s)


def test_float32_has_its_own_rate_and_twice_the_bytes() -> None:
    cost = Roofline(LLAMA_8B, H100, dtype_bytes=4, efficiencies=PLAIN)
    assert cost.layers_token_s == pytest.approx(2 * MATRICES / 67e12)
    assert cost.decode_pair_s == pytest.approx(2 * 131_072 / 3.35e12)


def test_steps_of_one_batch_are_an_arithmetic_series() -> None:
    """The leaps of the simulation rely on this."""
    cost = Roofline(LLAMA_8B, H100)
    steps_s = [cost.step_s(StepLoad(32, 10_000 + 32 * i, num_sampled=32)) for i in range(4)]
    growth = steps_s[1] - steps_s[0]
    assert growth > 0
    assert steps_s[3] == pytest.approx(steps_s[0] + 3 * growth)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("80GB", 80 * 10**9), ("79.5GiB", int(79.5 * 2**30)), ("1000000", 10**6), ("512 MiB", 2**29), ("2TB", 2 * 10**12)],
)
def test_sizes_are_parsed(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "80gigabytes", "-3GB", "1e9", "80iB", "80 B B"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(PlanningError, match="expected a size"):
        parse_bytes(text)
