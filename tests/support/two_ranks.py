"""Run by test_update.py under torchrun: gradients of objectives and distillation on two ranks, and a fault on one."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from tests.support.objectives import OBJECTIVES, leave_gradients
from tests.support.policies import gradients, make_policy, step
from tests.support.taught import batches_of, taught
from tests.support.taught import leave_gradients as leave_distilled
from update.minibatch import plan_updates
from update.update import update


def main() -> None:
    saved = {}
    for name, loss in OBJECTIVES.items():
        policy = make_policy(loss=loss)
        [ranks] = plan_updates(step(), policy.config, 2)
        value = leave_gradients(policy, ranks[dist.get_rank()])
        dist.all_reduce(value)
        saved[name] = (value.item(), gradients(policy))
    distilled = {}
    for stage, placement in enumerate(("gpu", "zero3"), start=1):
        policy, teacher = taught({"divergence": "jsd", "placement": placement}, train={"zero_stage": stage})
        value = torch.tensor(leave_distilled(policy, teacher, batches_of(policy, 2)[dist.get_rank()]))
        dist.all_reduce(value)
        distilled[placement] = (value.item(), gradients(policy))
    policy = make_policy()
    before = [p.detach().clone() for p in policy.model.parameters()]
    [ranks] = plan_updates(step(), policy.config, 2)
    mine = ranks[dist.get_rank()]
    if dist.get_rank() == 1:
        mine[0].advantages[0] = float("nan")
    stats = update(policy, [mine], policy.config.loss, 1e-3)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
    flags = torch.tensor([unchanged, stats.updates[0].is_bad, mine[0].advantages.isfinite().all()], dtype=torch.int64)
    every = [torch.zeros_like(flags) for _ in range(2)]
    dist.all_gather(every, flags)
    if dist.get_rank() == 0:
        torch.save({"gradients": saved, "distilled": distilled, "fault": [f.tolist() for f in every]}, sys.argv[1])
    dist.barrier()


if __name__ == "__main__":
    main()
