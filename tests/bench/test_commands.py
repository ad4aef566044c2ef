"""The command table: every measurement is listed, parses its flags, and does not need the command line of quire."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__ as entry
from bench.command_line import BenchError, parse_concurrencies
from bench.commands import COMMANDS, Command, run
from bench.serving import serve
from tests.support.paths import ROOT


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_names_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "claims":
        pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as ended:
        run(name, ["--help"])
    assert ended.value.code == 0
    assert "Usage: python -m bench " in capsys.readouterr().out
    assert callable(importlib.import_module(COMMANDS[name].module).main)


def test_listing_has_a_line_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(COMMANDS)
    assert all(len(line) <= 120 for line in lines)


def test_unknown_name_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["teleport"]) == 2
    assert "teleport" in capsys.readouterr().err


def test_failure_is_one_line_and_an_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_measurement.py").write_text(
        "from bench.command_line import BenchError\n"
        "def main(arguments):\n"
        "    error = BenchError(' '.join(arguments))\n"
        "    error.exit_code = 3\n"
        "    raise error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "broken", Command("broken_measurement", "Fails.", ("--preset", "1")))
    assert entry.main(["broken", "--flag", "2"]) == 3
    assert capsys.readouterr().err == "bench broken: --preset 1 --flag 2\n"


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "absent", Command("no_such_package.measurement", "Cannot be imported."))
    with pytest.raises(BenchError, match=r"no_such_package.*pip install 'quire\["):
        run("absent", [])


def test_no_measurement_imports_typer_or_the_command_line_of_quire() -> None:
    pytest.importorskip("matplotlib")
    program = (
        "import importlib, sys\n"
        "from bench.commands import COMMANDS\n"
        "for command in COMMANDS.values(): importlib.import_module(command.module)\n"
        "found = [name for name in sys.modules if name == 'typer' or name.split('.')[:2] == ['quire', 'cli']]\n"
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_gpu_check_needs_few_packages() -> None:
    """A machine with a GPU may lack the packages of the command line and of HTTP."""
    program = (
        "import importlib, sys\n"
        "sys.modules.update(dict.fromkeys(('typer', 'aiohttp', 'structlog', 'grpc_health', 'grpc_reflection')))\n"
        "from bench.commands import COMMANDS\n"
        "for name in ('gpu-check', 'gpu-correctness', 'gpu-serving', 'gpu-transformers', 'kernels'):\n"
        "    importlib.import_module(COMMANDS[name].module)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", ["gpu-bundle", "gpu-environment"])
def test_commands_for_a_bare_machine_need_no_package(name: str) -> None:
    """They have to run where torch or the stubs are missing, to say so."""
    program = (
        "import sys\n"
        "missing = ('torch', 'triton', 'grpc', 'google', 'numpy', 'packaging', 'psutil', 'quire')\n"
        "sys.modules.update(dict.fromkeys(missing))\n"
        "from bench import __main__ as entry\n"
        f"assert entry.main(['{name}', '--help']) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: python -m bench {name}" in done.stdout


# --- flags of serve -------------------------------------------------------------------------------------------------


def test_unknown_flags_go_to_the_server_that_is_started() -> None:
    given, settings = serve.parse(["--spawn", "--num-blocks", "512", "--rounds", "3", "-c", "1,2", "--no-x"])
    assert settings.spawn is not None
    assert settings.spawn[2:] == ("--num-blocks", "512", "--no-x")
    assert (settings.load.num_rounds, settings.load.concurrencies) == (3, (1, 2))
    assert given.name == "serve"


def test_paired_is_serve_in_three_rounds_on_a_started_server() -> None:
    _, settings = serve.parse([*COMMANDS["paired"].preset, "--baseline", "--concurrency", "1,4"])
    assert settings.spawn is not None
    assert (settings.load.num_rounds, settings.load.concurrencies) == (3, (1, 4))
    assert settings.baseline_model == settings.spawn[1]


def test_results_say_how_both_servers_were_started() -> None:
    command = "env VLLM_CPU_KVCACHE_SPACE=2 vllm serve small --max-num-seqs 64"
    peer = ("--peer-url", "http://127.0.0.1:8000", "--peer-model", "small", "--peer-command", command)
    _, settings = serve.parse([*COMMANDS["paired"].preset, "--dtype", "bfloat16", *peer])
    started = serve.how_started(settings)
    assert started["spawn"][-2:] == ("--dtype", "bfloat16")
    assert started["peer"] == {"url": "http://127.0.0.1:8000", "model": "small", "command": tuple(command.split())}
    assert serve.how_started(serve.parse(["--peer-grpc", "h:1"])[1])["peer"] == "h:1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-blocks", "512"), "unknown flags without --spawn"),
        (("--peer-url", "http://127.0.0.1:1"), "go together"),
        (("--peer-command", "serve"), "needs --peer-url"),
        (("--peer-grpc", "h:1", "--peer-url", "http://h", "--peer-model", "m"), "there can be one"),
        (("--url", "127.0.0.1:1", "--spawn"), "--spawn starts one"),
        (("--rounds", "0"), "below 1"),
    ],
)
def test_wrong_flags_are_usage_errors(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        serve.parse(flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "0", "1,x", "-3"])
def test_concurrencies_have_to_be_positive_numbers(text: str) -> None:
    with pytest.raises(BenchError, match="concurrency"):
        parse_concurrencies(text)
