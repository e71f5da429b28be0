"""Files of tensors and their checksums, written beside a thread that decodes: `torch.save`'s format, summed while it
is written, mapped when it is read.

One core sums about a gigabyte a second; for a 4B optimizer that takes longer than the rollout that hides its saving.
So several threads sum segments, and `SummedFile` does it while it writes: nothing is read again for it.

A copy of a whole storage from the GPU, as `torch.save` makes it (`UntypedStorage.cpu`), holds the Global Interpreter
Lock to its end in the supported releases of torch, and goes to fresh, pageable memory: decoding stopped while 8 GB of
weights were copied. Here tensors leave the GPU piece by piece through a small pinned buffer, at the speed of the bus,
without the lock. They use the current stream.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Self, cast

import numpy
import torch
from torch import Tensor

PIECE = 256 << 20  # bytes of pinned memory: several segments, which are summed at once
SEGMENT = 64 << 20  # bytes under one digest: part of what a checksum means
THREADS = 8
ALONE = 1 << 20  # bytes up to which threads do not pay


def save(state: Any, path: Path) -> str:
    """Writes what `torch.load` reads, tensors of the GPU as if they were the host's; returns the file's checksum."""
    torch.serialization.set_crc32_options(False)  # CRC32 takes half of the time, and would read the stand-ins
    with _TensorFile(path) as file:
        pickler = SimpleNamespace(__name__="pickle", Pickler=file.pickler())
        try:
            torch.save(state, cast(IO[bytes], file), pickle_module=pickler)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch then finished the file anyway, and failed again
                raise error.__context__ from None
            raise
        return file.checksum()


def load(path: Path) -> Any:
    """What `save` wrote, on the host. The file is mapped, not read: its tensors take no memory of their own, so that a
    run that fits a machine can be resumed there. Clone a tensor to outlive the file."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


@contextmanager
def host_copies(state: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The same tensors on the host; names of one tensor stay names of one."""
    copies: dict[Any, Tensor] = {}
    found = {}
    for name, tensor in state.items():
        place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if place not in copies:
            copies[place] = _host_copy(tensor.detach()) if _elsewhere(tensor) else tensor
        found[name] = copies[place]
    copies.clear()
    given = dict(found)
    yield given
    given.clear()
    while found:  # freeing takes 60 ms a gigabyte, with the lock held: one tensor at a time
        found.popitem()


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
        """Returns when all of `data` is written and summed; it may change afterwards."""
        content = memoryview(data).cast("B")
        pieces = list(self._by_segment(content))
        run = map if len(content) <= ALONE else self._pool.map  # one piece per digest: their order does not matter
        summed = run(lambda piece: piece[0].update(piece[1]), pieces)
        rest = content
        while rest:  # the system writes 2 GB at most, and a full disk a part
            rest = rest[self._file.write(rest) :]
        list(summed)
        self._size += len(content)
        return len(content)

    def flush(self) -> None:
        """Nothing is buffered; Python's file writers call it."""

    def checksum(self) -> str:
        """Of what was written so far."""
        return _whole(digest.digest() for digest in self._digests)

    def _by_segment(self, content: memoryview) -> Iterator[tuple[hashlib.blake2b, memoryview]]:
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


class _TensorFile(SummedFile):
    """Writes a GPU storage in place of the host storage that stands in for it."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._stand_ins: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}  # by the source's address
        self._sources: dict[int, Tensor] = {}  # bytes on the GPU, by their stand-in's address

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        # The pickler is a class, which lives, and this file with it, until circular garbage is collected.
        self._stand_ins.clear()
        self._sources.clear()

    def pickler(self) -> type[pickle.Pickler]:
        """For `torch.save`, which calls it before it writes the storages."""
        stand_in = self._stand_in

        class Pickler(pickle.Pickler):
            def reducer_override(self, obj: Any) -> Any:
                elsewhere = type(obj) is Tensor and _elsewhere(obj)
                return stand_in(obj).__reduce_ex__(pickle.DEFAULT_PROTOCOL) if elsewhere else NotImplemented

        return Pickler

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """Like `tensor`, over host memory that is never touched, so that the system never provides it."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._stand_ins:
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            host = torch.UntypedStorage(storage.nbytes())
            self._stand_ins[storage.data_ptr()] = host, source
            self._sources[host.data_ptr()] = source
        host = self._stand_ins[storage.data_ptr()][0]
        like = torch.empty(0, dtype=tensor.dtype).set_(host, tensor.storage_offset(), tensor.size(), tensor.stride())
        return like.requires_grad_(tensor.requires_grad)

    def write(self, data: bytes | memoryview) -> int:
        source = self._sources.pop(numpy.frombuffer(data, numpy.uint8).ctypes.data, None)
        if source is None:
            return super().write(data)
        if len(data) != len(source):
            raise RuntimeError(f"torch.save wrote {len(data)} bytes of a storage of {len(source)} at once")
        return sum(super(_TensorFile, self).write(piece.data) for piece in _pieces(source))

    def checksum(self) -> str:
        """Of a whole file: raises RuntimeError where a stand-in was written as a copy, which `write` cannot tell."""
        left = sum(len(source) > 0 for source in self._sources.values())
        if left:
            raise RuntimeError(f"torch.save wrote copies of {left} storages, of which nothing is in the file")
        return super().checksum()


def _elsewhere(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _host_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    room, start = copy.view(-1).view(torch.uint8).numpy(), 0
    for piece in _pieces(tensor.contiguous().view(-1).view(torch.uint8)):
        numpy.copyto(room[start : start + len(piece)], piece)  # one thread: torch would take all cores from others
        start += len(piece)
    return copy


def _pieces(source: Tensor) -> Iterator[numpy.ndarray]:
    """uint8 [n] in pieces on the host, each there until the next is asked for."""
    pinned = torch.empty(min(PIECE, len(source)), dtype=torch.uint8, pin_memory=source.is_cuda)
    for piece in source.split(PIECE):
        pinned[: len(piece)].copy_(piece, non_blocking=True)
        if source.is_cuda:
            torch.cuda.current_stream(source.device).synchronize()
        yield pinned[: len(piece)].numpy()
