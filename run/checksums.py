"""Checksums of files as large as a model's optimizer state, on several cores.

One core sums up about a gigabyte a second, for a 4B optimizer more than the rollout takes that hides its saving. So
several threads sum segments up, and `SummedFile` does it while it writes: nothing is read again for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

SEGMENT = 64 << 20  # bytes under one digest: part of what a checksum means
THREADS = 8
ALONE = 1 << 20  # bytes up to which a thread of the pool is not worth its start


class SummedFile:
    """A new file for one writer, with `checksum` of what it was given. A context manager."""

    def __init__(self, path: Path):
        self._file = path.open("wb", buffering=0)
        self._pool = ThreadPoolExecutor(THREADS)
        self._digests = [_digest()]
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._file.close()

    def write(self, data: bytes | memoryview) -> int:
        """Returns when all of `data` is written and summed up; it may change then."""
        content = memoryview(data).cast("B")
        pieces = list(self._pieces(content))
        run = map if len(content) <= ALONE else self._pool.map  # a piece a digest: their order does not matter
        summed = run(lambda piece: piece[0].update(piece[1]), pieces)
        rest = content
        while rest:  # the system takes 2 GB at most, and a disk that fills up a part first
            rest = rest[self._file.write(rest) :]
        list(summed)
        self._size += len(content)
        return len(content)

    def flush(self) -> None:
        """Nothing is held back; writers of Python files call it."""

    def checksum(self) -> str:
        """Of what was written so far."""
        return _whole(digest.digest() for digest in self._digests)

    def _pieces(self, content: memoryview) -> Iterator[tuple[hashlib.blake2b, memoryview]]:
        """`content` cut where the file's segments end, each part with its segment's digest."""
        start = 0
        while start < len(content):
            segment, before = divmod(self._size + start, SEGMENT)
            if segment == len(self._digests):
                self._digests.append(_digest())
            end = min(len(content), start + SEGMENT - before)
            yield self._digests[segment], content[start:end]
            start = end


def checksum(path: Path) -> str:
    """Digest of the digests of the file's segments, in their order."""
    starts = range(0, max(1, path.stat().st_size), SEGMENT)
    with ThreadPoolExecutor(min(len(starts), THREADS)) as pool:
        return _whole(pool.map(lambda start: _segment_digest(path, start), starts))


def _segment_digest(path: Path, start: int) -> bytes:
    digest, buffer = _digest(), bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while (left := start + SEGMENT - file.tell()) > 0 and (count := file.readinto(memoryview(buffer)[:left])):
            digest.update(memoryview(buffer)[:count])
    return digest.digest()


def _digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def _whole(digests: Iterable[bytes]) -> str:
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()
