"""The command line against a scripted server, and its exit codes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

import quire.cli.main
from quire.addresses import with_port
from quire.v1 import admin_pb2, generation_pb2
from quire.version import build_version
from tests.support.client.fake_generation import FakeGeneration
from tests.support.client.scripted_server import ScriptedServer, delta, finished, refusal, replies, started

COMMANDS = ["serve", "scheduler", "executor", "gateway", "generate", "kv", "demo", "plan", "simulate"]
COMMANDS += ["bench", "bench serve", "bench sharing", "bench prediction"]


def invoke(*words: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(quire.cli.main.app, words, input=stdin)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_the_help_lists_every_command() -> None:
    output = invoke("--help").output
    assert all(command in output for command in COMMANDS if " " not in command)


def test_the_version_is_that_of_the_package() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.output) == (0, f"quire {build_version()}\n")


def test_the_command_line_imports_neither_torch_nor_the_services() -> None:
    program = (
        "import sys, quire.cli.main, quire.cli.demo, bench.commands, bench.serving.serve, bench.sharing.command\n"
        "heavy = {'torch', 'transformers', 'scheduler.main', 'executor.main'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("command", ["serve", "scheduler", "executor"])
def test_a_service_that_logs_as_json_refuses_its_flags_as_json(command: str) -> None:
    result = invoke(command, "--log-format", "json", "--model", "/no/such")
    assert result.exit_code == 2
    record = json.loads(result.stderr)
    assert record["event"].startswith("/no/such: ")
    assert (record["level"], record["service"]) == ("critical", "supervisor" if command == "serve" else command)


def test_generate_prints_the_text(server: ScriptedServer) -> None:
    server.script = replies(started(), delta(0, "Once", 1), delta(0, " upon", 2), finished(0))
    result = invoke(
        *("generate", "a prompt", "--address", server.address, "--max-tokens", "5", "--temperature", "0"),
        *("--stop", "x", "--stop", "y", "-n", "1", "--seed", "9", "--top-k", "4", "--ignore-eos"),
    )
    assert (result.exit_code, result.stdout) == (0, "Once upon\n")
    assert server.requests == [
        generation_pb2.GenerateRequest(
            text="a prompt",
            resumable=True,
            sampling=generation_pb2.SamplingParams(temperature=0.0, seed=9, n=1, top_k=4),
            stopping=generation_pb2.StoppingParams(max_tokens=5, stop=["x", "y"], ignore_eos=True),
        )
    ]


def test_generate_sends_every_option(server: ScriptedServer) -> None:
    result = invoke(
        *("generate", "p", "--address", server.address, "--beam-width", "4", "--n", "2", "--length-penalty", "-0.5"),
        *("--early-stopping", "--repetition-penalty", "1.5", "--frequency-penalty", "0.5", "--presence-penalty=-1"),
        *("--logit-bias", "17=-5", "--logit-bias", "4=2.5", "--allowed-token-id", "4", "--allowed-token-id", "17"),
        *("--logprobs", "0", "--prompt-logprobs", "3", "--stop-token-id", "9", "--include-stop", "--cache-salt", "s"),
    )
    assert result.exit_code == 0
    assert server.requests == [
        generation_pb2.GenerateRequest(
            text="p",
            resumable=True,
            cache_salt="s",
            sampling=generation_pb2.SamplingParams(
                beam_width=4,
                n=2,
                length_penalty=-0.5,
                early_stopping=True,
                repetition_penalty=1.5,
                frequency_penalty=0.5,
                presence_penalty=-1,
                logit_bias={17: -5, 4: 2.5},
                allowed_token_ids=[4, 17],
            ),
            stopping=generation_pb2.StoppingParams(stop_token_ids=[9], include_stop=True),
            output=generation_pb2.OutputParams(logprobs=0, prompt_logprobs=3),
        )
    ]


@pytest.mark.parametrize("entry", ["", "5", "x=1", "5=", "5=y", "=1"])
def test_a_logit_bias_must_be_an_id_and_a_value(server: ScriptedServer, entry: str) -> None:
    result = invoke("generate", "p", "--logit-bias", entry, "--address", server.address)
    assert (result.exit_code, server.requests) == (2, [])
    assert "ID=VALUE" in result.stderr


def test_values_that_cannot_be_sent_are_reported_by_field(server: ScriptedServer) -> None:
    result = invoke("generate", "p", "--logit-bias=-1=5", "--seed", "-1", "--address", server.address)
    assert (result.exit_code, server.requests) == (2, [])
    assert [line.split(":")[0].strip() for line in result.stderr.splitlines()[1:]] == [
        "sampling.seed",
        "sampling.logit_bias",
    ]


def test_generate_continues_a_stream_and_says_so(server: ScriptedServer) -> None:
    fake = FakeGeneration([[1, 2, 3]], num_prompt_logprobs=0, seed=1)

    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        for response in fake.stream(request)[: 2 if len(server.requests) == 1 else None]:
            yield response
        if len(server.requests) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is draining")

    server.script = script
    result = invoke("generate", "p", "--address", server.address)
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "<1><2><3>")
    assert result.stderr.splitlines() == [
        "quire: the stream broke off (the server is draining): trying to continue it for up to 60 s",
        "quire: the stream continues",
    ]


def test_generate_can_be_told_not_to_continue(server: ScriptedServer) -> None:
    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield started()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is draining")

    server.script = script
    result = invoke("generate", "p", "--address", server.address, "--resume-timeout-s", "0")
    assert (result.exit_code, result.stderr) == (69, "quire: the server is draining\n")
    assert [request.resumable for request in server.requests] == [False]


def test_a_refusal_has_a_line_for_each_field(server: ScriptedServer) -> None:
    server.script = refusal(grpc.StatusCode.INVALID_ARGUMENT, "no", {"sampling.n": "too many", "text": "too long"})
    result = invoke("generate", "p", "--address", server.address)
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "quire: the request was refused", "  sampling.n: too many", "  text: too long",
    ]  # fmt: skip


@pytest.mark.parametrize("words", [[], ["-"]])
def test_generate_reads_its_prompt_from_standard_input(server: ScriptedServer, words: list[str]) -> None:
    assert invoke("generate", *words, "--address", server.address, stdin="two\nlines\n").exit_code == 0
    assert server.requests == [generation_pb2.GenerateRequest(text="two\nlines", resumable=True)]


def test_a_prompt_that_is_not_text_is_refused(server: ScriptedServer) -> None:
    result = CliRunner().invoke(quire.cli.main.app, ("generate", "--address", server.address), input=b"Once \xff")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "the prompt is not text" in result.stderr
    assert server.requests == []


@pytest.mark.parametrize("words", ["--help", "--version", "plan llama-3.1-8b --json"])
@pytest.mark.parametrize(
    ("redirection", "told"),
    [(">/dev/full", "quire: cannot write: No space left on device\n"), ("| true", "")],
    ids=["full", "closed"],
)
def test_an_output_that_cannot_be_written_is_at_most_one_line(words: str, redirection: str, told: str) -> None:
    """Python writes what is left in a buffer when a process ends, so these are processes."""
    command = f"set -o pipefail; unset PYTHONUNBUFFERED; {sys.executable} -m quire {words} {redirection}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, told)


def test_a_terminal_of_unknown_size_is_no_reason_to_print_nothing() -> None:
    command = [sys.executable, "-m", "quire", "plan", "llama-3.1-8b"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "0"})
    assert "Floors" in ended.stdout


def test_statistics_that_cannot_be_written_do_not_end_a_completion(server: ScriptedServer) -> None:
    server.script = replies(started(), delta(0, "Once", 1), finished(0))
    command = f"{sys.executable} -m quire generate p --stats --address {server.address} 2>/dev/full"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "Once\n")


def test_generate_can_chat(server: ScriptedServer) -> None:
    assert invoke("generate", "hi", "--chat", "--address", server.address).exit_code == 0
    assert invoke("generate", "hi", "--system", "be brief", "--address", server.address).exit_code == 0
    sent = [[(part.role, part.content) for part in request.chat.messages] for request in server.requests]
    assert sent == [[("user", "hi")], [("system", "be brief"), ("user", "hi")]]


def test_generate_as_json(server: ScriptedServer) -> None:
    result = invoke("generate", "p", "--json", "--address", server.address)
    assert [json.loads(line)["event"] for line in result.stdout.splitlines()] == ["started", "finished"]


@pytest.mark.parametrize(
    ("code", "retry_after_s", "exit_code"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, None, 2),
        (grpc.StatusCode.OUT_OF_RANGE, None, 2),
        (grpc.StatusCode.UNAVAILABLE, None, 69),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 0.5, 75),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, None, 1),
        (grpc.StatusCode.DEADLINE_EXCEEDED, None, 75),
        (grpc.StatusCode.INTERNAL, None, 1),
    ],
)
def test_a_refusal_is_one_line_and_an_exit_code(
    server: ScriptedServer, code: grpc.StatusCode, retry_after_s: float | None, exit_code: int
) -> None:
    server.script = refusal(code, "for a reason", retry_after_s=retry_after_s)
    result = invoke("generate", "p", "--address", server.address)
    assert result.exit_code == exit_code
    assert result.stderr.splitlines() == ["quire: for a reason"]


def test_an_address_without_a_server_is_unavailable() -> None:
    result = invoke("kv", "--address", with_port("127.0.0.1:0"))
    assert result.exit_code == 69
    assert result.stderr.startswith("quire: ")
    assert len(result.stderr.splitlines()) == 1


def test_kv_prints_the_pool_as_text_or_json(server: ScriptedServer) -> None:
    server.block_map = admin_pb2.GetBlockMapResponse(
        block_size=4,
        blocks=[admin_pb2.BlockInfo(state=admin_pb2.BLOCK_STATE_FREE)] * 3
        + [admin_pb2.BlockInfo(state=admin_pb2.BLOCK_STATE_ACTIVE, ref_count=1)],
        sequences=[admin_pb2.SequenceInfo(request_id="me", num_tokens=3, block_table=[3])],
    )
    drawn = invoke("kv", "--address", server.address)
    assert drawn.exit_code == 0
    assert "··■" in drawn.stdout
    assert "me[0]" in drawn.stdout
    read = json.loads(invoke("kv", "--json", "--address", server.address).stdout)
    assert [block["state"] for block in read["blocks"]] == ["free", "free", "free", "active"]
    assert read["sequences"][0]["block_table"] == [3]


@pytest.mark.parametrize(
    ("address", "told"),
    [("", "empty"), ("localhost", "'localhost'"), ("http://127.0.0.1:8000", "'http://127.0.0.1:8000'")],
)
def test_an_address_that_grpc_would_take_for_another_is_a_usage_error(address: str, told: str) -> None:
    """A variable of a script may be empty; without a port, gRPC would call port 443."""
    for command in (["generate", "p"], ["kv"], ["drain"]):
        result = invoke(*command, "--address", address)
        assert (result.exit_code, result.stderr) == (2, f"quire: address must be host:port or unix:path, not {told}\n")


@pytest.mark.parametrize("command", ["serve", "scheduler", "executor", "demo"])
def test_an_unknown_model_directory_fails_before_anything_starts(command: str) -> None:
    result = invoke(command, "--model", "./no/such/place")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "quire: ./no/such/place: no such directory, and no hub id (organisation/name)"
    ]


def test_a_model_must_be_a_directory_with_a_config(tmp_path: Path) -> None:
    assert "has no config.json" in invoke("serve", "--model", str(tmp_path)).stderr
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert "a file; expected" in invoke("serve", "--model", str(file)).stderr


@pytest.mark.parametrize("flag", ["--listen", "--http-listen", "--executor", "--metrics-address"])
def test_a_port_in_use_fails_before_anything_starts(tmp_path: Path, flag: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    flags = dict.fromkeys(("--listen", "--http-listen", "--executor", "--metrics-address"), "127.0.0.1:0")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        flags[flag] = f"127.0.0.1:{listener.getsockname()[1]}"
        words = [word for pair in flags.items() for word in pair]
        result = invoke("serve", "--model", str(tmp_path), *words)
    assert result.exit_code == 3
    assert f"cannot listen on {flags[flag]}" in result.stderr
    assert flag.removeprefix("--").replace("-", "_") in result.stderr


def test_a_wrong_value_is_a_usage_error() -> None:
    result = invoke("executor", "--model", "org/model", "--block-size", "0")
    assert result.exit_code == 2
    assert "block_size" in result.stderr


@pytest.mark.parametrize("text", ["", "0", "1,x", "-4"])
def test_bench_refuses_a_bad_list_of_concurrencies(text: str) -> None:
    result = invoke("bench", "serve", "-c", text)
    assert result.exit_code == 1
    assert "concurrency" in result.stderr


@pytest.mark.parametrize("words", [["--peer-url", "http://127.0.0.1:1"], ["--peer-model", "toy"]])
def test_a_peer_needs_both_its_address_and_its_model_name(words: list[str]) -> None:
    result = invoke("bench", "serve", *words)
    assert result.exit_code == 2
    assert "go together" in result.stderr


def test_a_grammar_comes_from_a_file_or_a_flag(server: ScriptedServer, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "null"}')
    for words in (
        ["--json-schema", str(schema)],
        ["--json-object"],
        ["--regex", "a+"],
        ["--choice", "a", "--choice", "b"],
    ):
        invoke("generate", "p", "--address", server.address, *words)
    sent = [request.structured_output for request in server.requests]
    choices = generation_pb2.StructuredOutput.Choices(texts=["a", "b"])
    assert sent == [
        generation_pb2.StructuredOutput(json_schema='{"type": "null"}'),
        generation_pb2.StructuredOutput(json_object=True),
        generation_pb2.StructuredOutput(regex="a+"),
        generation_pb2.StructuredOutput(choice=choices),
    ]


def test_a_schema_that_cannot_be_read_ends_the_command(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("absent", "binary"):
        result = invoke("generate", "p", "--address", server.address, "--json-schema", str(tmp_path / name))
        assert (result.exit_code, name in result.stderr) == (2, True)
    assert not server.requests


def test_two_grammars_are_a_violation(server: ScriptedServer) -> None:
    result = invoke("generate", "p", "--address", server.address, "--regex", "a", "--json-object")
    assert "structured_output" in result.stderr
    assert not server.requests


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("generate <&-", "the prompt is missing, and standard input is closed"),
        ("generate hello --address unix:/nowhere >&-", "failed to connect"),
    ],
)
def test_closed_streams_are_no_bug(words: str, told: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m quire {words}"], capture_output=True, text=True, timeout=120
    )
    assert "Traceback" not in done.stderr
    assert told in done.stderr
