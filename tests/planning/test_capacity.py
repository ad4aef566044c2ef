"""The capacity of deployments, compared with figures computed by hand."""

import pytest

from planning.capacity import find_capacity, mean_held
from planning.deployment import deploy
from planning.errors import PlanningError
from planning.lengths import Lengths
from planning.roofline import Efficiencies
from planning.settings import DeploymentSettings


def test_capacity_of_an_8b_model_on_one_h100() -> None:
    deployment = deploy("llama-3.1-8b", DeploymentSettings(max_model_len=8192))
    # nine tenths of 80 GB, minus 8,030,261,248 weights of two bytes
    assert deployment.pool_bytes == 72_000_000_000 - 16_060_522_496 == 55_939_477_504
    # a block of 16 tokens of 131,072 bytes is 2 MiB
    assert deployment.block_bytes == 2 * 2**20
    assert deployment.num_blocks == 55_939_477_504 // 2_097_152 == 26_674
    rows = {row.name: row for row in find_capacity(deployment).rows}
    # one block is the null block; a sequence of 8,192 tokens has 512 blocks
    assert rows["8,192 tokens"].num_paged == 26_673 // 512 == 52
    assert rows["1,024 tokens"].num_paged == 26_673 // 64 == 416
    assert {row.num_contiguous for row in rows.values()} == {52}


def test_llama_3_70b_on_eight_h100_holds_nine_sequences_of_128k() -> None:
    settings = DeploymentSettings(tensor_parallel=8, max_model_len=128 * 1024)
    deployment = deploy("llama-3-70b", settings)
    assert deployment.kv_bytes_per_token == 40 * 1024
    assert deployment.max_model_len * deployment.kv_bytes_per_token == 5 * 2**30
    # an eighth of all, and the rest of the embedding
    assert deployment.weight_bytes == 2 * (8_820_367_360 + 128_256 * 8_192 * 7 // 8)
    pool_bytes = 72_000_000_000 - 19_479_412_736
    assert deployment.pool_bytes == pool_bytes
    assert find_capacity(deployment).rows[-3].num_paged == pool_bytes // (5 * 2**30) == 9


def test_floors_equal_figures_by_hand() -> None:
    deployment = deploy("llama-3.1-8b", DeploymentSettings(max_model_len=4096))
    reached = Efficiencies(bandwidth=3.0 / 3.35)
    capacity = find_capacity(deployment, reached)
    assert capacity.decode_floor_s == pytest.approx(15.01e9 / 3.0e12, rel=1e-3)  # 5.0 ms
    row = capacity.rows[1]
    assert (row.num_tokens, row.num_paged) == (1024, 416)
    assert row.decode_floor_s == pytest.approx((15.01e9 + 416 * 1024 * 131_072) / 3.0e12, rel=1e-3)
    num_tokens, floor_s = capacity.prefill_floors_s[1]
    matrices, head = 6_979_321_856, 128_256 * 4_096
    products_s = 2 * (2048 * matrices + head) / (989e12 * 0.6)
    attention_s = 4 * (2048 * 2049 // 2) * 32 * 32 * 128 / (989e12 * 0.4)
    assert num_tokens == 2048
    assert floor_s == pytest.approx(products_s + attention_s)


def test_the_memory_of_a_device_can_be_overridden() -> None:
    deployment = deploy(
        "qwen3-0.6b", DeploymentSettings(device="h200", device_memory="10GiB", gpu_memory_utilization=0.5)
    )
    assert deployment.pool_bytes == 5 * 2**30 - 2 * 596_049_920


def test_a_given_number_of_blocks_is_used() -> None:
    deployment = deploy("llama-3.1-8b", DeploymentSettings(num_blocks=100))
    assert (deployment.num_blocks, deployment.num_usable_blocks) == (100, 99)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanningError, match=r"141\.1 GB of weights on each of 1 .* 72\.0 GB for weights and KV"):
        deploy("llama-3-70b", DeploymentSettings())


def test_mean_tokens_and_blocks_that_a_sequence_holds() -> None:
    """A prompt of 10 and 4 outputs hold 10, 11, 12 and 13 tokens, in 3, 3, 3 and 4 blocks of 4."""
    num_tokens, num_blocks = mean_held(Lengths("fixed", 10.5, 4.5, 1e-9, 1024), 2048, 4)
    assert num_tokens == pytest.approx((10 + 11 + 12 + 13) / 4)
    assert num_blocks == pytest.approx((3 + 3 + 3 + 4) / 4)
