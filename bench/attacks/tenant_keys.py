"""Keys for the tenants of a measurement, made as an operator makes them."""

import subprocess
import sys
from pathlib import Path

from bench.command_line import BenchError


def make_key(tenant: str, path: Path, *roles: str) -> str:
    """Adds a key for a tenant to a file, and returns it. Its role is `generate` if none is given.

    Raises BenchError if the key cannot be made.
    """
    command = [sys.executable, "-m", "quire", "keys", "add", tenant, "--file", str(path), "--tenant", tenant]
    command += [word for role in roles or ("generate",) for word in ("--role", role)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise BenchError(f"no key could be made: {finished.stderr.strip()}")
    return finished.stdout.split()[-1]
