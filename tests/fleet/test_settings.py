"""The devices of a fleet's executors: one rank may have a GPU, several compute on CPUs."""

import pytest

from fleet.parts import Role
from fleet.settings import FleetSettings


@pytest.mark.parametrize(
    ("num_ranks", "num_gpus", "most", "expected"),
    [(1, None, 8.0, 1.0), (1, None, 0.0, 0.0), (1, 0.5, 8.0, 0.5), (1, 0.0, 8.0, 0.0), (4, None, 8.0, 0.0)],
)
def test_an_executor_of_one_rank_reserves_a_gpu_where_nodes_have_any(
    num_ranks: int, num_gpus: float | None, most: float, expected: float
) -> None:
    settings = FleetSettings("test", "ray", "model", tensor_parallel_size=num_ranks, num_gpus=num_gpus)
    assert settings.num_gpus_of(most) == expected


def test_several_ranks_compute_on_cpus_and_reserve_no_gpu() -> None:
    flags = FleetSettings("test", "ray", "model", tensor_parallel_size=4).flags(Role.EXECUTOR)
    assert flags[-4:] == ("--tensor-parallel-size", "4", "--device", "cpu")
    assert "--device" not in FleetSettings("test", "ray", "model").flags(Role.EXECUTOR)
    with pytest.raises(ValueError, match="num_gpus must be 0 with several ranks"):
        FleetSettings("test", "ray", "model", tensor_parallel_size=4, num_gpus=4.0)
