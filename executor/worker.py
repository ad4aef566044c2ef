"""The process of a rank other than 0: `python -m executor.worker DESCRIPTOR [SETTINGS]`. Rank 0 tells it what to do.

Rank 0 starts it, or `quire rank` on another machine. Then SETTINGS has what differs there, as a JSON object: "model",
"revision", "num_threads" and "num_local_ranks".

It loads its share of the model and computes the launches that it receives. It has no slots, checks no plan and speaks
no gRPC. Exit codes: 0 rank 0 has closed the channel · 1 the group is lost, or a bug · 2 it could not load its share.
"""

import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from executor.checkpoints.checkpoint import locate
from executor.checkpoints.digest import WeightsCheck
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
from executor.parallel.rendezvous import AddressStore, exchange_over
from executor.share_loading import Say, load_share
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
    host: str

    def share(self, model: ModelConfig) -> Share:
        return share_of(model, self.rank, self.config.tensor_parallel_size)

    def connect(self, share: Share, vocab_size: int, memory_bytes: dict[str, int]) -> Communicator:
        self.channel.send_values(FrameKind.LOADED, memory_bytes)
        self.channel.expect(FrameKind.CONNECT)
        store = AddressStore(exchange_over(self.channel))
        return GlooCommunicator(share, store, vocab_size, self.config.step_timeout_s, self.host)

    def least(self, num_blocks: int) -> int:
        self.channel.send_values(FrameKind.FITTING_BLOCKS, {"num_blocks": num_blocks})
        return int(values_of(self.channel.expect(FrameKind.NUM_BLOCKS))["num_blocks"])


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model of a share, and work to do while there is no step.

    weights_digest  identifies the weights of another machine (`executor.checkpoints.digest`); None on that of rank 0
    """

    model: Model
    idle_work: Iterator[None]
    weights_digest: str | None = None


def main(descriptor: int, settings: dict[str, Any] | None) -> int:
    """Runs the rank until rank 0 ends; returns the exit code."""
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        setup = values_of(channel.expect(FrameKind.SETUP))
        serve(channel, load(channel, setup, settings))
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


def load(channel: Channel, setup: dict[str, Any], settings: dict[str, Any] | None) -> Loaded:
    """Loads the share of this rank."""
    config, directory = ExecutorConfig.from_dict(setup["config"]), Path(setup["directory"])
    logs.configure(f"executor rank {setup['rank']}", config.log_level, config.log_format)

    def say(line: str) -> None:
        channel.send_values(FrameKind.PROGRESS, {"line": line})

    if settings is None:
        return _load(channel, setup, config, directory, setup["host"], say)
    config = _elsewhere(config, settings)
    directory = locate(config.model, config.revision, say)
    with WeightsCheck(directory, is_random=config.load_format == "random") as check:
        loaded = _load(channel, setup, config, directory, channel.host, say)
        return replace(loaded, weights_digest=check.digest())


def _load(
    channel: Channel, setup: dict[str, Any], config: ExecutorConfig, directory: Path, host: str, say: Say
) -> Loaded:
    device = resolve_device(config.device)
    prepare_compute_thread(device, resolve_num_threads(config.num_threads, config.num_local_ranks))
    membership = Membership(channel, config, setup["rank"], host)
    share = load_share(config, directory, device, membership, lambda model: model, {}, say)
    return Loaded(share.make_model(), populate(share.pool))


def _elsewhere(config: ExecutorConfig, settings: dict[str, Any]) -> ExecutorConfig:
    """Returns the settings of the group, with those of another machine in their place."""
    size, num_local_ranks = config.tensor_parallel_size, settings.pop("num_local_ranks")
    return replace(config, **settings, remote_ranks=max(1, size - num_local_ranks))


@torch.inference_mode()
def serve(channel: Channel, loaded: Loaded) -> NoReturn:
    """Computes launches until rank 0 closes the channel. Raises ChannelClosed, ChannelBroken and RankLost."""
    model, idle_work = loaded.model, loaded.idle_work
    channel.send_values(FrameKind.READY, {} if loaded.weights_digest is None else {"digest": loaded.weights_digest})
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
    exit_code = main(int(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else None)
    logging.shutdown()
    os._exit(exit_code)  # at once: threads of the group may still wait for ranks that have ended
