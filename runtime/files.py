"""Files beside checkpoints that a run or a look at one leaves: complete or absent, and a full disk is one line.

Whatever the system refuses (no space, read-only, no folder) becomes a `WriteError` that names the file and the mend.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from settings.schema import UserError

RESUME = "free space or make it writable, then go on with --resume"
OUT = "free space, or name another file with --out"


class WriteError(UserError, RuntimeError):
    """A file that cannot be written; one line with the file and the mend."""


@contextlib.contextmanager
def writing(path: Path | str, mend: str = RESUME) -> Iterator[None]:
    """Turns the system's refusal of what happens inside into a WriteError."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path}: cannot be written ({error.strerror or error}); {mend}") from error


def write_whole(path: Path, content: str | bytes, mend: str = RESUME) -> None:
    """Beside its place and renamed, so that the file is complete or what it was before. Makes its folder."""
    partial = path.with_name(path.name + ".partial")
    with writing(path, mend):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
            os.replace(partial, path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()  # a full disk may need the room
            raise


def append_line(path: Path, line: str) -> None:
    """The whole line or nothing of it."""
    with writing(path), path.open("ab", buffering=0) as file:
        size, rest = file.tell(), (line + "\n").encode("utf-8")
        try:
            while rest:  # a disk that fills up takes a part first
                rest = rest[file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def whole_lines(path: Path) -> list[str]:
    """Without a last line that a crash cut short."""
    return path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()


def say(text: str) -> None:
    """Prints a line for people. Raises WriteError where standard output takes no more (a log on a full disk)."""
    try:
        with writing("standard output"):
            print(text, flush=True)
    except WriteError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would fail on it once more
        raise
