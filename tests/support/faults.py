"""Runs main.py and kills its process at a named point of a named step: `faults.py POINT STEP RANK [main's arguments]`.

The program itself has no hooks: this wraps its functions from outside. Not a test; test_faults.py starts it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import main
import policy
import trainer
from run import checkpoint

POINTS = ("rollout", "reward", "backward", "optimizer", "saving", "before_rename", "before_latest", "after_latest")


def die_on(owner: Any, name: str, dies: Callable[..., bool], *, after: bool = False) -> None:
    """Wraps owner.name so that the process is killed at the call for which `dies(count, *args)` holds."""
    inner, count = getattr(owner, name), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if after:
            result = inner(*args, **kwargs)
        if dies(count, *args):
            os.write(2, f"killed at {name}\n".encode())  # the test asks for it: another death proves nothing
            os.kill(os.getpid(), signal.SIGKILL)
        return result if after else inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def arm(point: str, step: int) -> None:
    nth = lambda count, *_: count == step  # noqa: E731
    if point == "rollout":
        die_on(trainer.Trainer, "_rollout", nth, after=True)
    elif point == "reward":
        die_on(trainer, "grade_trajectory", lambda count, *_: count == 16 * (step - 1) + 5)
    elif point == "backward":
        die_on(policy.Policy, "backward", nth, after=True)
    elif point == "optimizer":
        die_on(policy.Policy, "step", nth, after=True)
    elif point == "saving":
        die_on(policy.Policy, "save", nth, after=True)
    elif point == "after_latest":
        die_on(checkpoint.CheckpointStore, "_commit", nth, after=True)
    else:
        target = f"step_{step}" if point == "before_rename" else "latest"
        times = 1 if point == "before_rename" else step
        seen = [0]

        def dies(_: int, source: Any, destination: Any) -> bool:
            seen[0] += Path(destination).name == target
            return Path(destination).name == target and seen[0] == times

        die_on(checkpoint.os, "replace", dies)


if __name__ == "__main__":
    point, step, rank, *arguments = sys.argv[1:]
    if os.environ.get("RANK", "0") == rank:
        arm(point, int(step))
    sys.exit(main.main(arguments))
