"""The layout of the hub's cache, made from a directory without a download."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from quire.checksums import file_digest

if TYPE_CHECKING:
    from pathlib import Path


def as_snapshot(source: Path, cache: Path) -> Path:
    """Copies a model into a cache; returns its snapshot. Weights are named by SHA-256, as all large files are."""
    snapshot, blobs = cache / "models--a--b" / "snapshots" / "0123abc", cache / "models--a--b" / "blobs"
    for directory in (snapshot, blobs):
        directory.mkdir(parents=True)
    for path in source.iterdir():
        blob = blobs / file_digest(path, "sha256" if path.suffix == ".safetensors" else "git")
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot
