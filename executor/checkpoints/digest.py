"""A digest of a model's weights, so that a scheduler notices other weights under the same name.

Reading many gigabytes would take as long as loading them. So the digest covers config.json and, of each safetensors
file, its name, its size, its header (the names, shapes and places of all tensors) and SAMPLES pieces of PIECE_BYTES of
its contents at even distances.

It finds another model, revision, dtype or quantisation, and weights that were trained further, because training changes
all of them. It can miss a change of few weights: one tensor that was edited between two samples, or bits that flipped.
It is no proof against an attacker who can write to the files.
"""

import hashlib
from pathlib import Path
from typing import BinaryIO

from executor.checkpoints.checkpoint import weight_files

SAMPLES = 64
PIECE_BYTES = 4096
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, as an integer of 8 bytes."""


def weights_digest(directory: Path, *, is_random: bool) -> str:
    """Returns the digest as 64 hexadecimal digits.

    Random weights depend only on config.json, because the seed of a tensor is its name. Raises CheckpointError.
    """
    digest = hashlib.sha256(b"random" if is_random else b"safetensors")
    _add(digest, (directory / "config.json").read_bytes())
    for path in () if is_random else weight_files(directory):
        _add(digest, path.name.encode())
        with path.open("rb") as file:
            _add_file(digest, file, path.stat().st_size)
    return digest.hexdigest()


def _add_file(digest: "hashlib._Hash", file: BinaryIO, num_bytes: int) -> None:
    _add(digest, str(num_bytes).encode())
    header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    _add(digest, file.read(header_bytes))
    first, last = _LENGTH_BYTES + header_bytes, max(num_bytes - PIECE_BYTES, 0)
    for index in range(SAMPLES):
        file.seek(first + max(last - first, 0) * index // (SAMPLES - 1))
        _add(digest, file.read(PIECE_BYTES))


def _add(digest: "hashlib._Hash", data: bytes) -> None:
    """Adds a field with its length, so that no two lists of fields give the same bytes."""
    digest.update(len(data).to_bytes(_LENGTH_BYTES, "little"))
    digest.update(data)
