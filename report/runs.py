"""A run folder as columns: its settings and its metrics, one list a name with None where a step lacks the value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import Config, UserError, load_config
from run.files import json_lines
from run.stretches import Stretch, stretches
from run.trackers import numbers

Column = list[float | None]
PHASES = ("rollout", "reward", "save", "teacher", "update", "write", "eval", "other")
NORMAL_95 = 1.96  # half width of a 95 % interval in standard errors


class RunError(UserError, ValueError):
    """A folder that holds no run; one line with the folder and the fix."""


@dataclass(frozen=True, slots=True)
class Run:
    path: Path
    config: Config
    rows: list[dict[str, Any]]  # of metrics.jsonl, in step order, at least one
    columns: dict[str, Column]  # "step" and every number; dictionaries of counts as "reasons/correct"

    @property
    def name(self) -> str:
        return self.path.resolve().name


def read_run(path: Path) -> Run:
    """Raises RunError, DamageError or ConfigError."""
    rows = read_metrics(path)
    config = load_config(path / "config.json")
    return Run(path, config, rows, _columns(rows, stretches(path)))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, at least one. Raises RunError, DamageError."""
    metrics = path / "metrics.jsonl"
    if not metrics.exists():
        raise RunError(f"{path}: no metrics.jsonl; name the folder of a run that has taken a step")
    rows = [row for _, row in json_lines(metrics)]
    if not rows:
        raise RunError(f"{path}: metrics.jsonl is empty; the run has not finished a step yet")
    return rows


def _columns(rows: list[dict[str, Any]], settings: list[Stretch]) -> dict[str, Column]:
    of_step = [next(one.config for one in settings if row["step"] in one.steps) for row in rows]
    flat = [numbers(row) | _derived(row, config["rollout"]) for row, config in zip(rows, of_step, strict=True)]
    counted = ("stops/", "reasons/", "tool_statuses/")
    names = sorted({name for row in flat for name in row})
    # A reason that does not occur in a step occurred 0 times; any other missing value is unknown.
    return {name: [row.get(name, 0.0 if name.startswith(counted) else None) for row in flat] for name in names}


def _derived(row: dict[str, Any], rollout: dict[str, Any]) -> dict[str, float]:
    """Figures that a page shows and no metrics line holds; shares lie between 0 and 1.

    rollout: the section of the step's settings
    """
    made: dict[str, float] = {}
    if "equal_groups" in row:
        made["teaching_groups"] = 1 - row["equal_groups"]
    if row.get("rollout_steps"):
        made["occupancy"] = row["rollout_running_rows"] / row["rollout_steps"] / rollout["decode_rows"]
    if row.get("rollout_seconds"):
        made["waiting"] = row["rollout_idle_seconds"] / row["rollout_seconds"]
    if "eval_avg_stderr" in row:
        half = NORMAL_95 * row["eval_avg_stderr"]
        made["eval_low"] = max(row["eval_avg_at_k"] - half, 0.0)
        made["eval_high"] = min(row["eval_avg_at_k"] + half, 1.0)
    known = {name: row.get(f"seconds_{name}", 0.0) for name in PHASES if name not in ("eval", "other")}
    made |= {f"phase_{name}": seconds for name, seconds in known.items()}
    made["phase_eval"] = row.get("eval_seconds", 0.0)
    made["phase_other"] = max(round(row.get("seconds", 0.0) - sum(known.values()), 3), 0.0)
    return made


def totals(rows: Iterable[dict[str, Any]], name: str) -> Counter[str]:
    """Counts of a dictionary metric (`stops`, `reasons`, `tool_statuses`) summed over steps."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row.get(name, {}))
    return total


def present(column: Column | None) -> list[float]:
    """The values that are there."""
    return [value for value in column or () if value is not None]
