"""`main.py audit RUN --math-verify`: where the math-verify package would have graded otherwise.

math-verify evaluates what a model wrote, so it can hang, exhaust memory or crash. It therefore runs in a process of
its own (this file, run as a module), which is killed when an answer takes too long and replaced for the next. Its word
is an opinion: rewards come from reward.py alone, whose rule is stricter (a box, no algebra, no units).
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from config import UserError
from run.trajectories import read_step, stored_steps

ROOT = Path(__file__).parent.parent  # from where the other process finds this module
SECONDS = 5.0  # for one answer; the first also pays the imports
START_SECONDS = 60.0
MEMORY_BYTES = 4 << 30  # of the process's address space
SHOWN = 50

Grader = Callable[[str, str], bool | None]


class MathVerifyError(UserError, RuntimeError):
    """math-verify cannot be used."""


class MathVerify:
    """Grades (text, reference): True, False, or None where math-verify failed or had to be killed. Close it."""

    def __init__(self, command: list[str] | None = None, seconds: float = SECONDS):
        """command: what answers one line {"right": ...} for each line {"text", "answer"}; default: this file."""
        if command is None and find_spec("math_verify") is None:
            raise MathVerifyError("math-verify is not installed; pip install -r requirements/math.txt")
        self._command = command or [sys.executable, "-m", __name__]
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self.restarts = 0

    def __call__(self, text: str, answer: str) -> bool | None:
        limit = self._seconds if self._process else START_SECONDS
        process = self._process = self._process or self._start()
        assert process.stdin and process.stdout
        try:
            process.stdin.write((json.dumps({"text": text, "answer": answer}) + "\n").encode())
            process.stdin.flush()
        except BrokenPipeError:
            self.close()
            return None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            ready = selector.select(limit)
        line = process.stdout.readline() if ready else b""
        if not line:  # silent for too long, or dead
            self.restarts += 1
            self.close()
            return None
        return json.loads(line)["right"]

    def close(self) -> None:
        """Idempotent; the next call starts another process."""
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )


def second_opinions(
    rows: Iterable[dict[str, Any]], decode: Callable[[list[int]], str], grade: Grader
) -> Iterator[tuple[dict[str, Any], str, bool | None]]:
    """Of every stored trajectory that answered: its row, its final message, and the other grader's word."""
    known: dict[tuple[str, str], bool | None] = {}
    for row in rows:
        if row["stop"] != "answered":
            continue
        turn = row["turns"][-1]
        text = decode(row["token_ids"][turn["start"] : turn["end"]]).rpartition("</think>")[2]
        key = (text, row["answer"])
        if key not in known:
            known[key] = grade(*key)
        yield row, text, known[key]


def stored_rows(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Every stored trajectory of a run, step by step."""
    for step in stored_steps(run_dir):
        yield from read_step(run_dir, step)


def list_disagreements(run_dir: Path, decode: Callable[[list[int]], str]) -> int:
    """Prints them, and how many there are for each of our reasons; the exit status."""
    seen: Counter[str] = Counter()
    differing: Counter[str] = Counter()
    silent = 0
    grader = MathVerify()
    try:
        for row, text, verdict in second_opinions(stored_rows(run_dir), decode, grader):
            seen[row["reason"]] += 1
            silent += verdict is None
            if verdict is None or verdict == (row["reason"] == "correct"):
                continue
            differing[row["reason"]] += 1
            if differing.total() <= SHOWN:
                name = f"after step {row['policy_step']}, prompt {row['prompt_index']}, sample {row['sample_index']}"
                other = "right" if verdict else "wrong"
                print(
                    f"{name}: {row['reason']}, math-verify says {other}; wanted {row['answer']!r}, said {text[-80:]!r}"
                )
    finally:
        grader.close()
    print(f"{seen.total()} answers, {differing.total()} graded otherwise, {silent} without an opinion")
    for reason, count in seen.most_common():
        print(f"  {reason}: {differing[reason]} of {count}")
    return 0


def _serve() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    from math_verify import parse, verify

    for line in sys.stdin:
        case = json.loads(line)
        # An exception ends the process, which is no opinion, as being killed is.
        gold = parse(f"\\boxed{{{case['answer']}}}", parsing_timeout=None)
        said = parse(case["text"], parsing_timeout=None)
        print(json.dumps({"right": bool(verify(gold, said, timeout_seconds=None))}), flush=True)


if __name__ == "__main__":
    _serve()
