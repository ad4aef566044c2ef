"""Runs scripts of the page in Node, with a document that only keeps texts. Browsers run them in test_browser.py."""

import json
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node")

DOCUMENT = """
const elements = {};
globalThis.document = {
  getElementById: (id) => (elements[id] ??= { id, textContent: "", style: {} }),
};
const texts = (...ids) => ids.map((id) => document.getElementById(id).textContent);
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the page's scripts, which Node reads as modules."""
    folder = tmp_path_factory.mktemp("scripts")
    for script in resources.files("scheduler.live").joinpath("static").iterdir():
        if script.name.endswith(".js"):
            (folder / script.name).write_text(script.read_text())
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def run(scripts: Path, program: str) -> Any:
    """Runs a module, which prints one JSON value, and returns the value."""
    path = scripts / "program.js"
    path.write_text(DOCUMENT + program)
    done = subprocess.run(["node", str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_prefill_has_a_share_until_only_the_newest_token_is_missing(scripts: Path) -> None:
    sequences = [(100_000, 0), (100_000, 41_472), (100_000, 99_840), (100_001, 100_000), (200, 150), (200, 199)]
    program = f"""
        import {{ prefillShare }} from "./model.js";
        const shares = {json.dumps(sequences)}.map(([tokens, computed]) => prefillShare({{ tokens, computed }}));
        console.log(JSON.stringify(shares));
    """
    assert run(scripts, program) == [0, 0.41472, 0.9984, None, 0.75, None]


def test_rates_are_shown_while_each_step_takes_longer_than_their_usual_span(scripts: Path) -> None:
    """A frame comes after each step, and a step of a long prompt takes seconds."""
    program = """
        import { Numbers } from "./numbers.js";
        const numbers = new Numbers();
        const frame = (steps, tokens) => ({ server: {}, numbers: { steps, generated_tokens: tokens } });
        const shown = [];
        for (let step = 1; step <= 4; step++) {
            numbers.show(frame(step, 20 * step), 5000 * step);
            shown.push(texts("speed", "speed-of"));
        }
        for (let step = 1; step <= 40; step++) numbers.show(frame(4 + step, 80 + 20 * step), 20000 + 100 * step);
        shown.push(texts("speed", "speed-of"));
        console.log(JSON.stringify(shown));
    """
    slow = ["4", "5.0 s a step"]
    assert run(scripts, program) == [["", ""], slow, slow, slow, ["200", "10 steps a second"]]


def test_rates_of_a_scheduler_that_started_again_are_not_negative(scripts: Path) -> None:
    """It has computed more steps than the one before, for fewer tokens."""
    program = """
        import { Numbers } from "./numbers.js";
        const numbers = new Numbers();
        const frame = (steps, tokens) => ({ server: {}, numbers: { steps, generated_tokens: tokens } });
        const readings = [[10, 5000], [12, 30], [22, 130]];
        readings.forEach(([steps, tokens], i) => numbers.show(frame(steps, tokens), 500 * i));
        console.log(JSON.stringify(texts("speed", "speed-of")));
    """
    assert run(scripts, program) == ["200", "20 steps a second"]
