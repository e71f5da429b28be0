"""One output stream of one call, bounded while it is read: its head, its tail, and how much was cut between them."""

from __future__ import annotations

import os

HEAD_BYTES = TAIL_BYTES = 32 << 10
READ_BYTES = 64 << 10  # a Linux pipe's capacity
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes that continue a UTF-8 character


class Stream:
    """Reads a non-blocking pipe end into at most HEAD_BYTES + 2 * TAIL_BYTES of memory."""

    def __init__(self, fd: int):
        self.fd = fd
        self._head = bytearray()
        self._tail = bytearray()
        self._cut_bytes = self._cut_chars = 0  # dropped between head and tail; characters by their first bytes
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
        room = HEAD_BYTES - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * TAIL_BYTES:
            self._cut()

    def _cut(self) -> None:
        excess = len(self._tail) - TAIL_BYTES
        if excess > 0:
            self._cut_bytes += excess
            self._cut_chars += len(self._tail[:excess].translate(None, _CONTINUATION))
            del self._tail[:excess]

    def pieces(self) -> tuple[bytes, int, bytes]:
        """Head, how many characters are missing after it, tail. Where some are, both hold whole characters only."""
        self._cut()
        if not self._cut_bytes:
            return bytes(self._head + self._tail), 0, b""
        unfinished = _unfinished(self._head)
        head = bytes(self._head[: len(self._head) - unfinished])
        return head, self._cut_chars + bool(unfinished), bytes(self._tail[_continued(self._tail) :])


def _unfinished(data: bytearray) -> int:
    """How many bytes at the end begin a UTF-8 character that is not complete."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < length else 0
        if byte < 0x80:
            return 0
    return 0


def _continued(data: bytearray) -> int:
    """How many bytes at the start belong to a character that began before."""
    count = 0
    while count < min(3, len(data)) and 0x80 <= data[count] < 0xC0:
        count += 1
    return count
