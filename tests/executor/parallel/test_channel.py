"""Frames arrive as they were sent, and an end that is lost, late or out of step is found."""

from __future__ import annotations

import socket
import struct
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from executor.parallel.channel import MAX_BYTES, Channel, ChannelBroken, ChannelClosed, FrameKind, values_of
from executor.parallel.launch_frame import copies_from_bytes, from_bytes, to_bytes
from executor.slots.launch import Launch

if TYPE_CHECKING:
    from collections.abc import Iterator

Ends = tuple[Channel, Channel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Yields both ends of a channel, and the socket of the first one."""
    one, other = socket.socketpair()
    with one, other:
        yield Channel(one), Channel(other), one


def launch(num_sequences: int = 3, num_columns: int = 2, seed: int = 0) -> Launch:
    """Returns a launch of decodes and one prompt, whose tables lie in rows of a larger matrix."""
    rng = np.random.default_rng(seed)
    counts = np.ones(num_sequences, np.int32)
    counts[-1] = 5
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    num_rows = int(starts[-1])
    return Launch(
        num_decodes=num_sequences - 1,
        token_ids=rng.integers(0, 1000, num_rows, dtype=np.int32),
        positions=rng.integers(0, 8, num_rows, dtype=np.int32),
        slot_mapping=rng.integers(0, 1 << 40, num_rows, dtype=np.int64),
        slots=rng.permutation(num_sequences + 4)[:num_sequences].astype(np.int32),
        query_starts=starts,
        context_lens=np.full(num_sequences, 4 * num_columns - 1, np.int32),
        logit_rows=(starts[1:] - 1).astype(np.int64),
        block_tables=rng.integers(0, 1000, (num_sequences + 4, num_columns + 6), dtype=np.int32),
    )


def test_frames_arrive_in_order_and_unchanged(ends: Ends) -> None:
    near, far, _ = ends
    payload = bytes(range(256)) * 4096  # more than a socket holds
    sender = threading.Thread(target=lambda: [near.send(FrameKind.FORWARD, payload), near.send(FrameKind.COPY_BLOCKS)])
    sender.start()
    assert far.receive() == (FrameKind.FORWARD, bytearray(payload))
    assert far.receive() == (FrameKind.COPY_BLOCKS, bytearray())
    sender.join()
    assert not far.has_frame()
    assert not far.is_next(FrameKind.SETUP)
    near.send_values(FrameKind.SETUP, {"rank": 1})
    assert far.has_frame()
    assert far.is_next(FrameKind.SETUP)
    assert not far.is_next(FrameKind.LOADED)
    assert values_of(far.expect(FrameKind.SETUP)) == {"rank": 1}


@pytest.mark.parametrize("sent", [b"", b"\x05", struct.pack("<BI", FrameKind.FORWARD, 8) + b"1234"])
def test_a_closed_end_is_found_even_in_the_middle_of_a_frame(ends: Ends, sent: bytes) -> None:
    _, far, raw = ends
    raw.sendall(sent)
    raw.close()
    with pytest.raises(ChannelClosed):
        far.receive()


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (struct.pack("<BI", 99, 0), "kind 99"),
        (struct.pack("<BI", FrameKind.FORWARD, MAX_BYTES + 1), "1073741825 bytes"),
    ],
)
def test_what_is_no_frame_is_refused_before_it_is_read(ends: Ends, header: bytes, named: str) -> None:
    _, far, raw = ends
    raw.sendall(header)
    with pytest.raises(ChannelBroken, match=named):
        far.receive()


def test_a_frame_out_of_step_is_refused(ends: Ends) -> None:
    near, far, _ = ends
    near.send(FrameKind.READY)
    with pytest.raises(ChannelBroken, match="READY in place of CONNECT"):
        far.expect(FrameKind.CONNECT)


@pytest.mark.parametrize("payload", [b"", b"{", b"[1]", b"\xff"])
def test_values_that_are_no_object_are_refused(payload: bytes) -> None:
    with pytest.raises(ChannelBroken, match="no JSON object"):
        values_of(bytearray(payload))


def test_an_end_that_takes_nothing_is_found(ends: Ends) -> None:
    near, _, _ = ends
    near.limit_waits(0.05)
    with pytest.raises(ChannelBroken, match="takes no frames"):
        near.send(FrameKind.FORWARD, bytes(1 << 24))


def test_a_send_to_a_closed_end_fails(ends: Ends) -> None:
    near, far, _ = ends
    far.close()
    with pytest.raises(ChannelClosed):
        near.send(FrameKind.FORWARD, bytes(1 << 20))


def test_a_launch_arrives_with_the_tables_of_its_own_sequences() -> None:
    sent = launch()
    received = from_bytes(bytearray(to_bytes(sent, block_size=4)))
    assert received.num_decodes == 2
    assert received.num_rows == 7
    for name in ("token_ids", "positions", "slot_mapping", "query_starts", "context_lens", "logit_rows"):
        own, other = getattr(sent, name), getattr(received, name)
        assert own.dtype == other.dtype
        assert own.tolist() == other.tolist()
    assert received.block_tables[received.slots].tolist() == sent.block_tables[sent.slots, :2].tolist()


def test_a_frame_has_the_documented_size() -> None:
    """The page on scaling out gives this formula: 7 rows, 3 rows of logits, 3 sequences of 2 blocks at most."""
    header_bytes = 5
    num_bytes = header_bytes + len(to_bytes(launch(), block_size=4))
    assert num_bytes == 33 + 16 * 7 + 8 * 3 + 3 * (8 + 4 * 2)


def test_a_launch_without_logits_arrives() -> None:
    sent = launch()
    bare = Launch(**{name: getattr(sent, name) for name in Launch.__slots__} | {"logit_rows": np.zeros(0, np.int64)})
    assert len(from_bytes(bytearray(to_bytes(bare, block_size=4))).logit_rows) == 0


@pytest.mark.parametrize("change", [-1, 1, 4])
def test_a_launch_of_another_length_is_refused(change: int) -> None:
    payload = bytearray(to_bytes(launch(), block_size=4))
    wrong = payload[:change] if change < 0 else payload + bytes(change)
    with pytest.raises(ChannelBroken, match="bytes in place of"):
        from_bytes(wrong)


@pytest.mark.parametrize("counts", [(-1, 7, 3, 2, 3), (4, 7, 3, 2, 3), (2, -7, 3, 2, 3), (2, 7, -3, 2, 3)])
def test_a_launch_with_impossible_counts_is_refused(counts: tuple[int, ...]) -> None:
    payload = bytearray(to_bytes(launch(), block_size=4))
    payload[:20] = struct.pack("<5i", *counts)
    with pytest.raises(ChannelBroken):
        from_bytes(payload)


def test_half_a_launch_and_half_a_copy_are_refused() -> None:
    with pytest.raises(ChannelBroken, match="without counts"):
        from_bytes(bytearray(7))
    with pytest.raises(ChannelBroken, match="half a pair"):
        copies_from_bytes(bytearray(12))
    assert copies_from_bytes(bytearray(np.array([[1, 2], [3, 4]], np.int32).tobytes())).tolist() == [[1, 2], [3, 4]]
