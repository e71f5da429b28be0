"""Numbers of a run as the words that a page shows."""

from __future__ import annotations

from typing import Any

from config import Config
from report.runs import NORMAL_95, Run, present

LAST = 5  # steps that stand for the end of a run


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
    """The row of key figures: label, value, note."""
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
    """One line of the evaluation table. The interval is mean ± 1.96 standard errors over problems."""
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
