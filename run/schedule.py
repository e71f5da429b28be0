"""When things happen in a run, and at which learning rate: pure functions of the step."""

from __future__ import annotations

from config import TrainConfig


def due(done: int, every: int, steps: int) -> bool:
    """Whether something that happens `every` steps (0: only after the last) happens after `done` steps."""
    return done == steps or (every > 0 and done % every == 0)


def learning_rate(step: int, train: TrainConfig) -> float:
    """The rate of step `step` (from 0): linear warm-up, then constant or linear to zero at train.steps."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.learning_rate
    return train.learning_rate * (train.steps - step) / (train.steps - train.warmup_steps)
