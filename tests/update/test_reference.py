"""The frozen reference: its weights wait where they are told to and never train."""

from __future__ import annotations

import torch
from torch import nn

from modeling.logprob import TokenLogprobs
from policy import Reference
from tests.support.policies import CPU, make_policy, micro_batches, step
from update.update import update


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.places: list[torch.device] = []

    def to(self, device):
        self.places.append(device)
        return self  # a device that is not there could not be moved to

    def forward(self, batch):
        return TokenLogprobs(self.weight * batch, self.weight)


def test_parked_weights_visit_the_device_for_each_forward_and_return():
    module, cuda = Counted(), torch.device("cuda")
    reference = Reference(module, cuda, stays=False)
    assert module.places == [CPU]
    reference.logprobs([torch.zeros(2)])
    assert module.places == [CPU, cuda, CPU]


def test_resident_weights_stay_on_the_device():
    module, cuda = Counted(), torch.device("cuda")
    Reference(module, cuda, stays=True).logprobs([torch.zeros(2)])
    assert set(module.places) == {cuda}


def test_nothing_of_it_has_a_gradient():
    module = Counted()
    [values] = Reference(module, CPU, stays=True).logprobs([torch.ones(2)])
    assert not values.requires_grad
    assert not module.weight.requires_grad and not module.training


def test_it_stays_where_training_began_while_the_policy_moves():
    policy = make_policy(loss={"kl_coef": 0.1})
    batches = micro_batches(step(), 30)
    before = policy.reference_logprobs(batches)
    assert all(torch.equal(a, policy.frozen_logprobs(b)) for a, b in zip(before, batches, strict=True))
    update(policy, [batches], policy.config.loss, 1e-3)
    after = policy.reference_logprobs(batches)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not torch.equal(after[0], policy.frozen_logprobs(batches[0]))
