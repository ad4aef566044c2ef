"""Tells how much of a checkpoint has been downloaded: the hub's own progress bars are silent without a terminal."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

INTERVAL_S = 10.0


@contextmanager
def saying_progress(model: str, say: Callable[[str], None], interval_s: float = INTERVAL_S) -> Iterator[None]:
    """Calls `say` with a line every few seconds if the files of a hub id have grown."""
    ended, directory = threading.Event(), _cache_of(model)
    last = _num_bytes(directory)

    def say_growth() -> None:
        nonlocal last
        while not ended.wait(interval_s):
            if (now := _num_bytes(directory)) != last:
                last = now
                say(f"downloading {model}: {now / 2**20:,.0f} MiB so far")

    thread = threading.Thread(target=say_growth, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _cache_of(model: str) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    return Path(HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model") / "blobs"


def _num_bytes(directory: Path) -> int:
    """Returns the size of the files, downloaded or not yet complete, which may be renamed meanwhile."""
    total = 0
    with suppress(OSError):
        for path in directory.iterdir():
            with suppress(OSError):
                total += path.stat().st_size
    return total
