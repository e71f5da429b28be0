"""The trainer's end of the user's tools: specs into files, one broker for all, requests as futures.

A spec is "FILE.py:NAME", looked for beside the config, then in the working directory. Invariants: the trainer never
imports a user's file and never forks; every future resolves. Errors of a spec are one line, raised at start.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.layers import limits
from sandbox.parent.link import Finish, Link, StartError

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # 1 unless the user set them
_INFRA = {"op": "answer", "status": "infra", "error_type": "Infra", "truncated": False, "cpu_s": 0.0, "wall_s": 0.0,
          "queue_s": 0.0}  # fmt: skip


@dataclass(frozen=True, slots=True)
class UserFile:
    """A file of tools as it is now: for the run folder, and for the check of a resume."""

    path: str
    text: str
    sha256: str


def find(spec: str, beside: Path, setting: str = "tool.functions") -> tuple[Path, str]:
    """The file and the name of a spec. Raises StartError, naming the setting."""
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise StartError(f"{setting}={spec!r}: is no FILE.py:NAME; write it as 'my_task.py:search'")
    for folder in (beside, Path.cwd()):
        if (folder / file).is_file():
            return (folder / file).resolve(), name
    raise StartError(f"{setting}={spec!r}: {file} is neither in {beside} nor in the working directory; fix it")


def read(path: Path, setting: str = "tool.functions") -> UserFile:
    """Raises StartError where the file cannot be read."""
    try:
        raw = path.read_bytes()
        return UserFile(str(path), raw.decode("utf-8"), hashlib.sha256(raw).hexdigest())
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{setting}={path.name!r}: cannot be read: {error}; fix the file") from error


class Client:
    """A running broker for some specs. `schemas` has (file, index, name, stateful, JSON schema) for each tool."""

    def __init__(
        self, specs: Sequence[str], beside: Path, *, timeout_s: float, memory_mb: int, max_chars: int, max_running: int
    ):
        """Waits until every file is imported. Raises StartError: one line, with the spec and the fix."""
        groups: dict[Path, list[str]] = {}
        for spec in specs:
            path, name = find(spec, beside)
            if name in groups.setdefault(path, []):
                raise StartError(f"tool.functions={spec!r}: is there twice; remove one")
            groups[path].append(name)
        self.files = [read(path) for path in groups]
        self._timeout_s = timeout_s
        common = {"max_output_chars": max_chars, "memory_mb": memory_mb}
        settings = {
            "max_running": max_running, "timeout_s": timeout_s,
            "files": [{"path": str(path), "names": names} | common for path, names in groups.items()],
        }  # fmt: skip
        environment = dict.fromkeys(THREADS, "1") | {"MALLOC_ARENA_MAX": "2"} | dict(os.environ)
        try:
            self._link = Link(settings, environment, _INFRA, "sandbox.workers")
        except StartError as error:
            raise StartError(f"tool.functions: {error}") from error
        self._sessions = itertools.count()
        self.schemas = [
            (number, index, schema["function"]["name"], one["stateful"], schema)
            for number, described in enumerate(self._link.hello["files"])
            for index, one in enumerate(described)
            for schema in one["schemas"]
        ]

        self.examples: dict[str, dict[str, Any]] = {}  # tool -> arguments that its docstring shows
        for one in (one for described in self._link.hello["files"] for one in described):
            self.examples |= one["examples"]

    @property
    def pid(self) -> int:
        return self._link.pid

    def open(self, problem: dict[str, Any]) -> int:
        """Announces a trajectory that has called a tool with state; its number."""
        session = next(self._sessions)
        self._link.ask({"op": "open", "session": session}, json.dumps(problem).encode(), _ignore)
        return session

    def shut(self, session: int) -> None:
        self._link.ask({"op": "close", "session": session}, b"", _ignore)

    def call(
        self, where: tuple[int, int, str, bool], session: int, arguments: bytes, seed: int, finish: Finish
    ) -> Future[Any]:
        """One call; at most limits.CODE_BYTES of arguments (JSON)."""
        assert len(arguments) <= limits.CODE_BYTES
        file, index, name, stateful = where
        header = {"op": "call", "file": file, "index": index, "name": name, "stateful": stateful, "session": session,
                  "seed": seed % 2**64, "timeout_s": self._timeout_s}  # fmt: skip
        return self._link.ask(header, arguments, finish)

    def workers(self) -> int:
        """Processes that serve now."""
        return self._link.ask({"op": "stats"}, b"", lambda header, _: header["workers"]).result()

    def close(self) -> None:
        self._link.close()


def _ignore(header: dict[str, Any], payload: bytes) -> None:
    """The answer to open and close says nothing."""
