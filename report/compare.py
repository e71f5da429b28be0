"""`main.py compare A B`: the same step of two runs side by side, as a table in the terminal and a page with curves.

Steps are paired because two runs with equal data and seed see the same problems in the same step; the interval of the
mean difference is then narrower than the runs' own spread. Every metric is paired over the same window of steps, and
where one lacks it the pair is left out, not replaced by an older one; only evaluations, which few steps have, are
paired over the last ones that both runs made. Steps of one run are not independent (each starts from the
weights of the one before), so the interval says how much the last steps vary, not how another seed would fall.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import charts
from report.blobs import pack_json
from report.html import render
from report.runs import NORMAL_95, Column, Run, RunError, read_run
from run.files import OUT, write_whole
from run.stretches import changes

# Name in the metrics row, its words, and which way is better (+1 up, -1 down, 0 neither).
COMPARED = (
    ("correct", "correct", 1), ("reward", "mean reward", 1), ("eval_avg_at_k", "evaluation", 1),
    ("entropy", "entropy, nats", 0), ("length", "tokens a trajectory", 0), ("turns", "turns a trajectory", 0),
    ("tool_error_rate", "failed tool calls", -1), ("equal_groups", "groups that teach nothing", -1),
    ("grad_norm", "gradient norm", 0), ("mismatch_mean", "mismatch, nats", -1), ("seconds", "seconds a step", -1),
    ("rollout_tokens_per_second", "rollout, tokens/s", 1), ("update_tokens_per_second", "update, tokens/s", 1),
)  # fmt: skip
SPARSE = {"eval_avg_at_k"}  # measured in few steps by design
OF_REWARD = {"correct", "reward", "eval_avg_at_k"}  # no better or worse where reward.function differs
FEWEST_STEPS = 4  # for an interval


@dataclass(frozen=True, slots=True)
class Pair:
    """A metric over the paired steps: means, mean difference b - a, half its 95 % interval (None below four steps)."""

    name: str
    a: float
    b: float
    difference: float
    half: float | None
    steps: int
    span: str  # first and last of the steps
    better: int  # +1: b is better beyond the interval, -1: worse, 0: neither

    def cells(self) -> list[str]:
        spread = "" if self.half is None else f"± {self.half:.3g}"
        mark = {1: "better", -1: "worse", 0: ""}[self.better]
        return [self.name, f"{self.a:.4g}", f"{self.b:.4g}", f"{self.difference:+.3g}", spread, self.where, mark]

    @property
    def where(self) -> str:
        """First and last of the paired steps, and how many they are."""
        return f"{self.span} ({self.steps})"


def compare(a: Path, b: Path, last: int, out: str | None) -> str:
    """Writes the page; returns the table as text. last: common steps to pair, the newest. Raises RunError."""
    runs = read_run(a), read_run(b)
    pairs = paired(*runs, last)
    path = Path(out) if out else b / "compare.html"
    write_whole(path, _page(*runs, pairs), OUT)
    header = ["", "A", "B", "B - A", "95 %", "steps", ""]
    lines = _aligned([header, *(pair.cells() for pair in pairs)])
    changed = [f"{name}: {was} -> {now}" for name, was, now in settings_changed(*runs)]
    return "\n".join([f"A = {a}", f"B = {b}", *_resumed(*runs), *changed, *lines, f"{path}: the curves"])


def _has(row: dict[str, Any], name: str) -> bool:
    return row.get(name) is not None  # null stands for a figure that was not finite


def paired(a: Run, b: Run, last: int) -> list[Pair]:
    """One `Pair` a metric that both runs have in common steps. Raises RunError where they share no step."""
    ours, theirs = ({row["step"]: row for row in run.rows} for run in (a, b))
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise RunError(f"{a.path} and {b.path} have no step in common; compare runs that both start at step 1")
    found = []
    for name, words, direction in COMPARED:
        window = [s for s in common if name in ours[s] and name in theirs[s]] if name in SPARSE else common
        steps = [s for s in window[-last:] if _has(ours[s], name) and _has(theirs[s], name)]
        if steps:
            values = [(ours[s][name], theirs[s][name]) for s in steps]
            other_reward = name in OF_REWARD and a.config.reward.function != b.config.reward.function
            direction = 0 if other_reward else direction
            found.append(_pair(words, values, f"{steps[0]}-{steps[-1]}", direction))
    return found


def _pair(words: str, values: Sequence[tuple[float, float]], span: str, direction: int) -> Pair:
    a, b = zip(*values, strict=True)
    count = len(a)
    gaps = [y - x for x, y in zip(a, b, strict=True)]
    mean = sum(gaps) / count
    half = None
    better = 0
    if count >= FEWEST_STEPS:
        half = student_95(count - 1) * math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / (count - 1) / count)
        if abs(mean) > half:
            better = direction if mean > 0 else -direction
    return Pair(words, sum(a) / count, sum(b) / count, mean, half, count, span, better)


def student_95(freedom: int) -> float:
    """The 97.5 % point of Student's t, within 4 % from 3 degrees on (Abramowitz and Stegun 1964, 26.7.5)."""
    z = NORMAL_95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def settings_changed(a: Run, b: Run) -> list[tuple[str, str, str]]:
    """Settings that differ: name, value in a, value in b."""
    ours, theirs = (_settings(run) for run in (a, b))
    return [(name, ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]]


