"""Hand-written records for tests."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollout.records import RolloutRecord, Scored, StopReason, Turn
from run import trajectories


def record(
    spans: str, *, prompt: int = 0, sample: int = 0, first_id: int = 10, stop: StopReason = StopReason.ANSWERED
) -> RolloutRecord:
    """`"PPPAAOOA"`: P prompt, A sampled, O appended; ids count up from first_id, log-probs are -0.1 x place."""
    turns, start = [], None
    for place, kind in enumerate(spans + "."):
        if kind == "A" and start is None:
            start = place
        elif kind != "A" and start is not None:
            turns.append(Turn(start=start, end=place, ended=True))
            start = None
    sampled = tuple(kind == "A" for kind in spans)
    return RolloutRecord(
        prompt_index=prompt,
        sample_index=sample,
        policy_step=0,
        token_ids=tuple(range(first_id, first_id + len(spans))),
        sampled=sampled,
        logprobs=tuple(-0.1 * place if drawn else 0.0 for place, drawn in enumerate(sampled)),
        turns=tuple(turns),
        stop=stop,
    )


def scored(records: Sequence[RolloutRecord], advantages: Sequence[float]) -> list[Scored]:
    return [
        Scored(record=r, reward=1.0 if a > 0 else -1.0, reason="correct" if a > 0 else "no_box", advantage=a)
        for r, a in zip(records, advantages, strict=True)
    ]


def write_rows(run_dir: Path, step: int, rows: Sequence[dict[str, Any]]) -> None:
    """Rows as `run.trajectories.read_step` gives them, into a step's file; what a row lacks is null."""
    coded = [
        row
        | {"sampled": [bool(drawn) for drawn in row["sampled"]]}
        | {"turns": [turn | {"calls": [_coded(c) for c in turn["calls"]]} for turn in row["turns"]]}
        for row in rows
    ]
    (run_dir / "trajectories").mkdir(exist_ok=True)
    trajectories.write_table(run_dir, step, pa.Table.from_pylist(coded, schema=trajectories.SCHEMA))


def _coded(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"arguments": json.dumps(call["arguments"]), "text": call["text"].encode("utf-8", "surrogatepass")}


def mapped_files() -> str:
    """What this process has in its memory without having read it, a line each, the file's path at its end."""
    gc.collect()  # DeepSpeed's readers go in circles
    return Path("/proc/self/maps").read_text()
