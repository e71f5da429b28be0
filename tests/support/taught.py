"""A policy with a teacher of other weights, on hand-written trajectories, for tests of on-policy distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from startup.building import build_teacher
from tests.support.policies import CPU, make_policy, step
from update.minibatch import plan_updates
from update.update import batch_loss, update

TINY = str(Path(__file__).parents[2] / "models/tiny_qwen3")


def taught(teacher: dict[str, Any] | None = None, weight: float = 1.0, **sections: Any):
    """Policy and teacher; by default the teacher's random weights differ from the policy's by their seed."""
    loss = {"distill_weight": weight} | sections.pop("loss", {})
    model = {"random_weights": True} | sections.pop("model", {})
    policy = make_policy(loss=loss, model=model, teacher={"path": TINY} | (teacher or {}), **sections)
    return policy, build_teacher(policy.config, policy, CPU)


def batches_of(policy, world_size: int = 1, items=None):
    """The micro-batches of the one update, by rank."""
    [ranks] = plan_updates(items or step(), policy.config, world_size)
    return ranks


def leave_gradients(policy, teacher, batches, prompts=()) -> float:
    """Gradients of an update, with a teacher or None, are left in the engine; returns this rank's part of the loss."""
    [lessons] = teacher.lessons([batches], prompts) if teacher else [[None] * len(batches)]
    total = 0.0
    policy.train()
    for index, (batch, lesson) in enumerate(zip(batches, lessons, strict=True)):
        out = policy.token_logprobs(batch, lesson if hasattr(lesson, "hidden") else None)
        value, _ = batch_loss(out, batch, out.logprobs.detach(), None, policy.config.loss, lesson)
        policy.backward(value, last=index == len(batches) - 1)
        total += value.item()
    return total


def train(policy, teacher, steps: int, rate: float = 1e-3, prompts=(), items=None):
    """The stats of each step, all on the same trajectories."""
    batches = batches_of(policy, items=items)[0]
    return [
        update(policy, [batches], policy.config.loss, rate, teacher.lessons([batches], prompts) if teacher else None)
        for _ in range(steps)
    ]
