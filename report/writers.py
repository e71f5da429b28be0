"""Writes what a run leaves behind: one metrics line and one trajectory file a step.

Invariants: each step stands once, also after a resume (`rewind` removes what a lost tail of the run had written); a
trajectory file is complete or absent; it holds enough to recompute rewards, advantages and losses (`main.py audit`).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rollout.records import RolloutRecord, Scored


class RunWriter:
    """Rank 0's hand in the run folder."""

    def __init__(self, run_dir: Path):
        self._metrics = run_dir / "metrics.jsonl"
        self._trajectories = run_dir / "trajectories"
        self._trajectories.mkdir(parents=True, exist_ok=True)

    def rewind(self, step: int) -> None:
        """Removes metrics and trajectories of every step after `step`."""
        if self._metrics.exists():
            kept = [line for line in self._metrics.read_text().splitlines() if json.loads(line)["step"] <= step]
            _write_whole(self._metrics, "".join(line + "\n" for line in kept))
        for path in self._trajectories.glob("step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()

    def metrics(self, row: dict[str, Any]) -> None:
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def trajectories(
        self, step: int, records: Sequence[RolloutRecord], scored: Sequence[Scored], answers: Sequence[str]
    ) -> None:
        """Every record of the step, with null scores where the sandbox spoilt it.

        answers: the reference of each prompt of the step
        """
        scores = {(s.record.prompt_index, s.record.sample_index): s for s in scored}
        rows = (_row(r, scores.get((r.prompt_index, r.sample_index)), answers[r.prompt_index]) for r in records)
        lines = (json.dumps(row) for row in rows)
        _write_whole(self._trajectories / f"step_{step}.jsonl", "".join(line + "\n" for line in lines))


def _row(record: RolloutRecord, scored: Scored | None, answer: str) -> dict[str, Any]:
    row = dataclasses.asdict(record)
    row["sampled"] = [int(drawn) for drawn in record.sampled]
    scores = {name: getattr(scored, name, None) for name in ("reward", "reason", "advantage")}
    return row | {"answer": answer} | scores


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def console_line(row: dict[str, Any], steps: int, shown: Iterable[str]) -> str:
    """One line for people: `step 3/50  reward -0.42  ...`."""
    parts = [f"step {row['step']}/{steps}"]
    parts += [f"{name} {_short(row[name])}" for name in shown if name in row]
    return "  ".join(parts)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
