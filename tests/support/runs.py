"""A small run folder written by hand, for tests of what looks at runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from config import load_config
from rollout.records import RolloutRecord, StopReason, ToolCall, Turn
from run import trajectories
from tests.support.builders import scored

ROOT = Path(__file__).parents[2]
TINY = ROOT / "models" / "tiny_qwen3"


def metrics_row(step: int, **values) -> dict:
    row = {
        "step": step, "reward": 0.1 * step, "correct": 0.05 * step, "trajectories": 4, "equal_groups": 0.5,
        "sampled_tokens": 40, "length": 20.0, "turns": 1.5, "tool_calls": 2, "tool_error_rate": 0.0, "skipped": False,
        "stops": {"answered": 4}, "reasons": {"correct": 3, "no_box": 1}, "tool_statuses": {"ok": 2}, "loss": 0.01,
        "entropy": 0.3, "grad_norm": 1.0, "seconds": 2.0, "seconds_rollout": 1.0, "seconds_update": 0.5,
        "rollout_steps": 10, "rollout_running_rows": 640, "rollout_seconds": 1.0, "rollout_idle_seconds": 0.1,
    }  # fmt: skip
    return row | values


def write_run(folder: Path, rows: Sequence[dict], groups: dict[int, list[RolloutRecord]] | None = None) -> Path:
    """groups: step -> its records; the first sample of each is right and has entropies, the others neither."""
    (folder / "trajectories").mkdir(parents=True)
    config = load_config(ROOT / "configs/tiny_cpu.json", [f"model.path={TINY}"])
    (folder / "config.json").write_text(config.to_json())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, records in (groups or {}).items():
        marks = [1.0 if r.sample_index == 0 else -0.5 for r in records]
        first = [r for r in records if r.sample_index == 0]
        nats = {(r.prompt_index, r.sample_index): [0.3 * (i % 10) for i in range(r.num_sampled)] for r in first}
        trajectories.write_step(folder, step, records, scored(records, marks), ["7"] * 100, nats)
    return folder


def spoken(
    tokenizer, prompt: str, turns: Sequence[str], *, output: str = "7", prompt_index: int = 0, sample: int = 0,
    status: str = "ok", code: str = "print(7)",
) -> RolloutRecord:  # fmt: skip
    """A trajectory of texts; each turn but the last calls the tool once."""
    ids = tokenizer.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
    spans, sampled = [], [False] * len(ids)
    for number, text in enumerate(turns):
        drawn = tokenizer.encode(text + "<|im_end|>")
        last = number == len(turns) - 1
        call = ToolCall(name="python", arguments={"code": code}, status=status, text=output, seed=1, wall_s=0.25)
        spans.append(Turn(start=len(ids), end=len(ids) + len(drawn), ended=True, calls=() if last else (call,)))
        ids += drawn
        sampled += [True] * len(drawn)
        if not last:
            appended = tokenizer.encode(f"\n<|im_start|>user\n{output}<|im_end|>\n<|im_start|>assistant\n")
            ids += appended
            sampled += [False] * len(appended)
    logprobs = [-0.4 * (place % 10) if drawn else 0.0 for place, drawn in enumerate(sampled)]
    return RolloutRecord(
        prompt_index=prompt_index, sample_index=sample, policy_step=0, token_ids=tuple(ids), sampled=tuple(sampled),
        logprobs=tuple(logprobs), turns=tuple(spans), stop=StopReason.ANSWERED,
    )  # fmt: skip
