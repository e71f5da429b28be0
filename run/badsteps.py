"""Steps that may not be trained on: loss or gradient not finite, or too many trajectories spoilt by the sandbox.

A step that is not finite leaves the weights alone (policy.py); its batches are kept for study, the step counter, and
with it schedule and data, moves on, and too many such steps in a row end the run. A sandbox that fails often ends it
at once, since its trajectories are dropped and training on the rest would be noise.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from config import UserError
from rollout.records import RolloutRecord, StopReason
from run.files import write_whole
from update.update import Batches, UpdateStats

MAX_SPOILT = 0.01  # share of a step's trajectories


class InfraError(UserError, RuntimeError):
    """The sandbox failed too often."""


class NotFiniteError(UserError, RuntimeError):
    """Too many steps in a row could not be trained."""


class BadSteps:
    """One per rank; every rank sees the same losses and norms, so all stop together."""

    def __init__(self, run_dir: Path, rank: int, limit: int):
        self._folder, self._rank, self._limit = run_dir / "bad_steps", rank, limit
        self._in_a_row = 0

    def watch(self, step: int, minibatches: Sequence[Batches], stats: UpdateStats) -> None:
        """Writes `bad_steps/step_N_rank_R.pt` where an update of step N (from 1) was bad.

        The file is a list, one entry per bad update: its place, loss and gradient norm, and this rank's micro-batches
        as dictionaries of `ResponseTokenBatch` fields (`torch.load(..., weights_only=True)`).
        """
        bad = [index for index, one in enumerate(stats.updates) if one.is_bad]
        self._in_a_row = self._in_a_row + 1 if bad else 0
        if bad:
            content = io.BytesIO()
            torch.save([_entry(index, minibatches[index], stats) for index in bad], content)
            write_whole(self._folder / f"step_{step}_rank_{self._rank}.pt", content.getvalue())

    def check(self, step: int) -> None:
        """Raises NotFiniteError after the last allowed bad step in a row."""
        if self._in_a_row >= self._limit:
            raise NotFiniteError(
                f"step {step}: loss or gradient not finite in {self._in_a_row} steps in a row (train.max_bad_steps="
                f"{self._limit}); no weight was changed by them, and their batches are in {self._folder}; lower "
                "train.learning_rate, or resume from an earlier checkpoint"
            )


def _entry(index: int, batches: Batches, stats: UpdateStats) -> dict[str, Any]:
    one = stats.updates[index]
    fields = [{f.name: getattr(b, f.name) for f in dataclasses.fields(b)} for b in batches]
    return {"update": index, "loss": one.loss, "grad_norm": one.grad_norm, "micro_batches": fields}


def check_sandbox(records: Sequence[RolloutRecord]) -> None:
    """Raises InfraError where the sandbox spoilt too many of a step's trajectories."""
    spoilt = sum(r.stop is StopReason.TOOL_INFRA for r in records)
    if spoilt > MAX_SPOILT * len(records):
        raise InfraError(
            f"the sandbox failed in {spoilt} of {len(records)} trajectories of one step, more than "
            f"{MAX_SPOILT:.0%}; see the tool's report at the start of the run"
        )
