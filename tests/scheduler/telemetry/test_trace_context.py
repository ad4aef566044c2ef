"""Trace Context headers are read if the standard allows them, and ignored otherwise."""

import pytest

from scheduler.telemetry.trace_context import TraceContext, parse_trace_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("header", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # a flag of level 2
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),
    ],
)
def test_valid_headers_are_read(header: str, is_sampled: bool) -> None:
    assert parse_trace_context(header, "a=1,b=2") == TraceContext(TRACE, SPAN, is_sampled, "a=1,b=2")


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01.more",
    ],
)
def test_invalid_headers_are_ignored(header: str | None) -> None:
    assert parse_trace_context(header) is None


@pytest.mark.parametrize("state", ["a=1", "congo=t61rcWkgMzE, rojo=00f067aa0ba902b7", "t@vendor=x y z!", "0@v=~"])
def test_valid_states_are_kept(state: str, caplog: pytest.LogCaptureFixture) -> None:
    context = parse_trace_context(f"00-{TRACE}-{SPAN}-01", state)
    assert context is not None
    assert context.state == state
    library = pytest.importorskip("opentelemetry.trace", reason="the extra `otel` is not installed")
    assert len(library.TraceState.from_header([context.state])) == len(state.split(","))  # it has the same rules
    assert not caplog.records


@pytest.mark.parametrize(
    "state",
    [
        "a=" + "x" * 600,
        "garbage",
        "a=1,a=2",
        "é=1",
        "a=\n",
        "a=1,,=,;",
        "a=",
        "A=1",
        "k=" + "v" * 300,
        "0=1",  # a key of level 2, as are the next two
        "a@0=1",
        "a@b@c=1",
        f"{'k' * 242}@v=1",
        ",".join(f"k{number}=v" for number in range(33)),
    ],
)
def test_invalid_states_are_dropped(state: str) -> None:
    context = parse_trace_context(f"00-{TRACE}-{SPAN}-01", state)
    assert context is not None
    assert context.state == ""
