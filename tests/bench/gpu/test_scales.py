"""The choice of what fits the memory of a GPU, with devices of several sizes."""

from types import SimpleNamespace

import pytest
import torch

from bench.gpu import scales
from bench.gpu.random_models import SHAPES
from bench.gpu.scales import FULL, IN_SMALL, NotHere, activation_bytes, fitting_scale, scale_on
from planning.config_file import parse_model_shape

LARGE, SMALL = "llama-3.1-8b", "qwen3-0.6b"
GB = 10**9
WEIGHTS = 8_030_261_248 * 2
KV_TOKEN = 2 * 32 * 8 * 128 * 2


def test_activations_of_8b_equal_the_count_by_hand() -> None:
    model = parse_model_shape(SHAPES[LARGE], LARGE)
    gate_up_and_product, hidden, heads = 3 * 14_336, 4 * 4_096, 2 * (32 + 2 * 8) * 128
    assert activation_bytes(model) == 2 * (gate_up_and_product + hidden + heads)


@pytest.mark.parametrize(("shape", "num_gb"), [(LARGE, 80), (LARGE, 141), (SMALL, 24), (SMALL, 80), (SMALL, 141)])
def test_large_devices_get_the_full_scale(shape: str, num_gb: int) -> None:
    assert fitting_scale(shape, num_gb * GB) == FULL


def test_8b_on_24_gb_gets_a_batch_that_fits() -> None:
    """Checks by hand: weights, activations of a full step and the KV of the batch take less than the memory."""
    scale = fitting_scale(LARGE, 24 * GB)
    assert (scale.batch_size, scale.max_model_len, scale.max_num_batched_tokens) == (16, 2048, 2048)
    assert scale.num_clients == 16
    activations = 2048 * activation_bytes(parse_model_shape(SHAPES[LARGE], LARGE))
    batch = 16 * (960 + 129) * KV_TOKEN
    assert WEIGHTS + activations + batch + GB < 24 * GB
    # The next scale would fill more than the share of the memory that the pool may have.
    assert WEIGHTS + 2 * batch > 0.9 * (24 * GB - activations - GB)


@pytest.mark.parametrize(
    ("num_gb", "message"),
    [(16, "16.0 GB of memory.*16.1 GB of weights.*13.2 GB"), (20, "16.1 GB of weights.*5,888 tokens.*8,712")],
)
def test_8b_on_a_smaller_device_is_refused_with_the_bytes(num_gb: int, message: str) -> None:
    with pytest.raises(NotHere, match=message):
        fitting_scale(LARGE, num_gb * GB)


def test_scale_is_chosen_by_the_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"cuda": 80 * GB, "cuda:1": 24 * GB}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        scales.torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory[device])
    )
    assert scale_on("cuda", LARGE, is_small=False) == FULL
    assert scale_on("cuda:1", LARGE, is_small=False).batch_size == 16
    assert scale_on("cuda:1", LARGE, is_small=True) == IN_SMALL
    with pytest.raises(NotHere, match="needs cuda:2, and torch sees 2 GPUs here"):
        scale_on("cuda:2", LARGE, is_small=False)


def test_cpu_has_any_scale() -> None:
    assert scale_on("cpu", SMALL, is_small=True) == IN_SMALL
    assert scale_on("cpu", SMALL, is_small=False) == FULL
