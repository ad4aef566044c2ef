"""The process of a rank other than 0: `python -m executor.worker DESCRIPTOR`. Rank 0 starts it and tells it what to do.

It loads its share of the model and computes the launches that it receives. It has no slots, checks no plan and speaks
no gRPC. Exit codes: 0 rank 0 has closed the channel · 1 the group is lost, or a bug · 2 it could not load its share.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from executor.checkpoints.model_config import ModelConfig
from executor.checkpoints.shares import Share, share_of
from executor.config import ExecutorConfig
from executor.device.device import prepare_compute_thread, resolve_device, resolve_num_threads
from executor.errors import CheckpointError, ConfigError, OutOfMemory, RankLost
from executor.models.communicator import Communicator
from executor.models.model import Model
from executor.parallel.channel import Channel, ChannelBroken, ChannelClosed, FrameKind, values_of
from executor.parallel.gloo import GlooCommunicator
from executor.parallel.launch_frame import copies_from_bytes, from_bytes
from executor.share_loading import load_share
from kernels.memory import populate
from quire import logs

_log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_LOST = 1
EXIT_CONFIG = 2


@dataclass(frozen=True, slots=True)
class Membership:
    """The group as a rank other than 0 sees it: rank 0 collects and decides. Implements `Ranks`."""

    channel: Channel
    config: ExecutorConfig
    rank: int
    store: Path

    def share(self, model: ModelConfig) -> Share:
        return share_of(model, self.rank, self.config.tensor_parallel_size)

    def connect(self, share: Share, vocab_size: int, memory_bytes: dict[str, int]) -> Communicator:
        self.channel.send_values(FrameKind.LOADED, memory_bytes)
        self.channel.expect(FrameKind.CONNECT)
        return GlooCommunicator(share, self.store, vocab_size, self.config.step_timeout_s)

    def least(self, num_blocks: int) -> int:
        self.channel.send_values(FrameKind.FITTING_BLOCKS, {"num_blocks": num_blocks})
        return int(values_of(self.channel.expect(FrameKind.NUM_BLOCKS))["num_blocks"])


def main(descriptor: int) -> int:
    """Runs the rank until rank 0 ends; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 handles them; this rank ends when it does
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        setup = values_of(channel.expect(FrameKind.SETUP))
        serve(channel, *load(channel, setup))
    except ChannelClosed:
        return EXIT_OK
    except (ConfigError, CheckpointError, OutOfMemory) as error:
        return _fail(channel, error, EXIT_CONFIG)
    except (RankLost, ChannelBroken) as error:
        _log.warning("this rank ends, because the group is lost: %s", error)
        return EXIT_LOST
    except Exception as error:  # noqa: BLE001  # rank 0 says it, and the group ends
        _log.exception("this rank ends")
        return _fail(channel, RankLost(f"{type(error).__name__}: {error}"), EXIT_LOST)


def load(channel: Channel, setup: dict[str, Any]) -> tuple[Model, Iterator[None]]:
    """Loads the share of this rank. Returns its model, and work to do while there is no step."""
    config, rank = ExecutorConfig.from_dict(setup["config"]), setup["rank"]
    logs.configure(f"executor rank {rank}", config.log_level, config.log_format)
    device = resolve_device(config.device)
    prepare_compute_thread(device, resolve_num_threads(config.num_threads, config.tensor_parallel_size))

    def say(line: str) -> None:
        channel.send_values(FrameKind.PROGRESS, {"line": line})

    membership = Membership(channel, config, rank, Path(setup["store"]))
    share = load_share(config, Path(setup["directory"]), device, membership, lambda model: model, {}, say)
    return share.make_model(), populate(share.pool)


@torch.inference_mode()
def serve(channel: Channel, model: Model, idle_work: Iterator[None]) -> NoReturn:
    """Computes launches until rank 0 closes the channel. Raises ChannelClosed, ChannelBroken and RankLost."""
    channel.send_values(FrameKind.READY, {})
    is_idle = True
    while True:
        while is_idle and not channel.has_frame():
            is_idle = next(idle_work, ...) is None
        kind, payload = channel.receive()
        if kind is FrameKind.COPY_BLOCKS:
            model.copy_blocks(copies_from_bytes(payload))
        elif kind is FrameKind.FORWARD:
            model.forward(from_bytes(payload))
        else:
            raise ChannelBroken(f"sends {kind.name} in place of a launch")


def _fail(channel: Channel, error: Exception, exit_code: int) -> int:
    try:
        channel.send_values(FrameKind.FAILED, {"kind": type(error).__name__, "text": str(error)})
    except (ChannelClosed, ChannelBroken):
        return EXIT_LOST
    return exit_code


if __name__ == "__main__":
    exit_code = main(int(sys.argv[1]))
    logging.shutdown()
    os._exit(exit_code)  # at once: threads of the group may still wait for ranks that have ended
