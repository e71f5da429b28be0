"""What every rank saw of a run's steps, gathered after each of them: wraps the trainer's functions from outside.

The program itself has no hooks. Install the same watch on every rank: gathering is collective.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import policy
import trainer
from benchmarks.memory_watch import HostWatch
from benchmarks.scripted import ScriptedRun
from data import TrainingData
from evaluation import grading
from reward import Grade, Reason
from rollout.records import RolloutRecord, StopReason, ToolCall, Turn
from rollout.stats import RolloutStats
from run import checkpoint
from run.trajectories import read_step

OF_THE_STEP = (  # alike on all ranks
    "step", "loss", "grad_norm", "mismatch_mean", "trajectories", "sampled_tokens", "tokens", "tool_calls",
    "rollout_occupancy", "rollout_preemptions", "rollout_eager_steps", "update_tokens_per_second",
)  # fmt: skip


class StepWatch:
    """The figures of each step of this process; rank 0 prints them as they come."""

    def __init__(self, host: HostWatch, script: type[ScriptedRun] | None, like: Path | None):
        """script: its longest trajectory is measured. like: a run whose steps these are compared with."""
        self.steps: list[dict[str, Any]] = []
        self.ranks: Any = None  # the trainer's, once there is a step
        self._host, self._script, self._like = host, script, metrics_of(like) if like else {}
        inner = trainer.Trainer.train_step

        def watched(run: trainer.Trainer, step: int) -> dict[str, Any]:
            if script:
                script.longest_drawing = 0.0
            row = inner(run, step)
            self.ranks = run.ranks
            self._note(row, run.ranks.gather(self._of_this_rank(row, run._parts.engine.stats)))
            return row

        trainer.Trainer.train_step = watched  # type: ignore[method-assign]

    def _of_this_rank(self, row: dict[str, Any], rollout: RolloutStats) -> dict[str, Any]:
        mine = {name: value for name, value in row.items() if name == "seconds" or name.startswith("seconds_")}
        memory = {"resident_gb": self._host.most}
        if torch.cuda.is_available():
            peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            memory |= {"peak_allocated_gb": peaks[0] / 1e9, "peak_reserved_gb": peaks[1] / 1e9}
        longest = self._script.longest_drawing if self._script else 0.0
        return {"seconds": mine, "memory": memory, "rollout": rollout, "longest": longest}

    def _note(self, row: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        found = {name: row.get(name) for name in OF_THE_STEP}
        for name in parts[0]["seconds"]:
            values = [part["seconds"][name] for part in parts]
            found[name] = round(sum(values) / len(values), 4)
            if len(values) > 1:
                found[name.replace("seconds", "slowest", 1)] = max(values)
        for name in parts[0]["memory"]:  # the most so far, by rank
            found[name] = [round(part["memory"][name], 3) for part in parts]
        rollouts, longest = [part["rollout"].seconds for part in parts], max(part["longest"] for part in parts)
        found["rollout_per_rank"] = [round(seconds, 3) for seconds in rollouts]
        found["tokens_per_rank"] = [part["rollout"].decode_tokens for part in parts]
        if longest:
            found["longest_seconds"] = round(longest, 3)
            found["balance"] = round(max(rollouts) / max(longest, sum(rollouts) / len(rollouts)), 3)
        other = self._like.get(row["step"])
        if other:
            found["like"] = {name: other.get(name) for name in ("loss", "grad_norm", "tokens")}
        self.steps.append(found)
        if self.ranks.rank == 0:
            print(json.dumps(found), flush=True)


PARTS = ("save", "_save_weights", "save_pretrained")  # of the policy; the last on rank 0 alone


class SaveWatch:
    """Of each checkpoint the seconds of this process's writing, its checksums included, and of its parts, which run at
    once (`save` holds `save_weights`), and its host memory before and at most meanwhile; printed on rank 0 as they
    come."""

    def __init__(self, host: HostWatch) -> None:
        self.found: list[dict[str, float]] = []
        write = checkpoint.CheckpointStore._write
        parts = {f"seconds_{name.strip('_')}": 0.0 for name in PARTS}
        for name in PARTS:
            setattr(policy.Policy, name, timed_part(getattr(policy.Policy, name), parts))

        def timed(store: checkpoint.CheckpointStore) -> None:
            started, before = time.perf_counter(), host.begin()
            write(store)
            seconds = {"seconds": time.perf_counter() - started, **parts}
            self.found.append(seconds | {"resident_gb": before, "most_gb": host.most})
            if store._rank == 0:
                print(json.dumps({"save": self.found[-1]}), flush=True)

        checkpoint.CheckpointStore._write = timed  # type: ignore[method-assign]


def timed_part(method: Callable[..., Any], seconds: dict[str, float]) -> Callable[..., Any]:
    def timed(*words: Any) -> Any:
        started = time.perf_counter()
        result = method(*words)
        seconds[f"seconds_{method.__name__.strip('_')}"] = time.perf_counter() - started
        return result

    return timed


def save_nothing() -> None:
    checkpoint.CheckpointStore.begin = lambda *_: None  # type: ignore[method-assign]


def alternate_grades() -> None:
    """Grades every other trajectory as right, so that no group is equal."""

    def grades(_: grading.BoxGrader, records: Sequence[RolloutRecord]) -> list[Grade]:
        right = [record.sample_index % 2 == 0 for record in records]
        return [Grade(one, Reason.CORRECT if one else Reason.NO_BOX) for one in right]

    grading.BoxGrader.grades = grades  # type: ignore[method-assign]


def train_on(run_dir: Path) -> None:
    """Replaces the rollout: each step trains on the trajectories that the same step of `run_dir` sampled."""

    def stored(self: trainer.Trainer, step: int, data: TrainingData, indices: Sequence[int], *_: Any) -> Any:
        with self._clock("rollout"):
            records = [record_of(row) for row in read_step(run_dir, step + 1)]
        self._parts.grader.expect([data.problems[i] for i in indices])
        return records, self._parts.grader.grades(records)

    trainer.Trainer._rollout = stored  # type: ignore[method-assign]


def record_of(row: dict[str, Any]) -> RolloutRecord:
    """The record of a stored row. Experts of a mixture are not stored."""
    turns = [turn | {"calls": tuple(ToolCall(**call) for call in turn["calls"])} for turn in row["turns"]]
    lines = {name: tuple(row[name]) for name in ("token_ids", "sampled", "logprobs")}
    numbers = {name: row[name] for name in ("prompt_index", "sample_index", "policy_step")}
    return RolloutRecord(**numbers, **lines, turns=tuple(Turn(**turn) for turn in turns), stop=StopReason(row["stop"]))


def metrics_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    """By step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}
