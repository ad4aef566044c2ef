"""The folder of results of one device and day: one JSON file for each phase.

A file is replaced as a whole, while its phase runs and when it ends. So phases of separate calls add up, and a phase
that dies leaves the files of the others.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu.phases import PhaseResult
from bench.machine import slug
from bench.report import save


def folder_name(machine: dict[str, Any], *, is_small: bool) -> str:
    """Returns DEVICE-DATE for a description of the machine, and DEVICE-small-DATE for small phases."""
    return f"{slug(machine['device'])}{'-small' if is_small else ''}-{machine['date'][:10]}"


def save_record(folder: Path, name: str, machine: dict[str, Any], result: PhaseResult) -> None:
    """Writes the file of one phase, PHASE.json. Raises OSError."""
    save(folder / f"{slug(name)}.json", {"phase": name, "machine": machine, **asdict(result)})


def load_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the records of a folder by the name of the phase, in the order of their starts.

    Files that are not records, and a missing folder, are ignored.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(record, dict) and {"phase", "machine", "status"} <= record.keys():
            found.append(record)
    found.sort(key=lambda record: str(record["machine"]["date"]))
    return {record["phase"]: record for record in found}
