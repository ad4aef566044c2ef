"""Kernels compile for GPUs that are not there: the interpreter accepts code that the compiler refuses."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

from checks.compiled_kernels import (
    BEGIN,
    CAPABILITIES,
    DECODE,
    END,
    KNOWN_SPILLS,
    MERGE,
    OTHER_VERSIONS,
    PAGE,
    PREFILL,
    RESULTS,
    compile_kernels,
    faults,
    folder_of,
    table,
)

if TYPE_CHECKING:
    from pathlib import Path

    from checks.compiled_kernels import Results, Variants

INSTALLED = version("triton")
AGAIN = "run `python -m checks.compiled_kernels`, and read the difference before you commit it"
COMPILED, FIRST_MODEL = ("90",), "bfloat16, 4 x 128"
"""Half a minute for a model. `python -m checks.compiled_kernels` compiles the others too, and for other devices."""
KERNELS = {DECODE, PREFILL, MERGE, "_rotate_and_store", "_norm_rows", "_open_rows", "_close_rows", "_draw_rows"}


@pytest.fixture(scope="module")
def results() -> Results:
    return json.loads(RESULTS.read_text())


def check(capability: str, variants: Variants, triton: str) -> None:
    assert {name.split(" / ")[2] for name in variants} >= KERNELS
    assert faults(capability, variants, triton) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", COMPILED)
def test_each_kernel_fits_and_is_compiled_as_the_file_says(
    capability: str, results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    variants = compile_kernels(capability, num_models=1)
    check(capability, variants, INSTALLED)
    if INSTALLED not in results:
        pytest.skip(f"the file has no results of Triton {INSTALLED}: {AGAIN}")
    recorded = results[INSTALLED][capability]
    assert variants == {name: recorded[name] for name in recorded if name.startswith(FIRST_MODEL)}, AGAIN


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("other", OTHER_VERSIONS)
def test_other_versions_of_triton_compile_the_same(
    other: str, results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not folder_of(other).is_dir() or other not in results:
        pytest.skip(f"no Triton {other} in build/triton, or no results: {AGAIN}")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    variants = compile_kernels("90", folder_of(other))
    check("90", variants, other)
    assert variants == results[other]["90"], AGAIN


def test_the_file_has_no_faults(results: Results) -> None:
    for name, capabilities in results.items():
        assert capabilities.keys() == CAPABILITIES.keys()
        for capability, variants in capabilities.items():
            assert faults(capability, variants, name) == []


def test_nothing_spills_with_the_installed_version(results: Results) -> None:
    assert INSTALLED in results
    assert INSTALLED not in {triton for triton, _, _ in KNOWN_SPILLS}


def test_the_table_of_the_page_is_that_of_the_file(results: Results) -> None:
    shown = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    assert shown.strip() == table(results).strip(), AGAIN


@pytest.mark.parametrize(
    ("kernel", "change", "fault"),
    [
        (DECODE, {"spilled": 8}, "spills 8"),
        (DECODE, {"shared_memory": 228 * 1024}, "shared memory"),
        (DECODE, {"registers": 255}, "programs"),
        (DECODE, {"copy_bytes": 4}, "copies 4"),
        (DECODE, {"groups_in_flight": 1}, "all but 1"),
        (PREFILL, {"products": ["mma.sync"]}, "wgmma"),
    ],
)
def test_faults_are_found(results: Results, kernel: str, change: dict[str, object], fault: str) -> None:
    variants = next(iter(results.values()))["90"]
    name = next(name for name in variants if kernel in name)
    (found, *_) = faults("90", {name: variants[name] | change})
    assert fault in found
