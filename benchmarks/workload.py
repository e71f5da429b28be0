"""Scripted workloads: the lengths of every turn and the latency of every tool call, read from a file and checked.

A file of `benchmarks/workloads` holds `meta` (`prompts`, `samples_per_prompt`) and `trajectories`. A trajectory has
`prompt`, `sample`, `prompt_tokens` and `turns`; a turn has `new_tokens` and, unless it is the last, `tool_tokens` and
`tool_seconds`.

Invariant: a workload that `load_workload` returns runs to its end. Every length is at least one token, every turn but
the last has a tool result with its latency, every prompt has all its samples and they share its length. Standard
library only: the drivers of other engines read the same files.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # one trajectory of the file
IDS = 300  # scripted ids are drawn below it: the tiny model has them too
FOLDER = Path(__file__).parent / "workloads"
TOOL = {"tool_tokens", "tool_seconds"}


class WorkloadError(SystemExit):
    """A workload that cannot be run to its end. Ends a benchmark with one line: field, value, fix."""

    def __init__(self, field: str, value: object, fix: str):
        super().__init__(f"error: workload {field} is {value!r}: {fix}")


def load_workload(name: str, copies: int = 1, shrink: int = 1, context: int | None = None) -> tuple[list[Row], int]:
    """Trajectories, `copies` times with other prompts, and samples per prompt.

    name: a file of `benchmarks/workloads` without its ending, or the path of a JSON file
    shrink: every length (at least one token stays) and latency is divided by it
    context: most tokens of a trajectory, prompt, turns and tool results together; None: no limit
    Raises `WorkloadError` where the workload is not well formed or a trajectory is longer than `context`.
    """
    require(copies >= 1, "copies", copies, "use at least 1")
    require(shrink >= 1, "shrink", shrink, "use at least 1")
    data = read(name)
    prompts, samples = data["meta"]["prompts"], data["meta"]["samples_per_prompt"]
    rows = [row | {"prompt": row["prompt"] + c * prompts} for c in range(copies) for row in data["trajectories"]]
    rows = [shrunk(row, shrink) for row in rows] if shrink > 1 else rows
    longest = max(rows, key=length_of)
    fits = context is None or length_of(longest) <= context
    require(fits, f"{place(longest)} length", length_of(longest), f"the context holds {context} tokens; shorten it")
    return rows, samples


def read(name: str) -> dict[str, Any]:
    """The file's content, checked."""
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.json")))
    require(path.is_file(), "file", name, f"name one of {known}, or the path of a JSON file")
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise WorkloadError("file", name, f"it must be JSON ({error})") from None
    require(isinstance(data, dict) and isinstance(data.get("meta"), dict), "meta", None, "add an object `meta`")
    for field in ("prompts", "samples_per_prompt"):
        check_count(data["meta"].get(field), f"meta.{field}")
    rows = data.get("trajectories")
    require(isinstance(rows, list) and bool(rows), "trajectories", rows, "list at least one trajectory")
    for index, row in enumerate(rows):
        check_trajectory(row, f"trajectories[{index}]")
    check_groups(rows, data["meta"]["prompts"], data["meta"]["samples_per_prompt"])
    return data


def check_trajectory(row: Any, at: str) -> None:
    require(isinstance(row, dict), at, row, "must be an object")
    for field in ("prompt", "sample"):
        check_count(row.get(field), f"{at}.{field}", least=0)
    check_count(row.get("prompt_tokens"), f"{at}.prompt_tokens")
    turns = row.get("turns")
    require(isinstance(turns, list) and bool(turns), f"{at}.turns", turns, "list at least one turn")
    for index, turn in enumerate(turns):
        check_turn(turn, f"{at}.turns[{index}]", last=index + 1 == len(turns))


def check_turn(turn: Any, at: str, last: bool) -> None:
    require(isinstance(turn, dict), at, turn, "must be an object")
    unknown = sorted(turn.keys() - TOOL - {"new_tokens"})
    require(not unknown, at, unknown, "unknown keys; a turn has new_tokens, tool_tokens and tool_seconds")
    check_count(turn.get("new_tokens"), f"{at}.new_tokens")
    if last:
        extra = sorted(turn.keys() & TOOL)
        require(not extra, at, extra, "the last turn has no tool result; remove these keys")
        return
    check_count(turn.get("tool_tokens"), f"{at}.tool_tokens")
    seconds = turn.get("tool_seconds")
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    require(number and 0 <= seconds < math.inf, f"{at}.tool_seconds", seconds, "give a latency of 0 s or more")


def check_groups(rows: list[Row], prompts: int, samples: int) -> None:
    """Each prompt has each sample once, and its samples share its length."""
    lengths: dict[int, int] = {}
    for row in rows:
        expected = lengths.setdefault(row["prompt"], row["prompt_tokens"])
        same = row["prompt_tokens"] == expected
        require(same, f"{place(row)} prompt_tokens", row["prompt_tokens"], f"its prompt has {expected} elsewhere")
    found = sorted((row["prompt"], row["sample"]) for row in rows)
    complete = found == [(prompt, sample) for prompt in range(prompts) for sample in range(samples)]
    fix = f"list samples 0 to {samples - 1} of prompts 0 to {prompts - 1} once each, as meta says"
    require(complete, "trajectories", f"{len(rows)} trajectories", fix)


def check_count(value: Any, field: str, least: int = 1) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= least, field, value, f"give a whole number of at least {least}")


def require(holds: bool, field: str, value: object, fix: str) -> None:
    if not holds:
        raise WorkloadError(field, value, fix)


def place(row: Row) -> str:
    return f"prompt {row['prompt']} sample {row['sample']}"


def shrunk(row: Row, by: int) -> Row:
    turns = [
        {name: value / by if name == "tool_seconds" else max(1, value // by) for name, value in turn.items()}
        for turn in row["turns"]
    ]
    return row | {"prompt_tokens": max(1, row["prompt_tokens"] // by), "turns": turns}


def scripts_of(rows: list[Row]) -> dict[tuple[int, int], Row]:
    """Trajectories by prompt and sample."""
    return {(row["prompt"], row["sample"]): row for row in rows}


def length_of(row: Row) -> int:
    """Tokens of the whole trajectory."""
    return row["prompt_tokens"] + sum(turn["new_tokens"] + turn.get("tool_tokens", 0) for turn in row["turns"])


def scripted_ids(count: int, *of: int) -> list[int]:
    """`count` token ids, a function of `of` alone."""
    generator = random.Random(" ".join(map(str, of)))
    return [generator.randrange(IDS) for _ in range(count)]
