"""Writes a run's outputs: one metrics line and one trajectory file per step, passed on to console and trackers.

Invariants: each step is there once, also after a resume (`rewind` removes the outputs of later steps); of the
trajectories at most `log.keep_trajectories` stay, the newest whole steps, and always the newest step.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from config import Config
from rollout.records import RolloutRecord, Scored
from run import trajectories
from run.console import PlainConsole
from run.files import append_line, json_lines, write_whole, writing
from run.trackers import Tracker, open_trackers


class RunWriter:
    """Writes into the run folder, on rank 0."""

    def __init__(
        self, run_dir: Path, keep_trajectories: int | None, console: PlainConsole, trackers: Sequence[Tracker] = ()
    ):
        self._run_dir, self._metrics = run_dir, run_dir / "metrics.jsonl"
        self._keep, self._console, self._trackers = keep_trajectories, console, trackers
        with writing(run_dir):
            (run_dir / "trajectories").mkdir(parents=True, exist_ok=True)
        # Rows of each step that is stored; None before they are counted.
        self._kept: dict[int, int | None] = dict.fromkeys(trajectories.stored_steps(run_dir))

    def rewind(self, step: int) -> None:
        """Removes metrics and trajectories of every step after `step`, and a last line that a full disk cut short.

        Raises DamageError where what stays cannot be read.
        """
        if self._metrics.exists():
            write_whole(self._metrics, "".join(line + "\n" for line in self._metrics_until(step)))
        for later in [s for s in self._kept if s > step]:
            self._remove(later)
        self._count()
        for tracker in self._trackers:
            tracker.rewind(step)

    def _metrics_until(self, step: int) -> Iterator[str]:
        """What comes after is not even read: it may be what a loss of power has left."""
        for line, row in json_lines(self._metrics):
            if row["step"] <= step:
                yield line
            if row["step"] >= step:
                return

    def metrics(self, row: dict[str, Any]) -> None:
        append_line(self._metrics, json.dumps(row))
        self._console.step(row)
        for tracker in self._trackers:
            tracker.log(row)

    def trajectories(
        self, step: int, records: Sequence[RolloutRecord], scored: Sequence[Scored], answers: Sequence[str],
        entropies: Mapping[tuple[int, int], Sequence[float]] = trajectories.NONE,
    ) -> None:  # fmt: skip
        """See `run.trajectories.write_step`; then drops the oldest steps beyond the bound."""
        trajectories.write_step(self._run_dir, step, records, scored, answers, entropies)
        self._kept[step] = len(records)
        while self._keep is not None and len(self._kept) > 1 and sum(self._count().values()) > self._keep:
            self._remove(min(self._kept))

    def close(self) -> None:
        """Ends the trackers; the console belongs to main.py."""
        for tracker in self._trackers:
            tracker.close()

    def _count(self) -> dict[int, int]:
        counts = {s: trajectories.count_rows(self._run_dir, s) if n is None else n for s, n in self._kept.items()}
        self._kept |= counts
        return counts

    def _remove(self, step: int) -> None:
        path = trajectories.step_path(self._run_dir, step)
        with writing(path):
            path.unlink()
        del self._kept[step]


def open_writer(config: Config, run_dir: Path, console: PlainConsole) -> RunWriter:
    """Makes the run folder, and opens what the config names."""
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    trackers = open_trackers(config.log, run_dir, dataclasses.asdict(config))
    return RunWriter(run_dir, config.log.keep_trajectories, console, trackers)
