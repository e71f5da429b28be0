"""Bounded collection of one output stream."""

import os
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.parent.streams import HEAD_BYTES, TAIL_BYTES, Stream


def _filled(data: bytes, piece: int = 1 << 16) -> Stream:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    stream = Stream(read_end)
    for start in range(0, len(data), piece):
        os.write(write_end, data[start : start + piece])
        stream.drain(1 << 30)
    os.close(write_end)
    stream.drain(1 << 30)
    os.close(read_end)
    return stream


def test_short_output_is_kept_whole():
    assert _filled(b"abc\n").pieces() == (b"abc\n", 0, b"")


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["x", "é", "€", "😀", "xé€😀"]), st.integers(1, 60_000), st.integers(1, 3))
def test_nothing_is_lost_uncounted_and_no_character_is_split(unit, count, odd):
    text = "a" * odd + unit * count
    stream = _filled(text.encode(), 50_000)
    head, cut, tail = stream.pieces()
    shown = head.decode() + tail.decode()  # strict: whole characters only
    assert text.startswith(head.decode()) and text.endswith(tail.decode())
    assert cut == len(text) - len(shown)
    assert stream.total_bytes == len(text.encode())


def test_memory_does_not_grow_with_the_output():
    tracemalloc.start()
    stream = _filled(b"0123456789" * 400_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert stream.total_bytes == 4_000_000
    assert peak - 4_000_000 < 8 * (HEAD_BYTES + 2 * TAIL_BYTES)


def test_drain_stops_at_its_limit_and_at_the_end():
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    stream = Stream(read_end)
    assert stream.drain(1 << 20) == 0 and not stream.ended
    os.close(write_end)
    stream.drain(1 << 20)
    assert stream.ended
    os.close(read_end)
