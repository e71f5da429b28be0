"""Checkpoints that are complete or absent.

A checkpoint is a folder `checkpoints/step_N`: the Hugging Face copy (config, weights, tokenizer, chat template), the
engine's state of every rank under `engine/`, and `state.json`, written last. It is written beside its place and
renamed; `latest` names it only afterwards. No random stream runs across steps (order, noise and tool seeds are
functions of the step), so step and world size are the whole of the remaining state.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from config import UserError


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be resumed from; one line with the folder and the mend."""


class SavablePolicy(Protocol):
    """The part of `policy.Policy` that a checkpoint uses."""

    world_size: int

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def save_pretrained(self, folder: Path) -> None: ...


def save(
    run_dir: Path, step: int, policy: SavablePolicy, save_tokenizer: Callable[[Path], Any], rank: int,
    barrier: Callable[[], Any],
) -> Path:  # fmt: skip
    """Writes `checkpoints/step_N`. Collective: every rank calls it, and returns when it is complete."""
    folder = run_dir / "checkpoints" / f"step_{step}"
    partial = folder.with_name(folder.name + ".partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    policy.save(partial)
    if rank == 0:
        policy.save_pretrained(partial)
        save_tokenizer(partial)
    barrier()
    if rank == 0:
        (partial / "state.json").write_text(json.dumps({"step": step, "world_size": policy.world_size}) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
        latest = folder.with_name("latest.partial")
        latest.write_text(folder.name + "\n")
        os.replace(latest, folder.with_name("latest"))
    barrier()
    return folder


def find_latest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint, or None. A folder without `state.json` does not count."""
    complete = [path.parent for path in (run_dir / "checkpoints").glob("step_*/state.json") if _step(path.parent) >= 0]
    return max(complete, key=_step, default=None)


def load(folder: Path, policy: SavablePolicy) -> int:
    """Restores the policy and returns the number of steps it has taken. Collective. Raises CheckpointError."""
    state = json.loads((folder / "state.json").read_text())
    if state["world_size"] != policy.world_size:
        raise CheckpointError(
            f"{folder}: written by {state['world_size']} ranks, and this run has {policy.world_size}; optimizer "
            f"shards do not carry over. Resume on {state['world_size']} ranks, or start a new run with "
            f"model.path={folder}"
        )
    policy.load(folder)
    return state["step"]


def _step(folder: Path) -> int:
    name = folder.name.removeprefix("step_")
    return int(name) if name.isdigit() else -1
