"""Other weights under the same name end a stream with the reason."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from quire import OtherModelError
from quire.checksums import MANIFEST
from tests.support.e2e.stack import TINY, Stack
from tests.support.e2e.streams import Job, StreamGroup
from tests.support.e2e.waiting import until


@pytest.mark.exhaustive
async def test_other_weights_under_the_same_name_never_continue_a_stream(tmp_path: Path) -> None:
    """The files change, and both services come back."""
    directory = tmp_path / "tiny"
    shutil.copytree(TINY, directory)
    (directory / MANIFEST).unlink()
    async with Stack(model=str(directory)) as stack, stack.client() as client:
        name = (await client.server_info()).model_name
        job = Job("Once upon a time", {"temperature": 0, "max_tokens": 1500, "ignore_eos": True})
        streams = StreamGroup(client, [job]).start()
        await streams.until(lambda streams: streams.all_have(5))

        weights = load_file(directory / "model.safetensors")
        weights["model.norm.weight"][0] *= 1.5
        save_file(weights, tmp_path / "new")
        os.replace(tmp_path / "new", directory / "model.safetensors")
        killed = [stack.send(service, signal.SIGKILL) for service in ("scheduler", "executor")]

        (failure,) = await streams.failures()
        assert isinstance(failure, OtherModelError)
        assert "the server has another model or other weights than the one that began the stream" in str(failure)
        assert client.num_resumptions == 0
        await until(lambda: not {stack.pid("scheduler"), stack.pid("executor")} & {None, *killed})
        assert (await client.server_info()).model_name == name
        assert (await client.complete("Once upon a time", max_tokens=3)).text
