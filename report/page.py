"""`main.py report RUN`: what a run did, as one HTML file that opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config import Config
from report import charts
from report.blobs import pack_json, pack_step, token_bytes, used_tokens
from report.html import render
from report.runs import NORMAL_95, Run, present, read_run, totals
from run.files import OUT, write_whole
from run.stretches import changes
from run.trajectories import count_rows, read_table, stored_steps

SECTIONS = (
    ("learning", "Learning"), ("evaluation", "Evaluation"), ("behaviour", "Behaviour"), ("ledger", "Rewards"),
    ("time", "Time"), ("mismatch", "Mismatch"), ("trajectories", "Trajectories"), ("settings", "Settings"),
)  # fmt: skip
LAST = 5  # steps that stand for the end of a run


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
        for group in (charts.LEARNING, charts.BEHAVIOUR, charts.reasons(run.columns), charts.TIME, charts.MISMATCH)
    ]
    blobs = {"charts": pack_json({
        "groups": charts.as_json(groups), "columns": charts.used_columns(groups, run.columns),
    })}  # fmt: skip
    evaluations = [evaluation(row) for row in run.rows if "eval_avg_at_k" in row]
    absent = {"evaluation": not evaluations, "trajectories": not steps}
    return render(
        "report.html.j2", ["tokens.js", "browser.js"], blobs | _step_blobs(run, steps, tokenizer),
        title=run.name, lead=lead(run.config), sections=[s for s in SECTIONS if not absent.get(s[0])],
        figures=figures(run), evaluations=evaluations, ledger=ledger(run), steps=steps,
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
            "reason": reason, "count": f"{count:,}", "share": share(count, counts.total()),
            "before": share(first[reason], first.total()), "after": share(last[reason], last.total()),
        }
        for reason, count in counts.most_common()
    ]  # fmt: skip
    span = "first step" if tenth == 1 else f"first {tenth} steps"
    return {"lines": lines, "total": f"{counts.total():,}", "first": span, "last": span.replace("first", "last")}


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}".replace("%", " %") if whole else "–"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def large(count: float) -> str:
    for size, unit in ((1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,.0f}"


def lead(config: Config) -> str:
    rollout = config.rollout
    return (
        f"{config.model.path} on {config.data.path}: {rollout.prompts_per_step} prompts × "
        f"{rollout.samples_per_prompt} samples a step, up to {rollout.max_turns} turns, "
        f"loss {config.loss.policy}, seed {config.train.seed}"
    )


def figures(run: Run) -> list[dict[str, str]]:
    """The key figures: label, value, note."""
    correct = present(run.columns.get("correct"))
    end = sum(correct[-LAST:]) / len(correct[-LAST:])
    seconds, sampled = (sum(present(run.columns.get(name))) for name in ("seconds", "sampled_tokens"))
    made = [
        ("Correct, last steps", share(end, 1), f"first step {share(correct[0], 1)}"),
        ("Steps", f"{len(run.rows)}", f"of {run.config.train.steps}"),
        ("Training time", duration(seconds), f"{seconds / len(run.rows):.2g} s a step"),
        ("Tokens sampled", large(sampled), f"in {large(sum(present(run.columns['trajectories'])))} trajectories"),
        ("Tool calls", large(sum(present(run.columns.get("tool_calls")))), ""),
    ]
    measured = [row for row in run.rows if "eval_avg_at_k" in row]
    if measured:
        last = evaluation(measured[-1])
        made.insert(1, ("Evaluation", last["right"], last["interval"]))
    return [{"label": label, "value": value, "note": note} for label, value, note in made]


def evaluation(row: dict[str, Any]) -> dict[str, str]:
    """A row of the evaluation table. The interval is mean ± 1.96 standard errors over problems."""
    mean, half = row["eval_avg_at_k"], NORMAL_95 * row["eval_avg_stderr"]
    low, high = max(mean - half, 0.0), min(mean + half, 1.0)
    return {
        "step": str(row["step"]),
        "size": f"{row['eval_problems']:,} × {row['eval_k']}",
        "right": share(mean, 1),
        "interval": f"{100 * low:.1f} to {100 * high:.1f} %",
        "any": share(row["eval_pass_at_k"], 1),
        "cut": share(row["eval_cut"], 1),
        "seconds": f"{row['eval_seconds']:.1f}",
    }
