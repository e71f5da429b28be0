"""One output stream of one call, bounded while it is read: its head, its tail, and how much was cut between them."""

from __future__ import annotations

import os

HEAD_BYTES = TAIL_BYTES = 32 << 10
READ_BYTES = 64 << 10  # a Linux pipe's capacity
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes that continue a UTF-8 character


class Stream:
    """Reads a non-blocking pipe end into at most HEAD_BYTES + 2 * TAIL_BYTES of memory."""

    __slots__ = ("cut_chars", "ended", "fd", "head", "tail", "total_bytes")

    def __init__(self, fd: int):
        self.fd = fd
        self.head = bytearray()
        self.tail = bytearray()
        self.cut_chars = 0  # whole UTF-8 characters dropped between head and tail
        self.total_bytes = 0
        self.ended = False

    def drain(self, limit: int) -> int:
        """Reads what is there, at most `limit` bytes; returns how many bytes came."""
        start = self.total_bytes
        while not self.ended and self.total_bytes - start < limit:
            try:
                data = os.read(self.fd, READ_BYTES)
            except BlockingIOError:
                break
            self.ended = not data
            self._keep(data)
            if len(data) < READ_BYTES:
                break
        return self.total_bytes - start

    def _keep(self, data: bytes) -> None:
        self.total_bytes += len(data)
        room = HEAD_BYTES - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 2 * TAIL_BYTES:
            self._cut()

    def _cut(self) -> None:
        excess = len(self.tail) - TAIL_BYTES
        if excess > 0:
            self.cut_chars += len(self.tail[:excess].translate(None, _CONTINUATION))
            del self.tail[:excess]

    def pieces(self) -> tuple[bytes, bytes]:
        """Head and tail; where characters were cut, both end on whole UTF-8 characters."""
        self._cut()
        if not self.cut_chars:
            return bytes(self.head + self.tail), b""
        head, tail = bytes(self.head), bytes(self.tail)
        return head[: len(head) - _unfinished(head)], tail[_continued(tail) :]


def _unfinished(data: bytes) -> int:
    """How many bytes at the end begin a UTF-8 character that is not complete."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < length else 0
        if byte < 0x80:
            return 0
    return 0


def _continued(data: bytes) -> int:
    """How many bytes at the start belong to a character that began before."""
    count = 0
    while count < min(3, len(data)) and 0x80 <= data[count] < 0xC0:
        count += 1
    return count
