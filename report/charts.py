"""Which curves a page shows: plain data that `assets/charts.js` draws with uPlot."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from report.runs import PHASES, Column, present

Kind = Literal["line", "stack"]


@dataclass(frozen=True, slots=True)
class Series:
    column: str
    label: str
    low: str = ""  # columns of an interval, drawn as bars
    high: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    series: tuple[Series, ...]
    unit: Literal["", "share", "seconds", "tokens/s", "nats", "tokens"] = ""
    kind: Kind = "line"
    log: bool = False  # logarithmic where every value is above 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    title: str
    charts: tuple[Chart, ...] = field(default_factory=tuple)


def _one(title: str, column: str, unit: Any = "", note: str = "") -> Chart:
    return Chart(title, (Series(column, title),), unit, note=note)


LEARNING = Group("Learning", (
    Chart(
        "Correct answers",
        (Series("correct", "training problems"), Series("eval_avg_at_k", "evaluation, 95 %", "eval_low", "eval_high")),
        "share",
    ),
    _one("Mean reward", "reward", note="+1 right, −1 wrong"),
    _one("Groups that teach", "teaching_groups", "share", "whose samples did not all get the same reward"),
    Chart(
        "Distance from the teacher",
        (Series("teacher_divergence", "what is trained down"), Series("teacher_gap", "estimate of the KL")),
        "nats", note="per trained token",
    ),
    Chart("Entropy", (Series("entropy", "policy"), Series("teacher_entropy", "teacher")), "nats",
          note="per trained token"),
    _one("Gradient norm", "grad_norm", note="before clipping"),
    _one("Loss", "loss", note="moves around 0 by design; watch the reward"),
    _one("Clipped tokens", "clip_fraction", "share"),
    _one("Learning rate", "learning_rate"),
))  # fmt: skip
BEHAVIOUR = Group("Behaviour", (
    _one("Tokens a trajectory", "length", "tokens"),
    _one("Turns a trajectory", "turns"),
    _one("Tool calls a step", "tool_calls"),
    _one("Failed tool calls", "tool_error_rate", "share"),
))  # fmt: skip
TIME = Group("Where the time goes", (
    Chart("Seconds a step", tuple(Series(f"phase_{name}", name) for name in PHASES), "seconds", "stack"),
    Chart(
        "Occupancy of the rollout",
        (
            Series("occupancy", "decode rows busy"), Series("waiting", "all wait for tools"),
            Series("rollout_tools_hidden", "tool time with other rows decoding"),
        ),
        "share",
    ),
    Chart(
        "Speed", (Series("rollout_tokens_per_second", "rollout"), Series("update_tokens_per_second", "update")),
        "tokens/s",
    ),
))  # fmt: skip
MISMATCH = Group("Sampled against trained", (
    Chart(
        "Difference of log-probabilities", (Series("mismatch_mean", "mean"), Series("mismatch_max", "largest")),
        "nats", log=True, note="between sampling and the training forward",
    ),
    _one("KL of the two", "mismatch_k3", "nats", "k3 estimate"),
    _one("Largest |ratio − 1|", "ratio_error", note="exactly 0 with one update a rollout"),
))  # fmt: skip


def reasons(columns: dict[str, Column]) -> Group:
    """Stacked counts: why trajectories were right or wrong, how they ended, how tool calls ended."""
    titles = {"reasons": "Why right or wrong", "stops": "How trajectories ended", "tool_statuses": "How calls ended",
              "reward_errors": "How reward.function failed"}  # fmt: skip
    charts = []
    for name, title in titles.items():
        found = [column for column in columns if column.startswith(f"{name}/")]
        found.sort(key=lambda column: -sum(present(columns[column])))
        series = tuple(Series(column, column.partition("/")[2]) for column in found)
        charts.append(Chart(title, series, kind="stack"))
    return Group("Reward ledger", tuple(charts))


def drawable(group: Group, columns: dict[str, Column]) -> Group:
    """The group without series and charts for which the run has no number."""
    charts = []
    for chart in group.charts:
        series = tuple(s for s in chart.series if present(columns.get(s.column)))
        if chart.kind == "stack":
            series = tuple(s for s in series if any(present(columns[s.column])))
        if series:
            log = chart.log and all(v > 0 for s in series for v in present(columns[s.column]))
            charts.append(Chart(chart.title, series, chart.unit, chart.kind, log, chart.note))
    return Group(group.title, tuple(charts))


def used_columns(groups: list[Group], columns: dict[str, Column]) -> dict[str, Column]:
    """The columns that the charts of `groups` need, "step" among them."""
    names = {"step"} | {n for g in groups for c in g.charts for s in c.series for n in (s.column, s.low, s.high) if n}
    return {name: columns[name] for name in sorted(names) if name in columns}


def as_json(groups: list[Group]) -> list[dict[str, Any]]:
    return [asdict(group) for group in groups]
