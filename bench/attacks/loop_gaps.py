"""Measures how long one request can hold the scheduler's event loop: the longest gap between two turns of a task.

    python -m bench loop-gaps                      # every request at its bound, three times each

The scheduler runs in this process, in front of an executor that computes nothing and takes a prompt of a million
tokens; for answers with log-probabilities, in front of the embedded model. Requests come from another process.

A request is sent as it is, and with so many output tokens that it is refused when its prompt is known. The second gap
is that of parsing and tokenising alone; the first one also has the core's first plan for the prompt.
"""

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import signal
import socket
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

import grpc

from bench.command_line import BenchError, Parser, at_least
from bench.server_process import child_process
from quire.model_path import embedded_model
from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub

_MIB = 1 << 20
_VOCAB_SIZE = 1664
_MAX_MODEL_LEN = _MIB + 16
_BEAT_S = 0.001
_TIMEOUT_S = 120.0
_TOO_MANY = 2**31
_WORDS = "once upon a time there was a little fox "
_ONE = pb.StoppingParams(max_tokens=1)


def _text(num_bytes: int) -> str:
    return (_WORDS * (num_bytes // len(_WORDS) + 1))[:num_bytes]


def _chat(num_bytes: int) -> list[dict[str, str]]:
    """Returns 1,024 messages, the most that a chat may have, with this size in all."""
    content = _text(num_bytes // 1024 - len("assistant"))
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i in range(1024)]


def _numbers(count: int) -> list[int]:
    return [i * 7919 % _VOCAB_SIZE for i in range(count)]


def _chat_message(num_bytes: int) -> pb.ChatPrompt:
    return pb.ChatPrompt(
        messages=[pb.ChatMessage(role=each["role"], content=each["content"]) for each in _chat(num_bytes)]
    )


GRPC: dict[str, Callable[[], pb.GenerateRequest]] = {
    "ordinary": lambda: pb.GenerateRequest(text=_text(100), stopping=_ONE),
    "text, 4 MiB": lambda: pb.GenerateRequest(text=_text(4 * _MIB - 100), stopping=_ONE),
    "text, 2 MiB": lambda: pb.GenerateRequest(text=_text(2 * _MIB), stopping=_ONE),
    "text, 256 KiB": lambda: pb.GenerateRequest(text=_text(_MIB // 4), stopping=_ONE),
    "token ids, 1,048,576": lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=_numbers(_MIB)), stopping=_ONE),
    "token ids, 131,072": lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=_numbers(_MIB // 8)), stopping=_ONE),
    "chat, 1,024 messages, 2 MiB": lambda: pb.GenerateRequest(chat=_chat_message(2 * _MIB - 32_768), stopping=_ONE),
    "chat, one message, 2 MiB, escapes": lambda: pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="\x01" * (_MIB - 1024))]), stopping=_ONE
    ),
    "chat, one message, 512 Ki tokens": lambda: pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="\x01" * (_MIB // 2 - 1024))]), stopping=_ONE
    ),
    "chat, 1,024 messages, 256 KiB": lambda: pb.GenerateRequest(chat=_chat_message(_MIB // 4), stopping=_ONE),
}
"""Requests over gRPC, the largest that pass each bound and some that real models can take."""

HTTP: dict[str, Callable[[], dict[str, Any]]] = {
    "HTTP, text, 1 MiB": lambda: {"text": _text(_MIB - 200), "stopping": {"max_tokens": 1}},
    "HTTP, chat, 1 MiB": lambda: {"chat": {"messages": _chat(_MIB * 9 // 10)}, "stopping": {"max_tokens": 1}},
    "HTTP, 64,000 marks": lambda: {"text": "x", "stopping": {"stop_token_ids": [[0]] * 31_980}},
}

LOGPROBS: dict[str, Callable[[], pb.GenerateRequest]] = {
    "ordinary": GRPC["ordinary"],
    "prompt_logprobs=20, 2,000 tokens": lambda: pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=_numbers(2000)), stopping=_ONE, output=pb.OutputParams(prompt_logprobs=20)
    ),
    "logprobs=20, n=16, 64 tokens": lambda: pb.GenerateRequest(
        text="A fox",
        sampling=pb.SamplingParams(n=16, temperature=1.0, seed=1),
        stopping=pb.StoppingParams(max_tokens=64, ignore_eos=True),
        output=pb.OutputParams(logprobs=20),
    ),
}


def send(name: str, is_refused: bool, grpc_address: str, http_address: str) -> str:
    """Sends one request, reads the answer, and returns its status. Runs in another process.

    is_refused  True: it requests so much output that it can never fit
    """
    if name in HTTP:
        body = HTTP[name]()
        if is_refused:
            body["stopping"]["max_tokens"] = _TOO_MANY
        return _post(http_address, json.dumps(body).encode())
    request = (GRPC | LOGPROBS)[name]()
    if is_refused:
        request.stopping.max_tokens = _TOO_MANY
    with grpc.insecure_channel(grpc_address) as channel:
        try:
            for _ in GenerationStub(channel).Generate(request, timeout=_TIMEOUT_S, wait_for_ready=True):
                pass
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def _post(address: str, body: bytes) -> str:
    request = urllib.request.Request(
        f"http://{address}/live/completions", body, {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            response.read()
            return str(response.status)
    except urllib.error.HTTPError as error:
        return str(error.code)


async def longest_gap_s(running: asyncio.Future[str]) -> tuple[float, str]:
    """Returns the longest time for which the event loop ran no other task until `running` was done, and its result.

    Of each gap only the processor time of this process counts, so that other processes on the cores do not.
    """
    longest_s, before_s, cpu_before_s = 0.0, time.perf_counter(), time.process_time()
    while not running.done():
        await asyncio.sleep(_BEAT_S)
        now_s, cpu_s = time.perf_counter(), time.process_time()
        longest_s = max(longest_s, min(now_s - before_s - _BEAT_S, cpu_s - cpu_before_s))
        before_s, cpu_before_s = now_s, cpu_s
    return longest_s, running.result()


@contextlib.asynccontextmanager
async def scheduler(executor_address: str) -> AsyncIterator[tuple[str, str]]:
    """Runs a scheduler on this event loop; yields its addresses, of gRPC and of HTTP."""
    from scheduler.config import SchedulerConfig
    from scheduler.main import load_model, serve

    with tempfile.TemporaryDirectory() as folder, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        http = f"127.0.0.1:{held.getsockname()[1]}"
        held.close()
        config = SchedulerConfig(
            model=embedded_model(),
            listen=f"unix:{folder}/grpc",
            admin_listen=f"unix:{folder}/admin",
            http_listen=http,
            executor=executor_address,
        )
        task = asyncio.create_task(serve(config, load_model(config)))
        try:
            yield config.listen, http
        finally:
            signal.raise_signal(signal.SIGTERM)  # ends it as an operator would
            await asyncio.wait({task})


async def measure(names: Sequence[str], executor: Sequence[str], rounds: int, clients: Executor) -> None:
    """Sends each request `rounds` times to a scheduler before this executor, and prints the longest gaps."""
    loop = asyncio.get_running_loop()
    async with child_process(*executor) as child, scheduler(child.line.split()[1]) as addresses:
        await loop.run_in_executor(clients, send, "ordinary", False, *addresses)
        for name, is_refused in itertools.product(names, (False, True)):
            found = [
                await longest_gap_s(loop.run_in_executor(clients, send, name, is_refused, *addresses))
                for _ in range(rounds)
            ]
            gaps_ms = [1e3 * gap_s for gap_s, _ in found]
            print(f"{name:34} {found[-1][1]:18} {statistics.median(gaps_ms):6.1f} ms  (most {max(gaps_ms):.1f})")


def main(arguments: Sequence[str]) -> None:
    parser = Parser("loop-gaps", __doc__)
    parser.add_argument("--only", default="", help="measure requests whose name contains this text")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="times that each request is sent")
    given = parser.parse_args(arguments)
    null = [
        *("bench.overhead.null_executor", "--vocab-size", str(_VOCAB_SIZE), "--num-slots", "8"),
        *("--max-model-len", str(_MAX_MODEL_LEN)),
    ]
    groups = [([*GRPC, *HTTP], null)]
    with tempfile.TemporaryDirectory() as folder:
        model = ["quire", "executor", "--model", embedded_model(), "--listen-address", f"unix:{folder}/executor"]
        groups.append((list(LOGPROBS), [*model, "--metrics-address", ""]))
        wanted = [([name for name in names if given.only in name], executor) for names, executor in groups]
        if not any(names for names, _ in wanted):
            raise BenchError(f"no request has {given.only!r} in its name")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients:
            for names, executor in wanted:
                if names:
                    asyncio.run(measure(names, executor, given.rounds, clients))
