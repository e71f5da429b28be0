"""What a run shows while it runs: a live table on a terminal with `rich`, one plain line per step elsewhere.

Left out: other ranks. Progress inside a rollout counts the trajectories of the rank with the terminal.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import deque
from typing import Any

from run.files import Lasting, say

SHOWN = (
    "reward", "correct", "loss", "teacher_divergence", "clip_fraction", "entropy", "grad_norm", "mismatch_mean",
    "length", "turns", "tool_error_rate", "eval_avg_at_k", "eval_avg_low", "eval_avg_high", "eval_cut", "eval_boxless",
    "rollout_tokens_per_second", "update_tokens_per_second", "seconds",
)  # fmt: skip
# The live table's columns: header, name in the metrics row.
COLUMNS = (
    ("step", "step"), ("reward", "reward"), ("correct", "correct"), ("loss", "loss"), ("entropy", "entropy"),
    ("grad", "grad_norm"), ("mismatch", "mismatch_mean"), ("length", "length"), ("turns", "turns"),
    ("tool err", "tool_error_rate"), ("eval", "eval_avg_at_k"), ("tok/s", "rollout_tokens_per_second"),
    ("s", "seconds"),
)  # fmt: skip
LIVE_ROWS = 12


def open_console(steps: int) -> PlainConsole:
    """steps: train.steps. The live table where standard output is a terminal and `rich` is installed."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        return LiveConsole(steps)
    return PlainConsole(steps)


class PlainConsole:
    """A line a step. Progress is shown on a terminal alone: in a log file it would be noise."""

    def __init__(self, steps: int):
        self._steps = steps

    def step(self, row: dict[str, Any]) -> None:
        """A step is done; row: its metrics."""
        say(console_line(row, self._steps))

    def progress(self, done: int, total: int, tokens: int, tools: int) -> None:
        """Inside a rollout: trajectories done and in all, tokens sampled so far, turns whose tool runs."""

    def close(self) -> None: ...


class LiveConsole(PlainConsole):
    """The newest steps as a table, and under it a line that moves inside the rollout."""

    def __init__(self, steps: int, console: Any = None):
        """console: a rich Console, of standard output by default."""
        from rich.console import Console
        from rich.live import Live

        super().__init__(steps)
        self._rows: deque[dict[str, Any]] = deque(maxlen=LIVE_ROWS)
        self._counts = (0, 0, 0, 0)
        self._started = time.perf_counter()
        console = console or Console(file=Lasting(sys.stdout))  # type: ignore[arg-type]  # as much of an IO[str] as it uses
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)
        self._live.start()

    def step(self, row: dict[str, Any]) -> None:
        self._rows.append(row)

    def progress(self, done: int, total: int, tokens: int, tools: int) -> None:
        if tokens < self._counts[2] or not self._counts[1]:
            self._started = time.perf_counter()
        self._counts = (done, total, tokens, tools)

    def close(self) -> None:
        self._counts = (0, 0, 0, 0)
        self._live.stop()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table: Any = Table(box=None, header_style="bold", pad_edge=False)
        for header, _ in COLUMNS:
            table.add_column(header, justify="right")
        for row in self._rows:
            table.add_row(*(_short(row[name]) if name in row else "" for _, name in COLUMNS))
        words = untrained(self._rows[-1]) if self._rows else ""
        if words:
            table = Group(table, Text(words, "yellow"))
        done, total, tokens, tools = self._counts
        if not total:
            return table
        step = min(self._rows[-1]["step"] + 1 if self._rows else 1, self._steps)
        if done == total:
            return Group(table, Text(f"step {step}/{self._steps}  {total} trajectories sampled, training", "dim"))
        speed = tokens / max(time.perf_counter() - self._started, 1e-3)
        words = f"step {step}/{self._steps}  {done}/{total} trajectories  {speed:,.0f} tok/s  {tools} tools running"
        return Group(table, Text(words), ProgressBar(total=total, completed=done, width=60))


def console_line(row: dict[str, Any], steps: int) -> str:
    """One line for people: `step 3/50  reward -0.42  ...`."""
    parts = [f"step {row['step']}/{steps}"]
    parts += [f"{name} {_short(row[name])}" for name in SHOWN if name in row]
    return "  ".join([*parts, *filter(None, [untrained(row)])])


def untrained(row: dict[str, Any]) -> str:
    """Why a step, or some of its updates, left the weights as they were; empty where all of it was trained."""
    if "nothing_trained" in row:
        return f"nothing trained: {row['nothing_trained']}"
    bad, updates = row.get("bad_updates", 0), len(row.get("by_update", [0]))
    if bad == updates:
        return "nothing trained: loss or gradient not finite (see bad_steps/)"
    return f"{bad} of {updates} updates not trained: loss or gradient not finite (see bad_steps/)" if bad else ""


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
