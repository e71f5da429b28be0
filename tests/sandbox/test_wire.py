"""Frames between trainer and broker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.parent import wire

HEADERS = st.dictionaries(st.text(max_size=8), st.one_of(st.integers(), st.text(max_size=8), st.none()), max_size=4)


@given(st.lists(st.tuples(HEADERS, st.binary(max_size=300)), max_size=6), st.lists(st.integers(1, 400), max_size=40))
def test_frames_come_back_whole_and_in_order_however_the_bytes_are_cut(frames, sizes):
    data = b"".join(wire.pack(header, payload) for header, payload in frames)
    reader, got, start = wire.FrameReader(), [], 0
    for size in [*sizes, len(data) + 1]:
        got += reader.feed(data[start : start + size])
        start += size
    assert got == frames


@given(st.binary(min_size=8, max_size=64))
def test_bytes_that_are_no_frame_are_refused_or_wait_for_more(data):
    reader = wire.FrameReader()
    try:
        frames = list(reader.feed(data))
    except wire.WireError:
        return
    assert all(isinstance(header, dict) for header, _ in frames)


def test_a_frame_that_claims_to_be_huge_is_refused_before_it_is_read():
    with pytest.raises(wire.WireError, match="lengths"):
        list(wire.FrameReader().feed(b"\xff\xff\xff\xff\x02\x00\x00\x00"))


def test_a_frame_too_long_to_send_is_refused():
    with pytest.raises(wire.WireError, match="exceeds"):
        wire.pack({}, bytes(wire.MAX_FRAME_BYTES))


def test_payload_bytes_that_look_like_a_frame_stay_payload():
    inner = wire.pack({"op": "answer", "status": "ok"})
    assert list(wire.FrameReader().feed(wire.pack({"id": 1}, inner))) == [({"id": 1}, inner)]
