"""Frames between trainer and broker: two lengths, a JSON header, raw bytes.

    u32 length of header and payload | u32 length of header | header (JSON object) | payload

Little-endian. Nothing that a program writes is parsed as a frame: its output travels as payload bytes only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

_LENGTHS = struct.Struct("<II")
MAX_FRAME_BYTES = 16 << 20  # far above 64 KiB of code or four 32 KiB pieces of output


class WireError(ValueError):
    """Bytes that are no frame: the peer is not ours or is broken."""


def pack(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """One frame as bytes. Raises WireError when it is longer than MAX_FRAME_BYTES."""
    head = json.dumps(header, separators=(",", ":")).encode()
    length = len(head) + len(payload)
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
    return _LENGTHS.pack(length, len(head)) + head + payload


class FrameReader:
    """Collects bytes in any pieces and gives back whole frames in order."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Adds `data` and yields (header, payload) for each frame that is now whole. Raises WireError."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _LENGTHS.size:
                length, head_length = _LENGTHS.unpack_from(buffer, start)
                if length > MAX_FRAME_BYTES or head_length > length:
                    raise WireError(f"lengths {length} and {head_length} are not those of a frame")
                end = start + _LENGTHS.size + length
                if len(buffer) < end:
                    return
                split = start + _LENGTHS.size + head_length
                header = _header(bytes(buffer[start + _LENGTHS.size : split]))
                payload = bytes(buffer[split:end])
                start = end
                yield header, payload
        finally:
            del buffer[:start]


def _header(raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise WireError("a frame's header is not JSON") from error
    if not isinstance(header, dict):
        raise WireError("a frame's header is not an object")
    return header
