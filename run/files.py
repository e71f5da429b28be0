"""How a run writes files other than checkpoints: complete or absent, and a full disk is one line of error.

Content is on the disk when a call returns, and survives a loss of power. Whatever the system refuses (no space,
read-only, no folder) becomes a `WriteError` that names the file and the fix; a file that cannot be read back, a
`DamageError`. A run folder has one writer at a time (`sole_writer`). Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from configs.schema import UserError

RESUME = "free space or make it writable, then go on with --resume"
OUT = "free space, or name another file with --out"


class WriteError(UserError, RuntimeError):
    """A file that cannot be written; one line with the file and the fix."""


@contextlib.contextmanager
def writing(path: Path | str, fix: str = RESUME) -> Iterator[None]:
    """Turns an OSError inside the block into a WriteError."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path}: cannot be written ({error.strerror or error}); {fix}") from error


class DamageError(UserError, ValueError):
    """A file of a run that cannot be read for what it should be; one line with the file and the fix."""


class InUseError(UserError, RuntimeError):
    """Another process writes into the run folder."""


@contextlib.contextmanager
def sole_writer(run_dir: Path) -> Iterator[None]:
    """Holds `run_dir/lock`, which the system releases however this process ends. Raises InUseError.

    The run's other processes do not hold it: rank 0 does for all. Makes the folder. Where the file system has no
    locks (Lustre without its flock option, say) it prints that and holds nothing.
    """
    path = run_dir / "lock"
    with contextlib.ExitStack() as stack:
        with writing(path):
            run_dir.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("a+", encoding="utf-8"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise InUseError(
                    f"{run_dir}: {file.read().strip() or 'another process'} is writing into it; wait for its end, or "
                    "name another folder"
                ) from error
            except OSError as error:
                if error.errno not in (*_ABSENT, errno.ENOLCK):
                    raise
                say(f"{path}: no lock ({error.strerror}); see to it that no other run writes into this folder")
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


def write_whole(path: Path, content: str | bytes, fix: str = RESUME) -> None:
    """Writes under another name and renames, so that the file is complete or what it was. Makes its folder."""
    partial = path.with_name(path.name + ".partial")
    with writing(path, fix):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb", buffering=0) as file:
                _write(file, content.encode("utf-8") if isinstance(content, str) else content)
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()  # a full disk may need the room
            raise


def require_writable(path: Path, fix: str = RESUME) -> None:
    """Raises now what `write_whole` would raise later, except for a disk that fills up meanwhile."""
    with writing(path, fix):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        try_place(path.parent)


def try_place(folder: Path) -> None:
    """Raises the OSError that a new file would meet in `folder`, or in the nearest existing parent. Leaves
    nothing. Permissions alone do not tell: a file system may be read-only."""
    above = folder.absolute()
    with tempfile.TemporaryFile(dir=next(place for place in (above, *above.parents) if place.exists())):
        pass


def append_line(path: Path, line: str) -> None:
    """Appends the whole line or nothing."""
    with writing(path), path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            _write(file, (line + "\n").encode("utf-8"))
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def _write(file: io.FileIO, content: bytes) -> None:
    rest = memoryview(content)
    while rest:  # a disk that fills up accepts a part first
        rest = rest[file.write(rest) :]


def whole_lines(path: Path) -> list[str]:
    """The file's lines, without a last one that a crash cut short."""
    return path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0].splitlines()


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each of `whole_lines` with its JSON object. Raises DamageError at a line without one."""
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise DamageError(f"{path}: line {number} is damaged ({line[:20]!r}); remove or repair it")
        yield line, row


def say(text: str) -> None:
    """Prints a line for people. A console that takes no more (its reader has gone, the disk of a log is full) is
    dropped, and the run goes on without it: what counts is in files."""
    _print(text, sys.stdout)


def complain(text: str) -> None:
    """As `say`, on standard error."""
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):  # ValueError: closed
        drop(stream)


def drop(stream: TextIO) -> None:
    """Sends what is written from here on, and what a buffer still holds, nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class Lasting(io.TextIOBase):
    """A stream for a library that writes by itself; it outlives its reader as `say` does."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.fileno, self.isatty = stream.fileno, stream.isatty  # type: ignore[method-assign]

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, ValueError):
            drop(self._stream)


def open_standard_streams() -> None:
    """Fills the places of closed standard streams (`>&-`), or the next file that is opened would get the console's
    number, and with it what is meant for the console."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


# What a system answers that has no such operation, unlike one that fails in it (EIO, ENOSPC).
_ABSENT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY)
_said: set[str] = set()


def sync_file(path: Path) -> None:
    """Returns when a file's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Returns when the names in a folder are on the disk. Skipped, and said once, where the file system cannot sync
    folders (some FUSE, CIFS and object-store mounts): a loss of power may then cost the newest names."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in (*_ABSENT, errno.EBADF, errno.EISDIR, errno.EACCES, errno.EPERM):
            raise
        if "folders" not in _said:
            _said.add("folders")
            say(f"note: {path}: this file system does not sync folders ({error.strerror}); files are synced")