def _resumed(a: Run, b: Run) -> list[str]:
    """What a resume changed in either run: `Run.config` holds the last settings, and earlier steps had others."""
    found = (("A", changes(a.path)), ("B", changes(b.path)))
    return [f"{letter}, changed by a resume: {'; '.join(lines)}" for letter, lines in found if lines]


def _settings(run: Run) -> dict[str, str]:
    sections = dataclasses.asdict(run.config)
    return {f"{s}.{name}": json.dumps(value) for s, fields in sections.items() for name, value in fields.items()}


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    first, *rest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], rest)]).rstrip() for row in rows]


def _page(a: Run, b: Run, pairs: Sequence[Pair]) -> str:
    columns = _joined(a, b)
    groups = []
    for group in (charts.LEARNING, charts.BEHAVIOUR, charts.TIME, charts.MISMATCH):
        lines = tuple(one for chart in group.charts if chart.kind == "line" for one in _both(chart))
        groups.append(charts.drawable(charts.Group(group.title, lines), columns))
    blob = {"groups": charts.as_json(groups), "columns": charts.used_columns(groups, columns)}
    return render(
        "compare.html.j2", [], {"charts": pack_json(blob)},
        title=f"{a.name} and {b.name}", a=str(a.path), b=str(b.path), pairs=pairs, changed=settings_changed(a, b),
        resumed=_resumed(a, b), groups=[group.title for group in groups],
        sections=[("table", "Table"), *((f"g{i}", group.title) for i, group in enumerate(groups, start=1))],
    )  # fmt: skip


def _both(chart: charts.Chart) -> list[charts.Chart]:
    """One chart a curve, with a line for each run."""
    made = []
    for series in chart.series:
        title = chart.title if len(chart.series) == 1 else f"{chart.title}: {series.label}"
        lines = tuple(charts.Series(f"{run}:{series.column}", run.upper()) for run in ("a", "b"))
        made.append(charts.Chart(title, lines, chart.unit, "line", chart.log, chart.note))
    return made


def _joined(a: Run, b: Run) -> dict[str, Column]:
    """Columns of both runs over the union of their steps, named `a:...` and `b:...`."""
    steps = sorted({row["step"] for run in (a, b) for row in run.rows})
    joined: dict[str, Any] = {"step": steps}
    for letter, run in (("a", a), ("b", b)):
        place = {step: i for i, step in enumerate(run.columns["step"])}
        for name, column in run.columns.items():
            joined[f"{letter}:{name}"] = [column[place[s]] if s in place else None for s in steps]
    return joined
