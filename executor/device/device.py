"""Chooses the device and the number of CPU threads, and prepares the thread that computes."""

import os
import sys
import threading

import torch

from executor.errors import ConfigError

_MAX_SHARED_CORES = 2
_NICENESS = 5


def resolve_device(name: str) -> torch.device:
    """Returns the device of this name. Raises ConfigError if there is no such device."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: {str(error).splitlines()[0]}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f"device: {name!r} is not supported; known: cpu, cuda")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device: {name!r}: {torch.cuda.device_count()} GPUs are here")
    return torch.device("cuda", index)


def resolve_num_threads(num_threads: int | None, num_ranks: int = 1) -> int:
    """Returns the threads of one rank: its part of the configured number, else of the cores that are free.

    These are the cores that this process may use, less one if there are three or more.

    The spare core is for the scheduler and the clients. With two cores, the step gains more from the second core
    than it loses by sharing it, since a step waits for a preempted thread only if that thread holds work (see
    `kernels.cpu.program`).
    """
    if num_threads is None:
        num_cores = len(os.sched_getaffinity(0))
        num_threads = num_cores - 1 if num_cores > _MAX_SHARED_CORES else num_cores
    return max(1, num_threads // num_ranks)


def prepare_compute_thread(device: torch.device, num_threads: int) -> None:
    """Sets the number of threads and their priority. Called first on the thread that computes.

    On the CPU, the scheduler, the clients and gRPC share the cores with the step. They need little time, but delay the
    next plan when they wait for a core. So the compute threads, which have work for milliseconds, get a lower priority.
    """
    torch.set_num_threads(num_threads)
    if device.type == "cpu" and sys.platform == "linux":  # elsewhere, threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)


def device_is_sane(device: torch.device) -> bool:
    """Returns whether the device can still compute after an exception. A GPU with a fault in a kernel cannot.

    A device whose memory is full can.
    """
    try:
        probe = torch.ones(1, device=device)
        return bool((probe + probe).item() == 2.0)
    except torch.OutOfMemoryError:
        return True
    except RuntimeError:
        return False
