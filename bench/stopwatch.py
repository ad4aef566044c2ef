"""Times a piece of device work: the median of many rounds.

A round is a function that does the same work several times, each time on other buffers. Together the buffers are larger
than the last-level cache, so that data comes from memory, as in serving, where a layer runs after all other layers. The
time of one call is the time of the round divided by the number of calls.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

Round = Callable[[], object]

_NUM_WARM_UP_ROUNDS = 3
_MIN_ROUNDS, _MAX_ROUNDS = 5, 200


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: the median, and the best, which is used for ceilings.

    spread_ratio  (90th - 10th percentile) / median; smaller differences are noise
    """

    median_s: float
    best_s: float
    spread_ratio: float
    num_rounds: int


def time_rounds(run: Round, num_calls: int, device: torch.device, budget_s: float, *, in_graph: bool = False) -> Timing:
    """Returns the time of one of the `num_calls` calls of a round, including launches.

    in_graph  the round is captured once and replayed, which excludes the cost of launches, as for a decode in serving;
              everything in it must be capturable

    On a GPU it is the time between events on the current stream. On the CPU it is wall time, or CPU time of the thread
    if torch has one thread only, so that other processes are not counted. Rounds are repeated until budget_s is spent,
    at least five times.
    """
    for _ in range(_NUM_WARM_UP_ROUNDS):
        run()
    if device.type != "cuda":
        return _timing(_host_s(run, budget_s), num_calls)
    torch.cuda.synchronize(device)
    if in_graph:
        run = _captured(run)
        run()
    return _timing(_events_s(run, device, budget_s), num_calls)


def _host_s(run: Round, budget_s: float) -> list[float]:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    samples: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(samples) < _MIN_ROUNDS or (time.perf_counter() < end_s and len(samples) < _MAX_ROUNDS):
        started_s = clock()
        run()
        samples.append(clock() - started_s)
    return samples


def _events_s(run: Round, device: torch.device, budget_s: float) -> list[float]:
    """Queues a few rounds at a time, so that the device never waits for the host."""
    samples: list[float] = []
    event: Any = torch.cuda.Event
    end_s = time.perf_counter() + budget_s
    while len(samples) < _MIN_ROUNDS or (time.perf_counter() < end_s and len(samples) < _MAX_ROUNDS):
        marks: list[Any] = [event(enable_timing=True) for _ in range(_MIN_ROUNDS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        torch.cuda.synchronize(device)
        samples += [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
    return samples


def _captured(run: Round) -> Round:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _timing(samples_s: list[float], num_calls: int) -> Timing:
    median_s = statistics.median(samples_s)
    deciles = statistics.quantiles(samples_s, n=10)
    return Timing(
        median_s / num_calls, min(samples_s) / num_calls, (deciles[-1] - deciles[0]) / median_s, len(samples_s)
    )
