"""Updates on the real policy: splits and ranks do not matter, old log-probabilities are those that sampled, and what
is not finite changes nothing."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys

import pytest
import torch

from tests.support.objectives import OBJECTIVES, leave_gradients
from tests.support.policies import ROOT, assert_equal_gradients, gradients, make_policy, step
from tests.support.taught import batches_of, taught
from tests.support.taught import leave_gradients as leave_distilled
from update.minibatch import plan_updates
from update.update import batch_loss, update


def one_rank(policy, max_tokens: int):
    train = dataclasses.replace(policy.config.train, max_tokens_per_micro_batch=max_tokens)
    [[batches]] = plan_updates(step(), dataclasses.replace(policy.config, train=train), 1)
    return batches


@pytest.fixture(scope="module")
def whole():
    found = {}
    for name, loss in OBJECTIVES.items():
        policy = make_policy(loss=loss)
        batches = one_rank(policy, 16384)
        assert len(batches) == 1
        found[name] = (leave_gradients(policy, batches).item(), gradients(policy))
    return found


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_add_up_to_the_gradient_of_one(whole, name):
    policy = make_policy(loss=OBJECTIVES[name], rollout={"context_length": 17, "max_new_tokens": 16})
    reference = make_policy(loss=OBJECTIVES[name], rollout={"context_length": 17, "max_new_tokens": 16})
    batches = one_rank(policy, 17)
    assert len(batches) > 2
    value, one = leave_gradients(policy, batches).item(), leave_gradients(reference, one_rank(reference, 16384)).item()
    assert value == pytest.approx(one, abs=1e-6)
    assert_equal_gradients(gradients(policy), gradients(reference))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "found.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "-m", "tests.support.two_ranks", str(path)]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path, weights_only=False)


def test_two_ranks_have_the_gradient_of_one(whole, two_ranks):
    for name, (value, gradient) in two_ranks["gradients"].items():
        assert value == pytest.approx(whole[name][0], abs=1e-6)
        assert_equal_gradients(gradient, whole[name][1])


def test_two_ranks_distil_as_one_and_with_a_teacher_dealt_to_both_by_zero_3(two_ranks):
    policy, teacher = taught({"divergence": "jsd"})
    value = leave_distilled(policy, teacher, batches_of(policy)[0])
    for found, gradient in two_ranks["distilled"].values():
        assert found == pytest.approx(value, abs=1e-6)
        assert_equal_gradients(gradient, gradients(policy), 2e-6)


def test_a_fault_on_one_rank_skips_the_step_on_every_rank(two_ranks):
    assert two_ranks["fault"] == [[1, 1, 1], [1, 1, 0]]  # weights unchanged, known to be bad; the fault was rank 1's


def minibatches(policy, count: int):
    train = dataclasses.replace(policy.config.train, updates_per_rollout=count)
    return [ranks[0] for ranks in plan_updates(step(), dataclasses.replace(policy.config, train=train), 1)]


def on_policy(policy, batches):
    """The batches as this policy would have sampled them."""
    policy.train()
    return [dataclasses.replace(b, behaviour_logprobs=policy.frozen_logprobs(b)) for b in batches]


def test_only_the_first_of_several_updates_has_ratio_one():
    policy = make_policy()
    stats = update(policy, [on_policy(policy, b) for b in minibatches(policy, 3)], policy.config.loss, 1e-3)
    assert [u.ratio_error == 0.0 for u in stats.updates] == [True, False, False]
    assert stats.mismatch.max == 0.0  # at the weights that sampled, over all three
    assert stats.stale.max > 0.01 and stats.stale.ess < 1.0
    assert stats.stale.max == pytest.approx(max(u.gap.max for u in stats.updates))


def test_old_log_probabilities_of_a_later_update_are_those_of_the_weights_that_sampled():
    """Bit for bit: recomputed under the same micro-batches. Shown by a rate so small that the weights stay."""
    policy = make_policy()
    stats = update(policy, [on_policy(policy, b) for b in minibatches(policy, 2)], policy.config.loss, 1e-30)
    assert [u.ratio_error for u in stats.updates] == [0.0, 0.0]


def test_anchored_at_each_update_every_ratio_is_one_and_the_weights_carry_the_drift():
    policy = make_policy(loss={"old_policy": "update", "importance": "token", "importance_high": 1.001})
    stats = update(policy, [on_policy(policy, b) for b in minibatches(policy, 2)], policy.config.loss, 1e-3)
    assert [u.ratio_error for u in stats.updates] == [0.0, 0.0]
    assert stats.updates[0].importance_mean == 1.0
    assert stats.updates[1].importance_cut > 0.0


def test_one_update_on_two_mini_batches_differs_from_two_updates():
    one, two = make_policy(), make_policy()
    update(one, minibatches(one, 1), one.config.loss, 1e-3)
    stats = update(two, minibatches(two, 2), two.config.loss, 1e-3)
    assert len(stats.updates) == 2
    assert any(not torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))


def test_importance_weights_are_exactly_one_where_sampling_and_training_agree():
    for kind in ("token", "sequence", "token_mask", "sequence_mask"):
        policy = make_policy(loss={"importance": kind})
        [batches] = minibatches(policy, 1)
        one = update(policy, [on_policy(policy, batches)], policy.config.loss, 1e-3).updates[0]
        assert (one.importance_mean, one.importance_cut) == (1.0, 0.0)


def weights(policy) -> list[torch.Tensor]:
    return [p.detach().clone() for p in policy.model.parameters()]


def same(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_what_is_not_finite_changes_no_weight_and_leaves_no_trace(dtype, fault, monkeypatch):
    """A bad update, then a good one, equals the good one alone: Adam's moments and gradients included."""
    broken, sound = make_policy(model={"dtype": dtype}), make_policy(model={"dtype": dtype})
    before = weights(broken)
    [batches] = minibatches(broken, 1)
    loss = broken.config.loss
    with monkeypatch.context() as patch:
        if fault == "loss":  # its own gradient is finite: the constant is added
            patch.setattr(
                "update.update.batch_loss", lambda *args: (lambda v, c: (v + math.inf, c))(*batch_loss(*args))
            )
        else:
            handle = broken.model.get_input_embeddings().weight.register_hook(lambda g: g * math.inf)
        stats = update(broken, [batches], loss, 1e-3)
        if fault == "gradient":
            handle.remove()
    assert stats.updates[0].is_bad
    assert math.isfinite(stats.updates[0].loss) == (fault == "gradient")
    row = stats.row(loss)
    assert row["bad_updates"] == 1 and row["grad_norm"] is None
    assert same(weights(broken), before)
    assert not update(broken, [batches], loss, 1e-3).updates[0].is_bad
    update(sound, [batches], loss, 1e-3)
    assert same(weights(broken), weights(sound))


def test_rows_without_advantage_are_in_the_forward_with_a_kl_penalty():
    policy = make_policy(loss={"kl_coef": 0.1})
    stats = update(policy, minibatches(policy, 1), policy.config.loss, 1e-3)
    assert stats.tokens == sum(s.record.num_sampled for s in step())
    assert stats.updates[0].kl == 0.0  # the reference is the policy before training
    again = update(policy, minibatches(policy, 1), policy.config.loss, 1e-3)
    assert again.updates[0].kl > 0.0


def test_the_kl_penalty_alone_pulls_back_to_the_reference():
    """Equal rewards, so nothing but the penalty trains; a policy moved away comes closer."""
    policy = make_policy(loss={"kl_coef": 1.0, "kl_estimator": "k2"})
    loss = policy.config.loss
    for _ in range(3):
        update(policy, minibatches(policy, 1), dataclasses.replace(loss, kl_coef=0.0), 1e-3)
    items = [dataclasses.replace(s, advantage=0.0) for s in step()]
    batches = [ranks[0] for ranks in plan_updates(items, policy.config, 1)]
    kls = [update(policy, batches, loss, 1e-4).updates[0].kl for _ in range(12)]
    assert 0.0 < kls[-1] < 0.5 * kls[0]
