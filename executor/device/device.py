"""The device: which one, and how many CPU threads."""

import os
import sys
import threading

import torch

from executor.errors import ConfigError

_MAX_SHARED_CORES = 2
_NICENESS = 5


def resolve_device(name: str) -> torch.device:
    """Raises ConfigError if there is no such device."""
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


def resolve_num_threads(num_threads: int | None) -> int:
    """All cores this process may use; from three on, one is left to the scheduler and the clients.

    On two cores the second one is worth more to the step, although both sides then share it: a thread that loses its
    core is not waited for unless it holds work (`kernels.cpu.program`).
    """
    if num_threads is not None:
        return num_threads
    num_cores = len(os.sched_getaffinity(0))
    return num_cores - 1 if num_cores > _MAX_SHARED_CORES else num_cores


def prepare_compute_thread(device: torch.device, num_threads: int) -> None:
    """Called on the thread that is to compute, before it does: how many threads help it, and whom they give way to.

    On the CPU scheduler, clients and gRPC share the cores with the step. They need little, but at once: what they wait
    for a core, the next plan comes later. So those who compute, and have work for milliseconds, are a little nicer.
    """
    torch.set_num_threads(num_threads)
    if device.type == "cpu" and sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)


def device_is_sane(device: torch.device) -> bool:
    """After an exception: can the device still compute? A GPU that had a fault in a kernel cannot."""
    try:
        probe = torch.ones(1, device=device)
        return bool((probe + probe).item() == 2.0)
    except RuntimeError:
        return False
