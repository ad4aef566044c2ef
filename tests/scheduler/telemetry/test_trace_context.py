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


@pytest.mark.parametrize("state", ["a=1", "congo=t61rcWkgMzE, rojo=00f067aa0ba902b7", "t@vendor=x y z!", "0=~"])
def test_valid_states_are_kept(state: str) -> None:
    context = parse_trace_context(f"00-{TRACE}-{SPAN}-01", state)
    assert context is not None
    assert context.state == state


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
        ",".join(f"k{number}=v" for number in range(33)),
    ],
)
def test_invalid_states_are_dropped(state: str) -> None:
    context = parse_trace_context(f"00-{TRACE}-{SPAN}-01", state)
    assert context is not None
    assert context.state == ""
