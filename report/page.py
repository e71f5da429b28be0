"""`main.py report RUN`: what a run did, as one HTML file that opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import charts, words
from report.blobs import pack_json, pack_step, used_tokens
from report.html import render
from report.runs import Run, read_run, totals
from report.vocabulary import token_bytes
from run.files import OUT, write_whole
from run.stretches import changes
from run.trajectories import count_rows, read_table, stored_steps

SECTIONS = (
    ("learning", "Learning"), ("evaluation", "Evaluation"), ("behaviour", "Behaviour"), ("ledger", "Rewards"),
    ("time", "Time"), ("mismatch", "Mismatch"), ("trajectories", "Trajectories"), ("settings", "Settings"),
)  # fmt: skip


def write_report(run_dir: Path, tokenizer: Any, out: str | None, limit: int) -> str:
    """Writes the page and returns a line that says where.

    tokenizer: the run's; out: the file, by default report.html in the run's folder; limit: most trajectories
    """
    run = read_run(run_dir)
    steps = spread_steps({step: count_rows(run_dir, step) for step in stored_steps(run_dir)}, limit)
    path = Path(out) if out else run_dir / "report.html"
    write_whole(path, report_html(run, steps, tokenizer), OUT)
    return f"{path}: {path.stat().st_size / 1e6:.1f} MB, trajectories of {len(steps)} of {_taken(run)} steps"


def _taken(run: Run) -> int:
    """Steps that left metrics, trajectories or both: a crash may cut the last metrics line short."""
    return len({row["step"] for row in run.rows} | set(stored_steps(run.path)))


def spread_steps(rows: dict[int, int], limit: int) -> list[int]:
    """Of the stored steps (step -> trajectories) as many as `limit` trajectories allow, evenly spread; at least one.

    The first and the last are among them where two fit.
    """
    steps = sorted(rows)
    count = len(steps)
    while count > 1 and sum(rows[step] for step in _spread(steps, count)) > limit:
        count -= 1
    return _spread(steps, count)


def _spread(steps: Sequence[int], count: int) -> list[int]:
    if count <= 1:
        return list(steps[-1:])
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def report_html(run: Run, steps: Sequence[int], tokenizer: Any) -> str:
    groups = [
        charts.drawable(group, run.columns)
        for group in (
            charts.LEARNING, charts.BEHAVIOUR, charts.reasons(run.columns), charts.TIME, charts.MISMATCH
        )
    ]  # fmt: skip
    blobs = {"charts": pack_json({
        "groups": charts.as_json(groups), "columns": charts.used_columns(groups, run.columns),
    })}  # fmt: skip
    evaluations = [words.evaluation(row) for row in run.rows if "eval_avg_at_k" in row]
    absent = {"evaluation": not evaluations, "trajectories": not steps}
    return render(
        "report.html.j2", ["tokens.js", "browser.js"], blobs | _step_blobs(run, steps, tokenizer),
        title=run.name, lead=words.lead(run.config), sections=[s for s in SECTIONS if not absent.get(s[0])],
        figures=words.figures(run), evaluations=evaluations, ledger=ledger(run), steps=steps,
        kept=_kept(run, steps), settings=run.config.to_json(), changes=changes(run.path),
    )  # fmt: skip


def _step_blobs(run: Run, steps: Sequence[int], tokenizer: Any) -> dict[str, str]:
    if not steps:
        return {}
    vocabulary = used_tokens(read_table(run.path, step, ["token_ids"]) for step in steps)
    ids = vocabulary.to_pylist()
    texts, added = token_bytes(tokenizer, ids)
    known = {"ids": ids, "bytes": [text.decode("latin-1") for text in texts], "added": added}
    packed = {f"step-{step}": pack_step(read_table(run.path, step), vocabulary) for step in steps}
    return {"vocabulary": pack_json(known)} | packed


def _kept(run: Run, steps: Sequence[int]) -> str:
    if len(steps) == _taken(run):
        return "Every trajectory of the run."
    return f"Trajectories of {len(steps)} of {_taken(run)} steps, evenly spread."


def ledger(run: Run) -> dict[str, Any]:
    """Trajectories by reason, over the run and in its first and last tenth. They add up to all of them."""
    tenth = max(1, len(run.rows) // 10)
    first, last = totals(run.rows[:tenth], "reasons"), totals(run.rows[-tenth:], "reasons")
    counts = totals(run.rows, "reasons")
    spoilt = sum(row["trajectories"] for row in run.rows) - counts.total()
    if spoilt:
        counts["tool_infra"] += spoilt  # the sandbox failed: no reward, not trained on
    lines = [
        {
            "reason": reason, "count": f"{count:,}", "share": words.share(count, counts.total()),
            "before": words.share(first[reason], first.total()), "after": words.share(last[reason], last.total()),
        }
        for reason, count in counts.most_common()
    ]  # fmt: skip
    span = "first step" if tenth == 1 else f"first {tenth} steps"
    return {"lines": lines, "total": f"{counts.total():,}", "first": span, "last": span.replace("first", "last")}
