"""On-policy distillation through the real policy: the split, the mix with the policy loss, figures, and that it
teaches."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from deepspeed.runtime.rollout import opsd
from transformers import AutoModelForCausalLM

from config import LossConfig
from modeling.logprob import TokenLogprobs
from modeling.packed_model import PredictingStates
from tests.support.policies import assert_equal_gradients, gradients, make_policy, micro_batches, step
from tests.support.taught import batches_of, leave_gradients, taught, train
from update.minibatch import plan_updates
from update.update import batch_loss, update

KINDS = ["forward_kl", "reverse_kl", "jsd", "sampled"]
DEEPSPEED_BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_add_up_to_the_gradient_of_one(kind):
    short = {"rollout": {"context_length": 17, "max_new_tokens": 16}}
    found = []
    for tokens in (17, 16384):
        policy, teacher = taught({"divergence": kind}, train={"max_tokens_per_micro_batch": tokens}, **short)
        batches = batches_of(policy)[0]
        found.append((len(batches), leave_gradients(policy, teacher, batches), gradients(policy)))
    assert found[0][0] > 2 and found[1][0] == 1
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-6)
    assert_equal_gradients(found[0][2], found[1][2], 2e-6)


@pytest.mark.parametrize("kind", DEEPSPEED_BETA)
def test_the_gradient_equals_plain_autograd_through_deepspeeds_loss_over_a_padded_batch(kind):
    """An independent restatement: Hugging Face's own attention, whole logits, padding, a mask."""
    policy, teacher = taught({"divergence": kind})
    value = leave_gradients(policy, teacher, batches_of(policy)[0])
    items = step()
    longest = max(len(s.record.token_ids) for s in items)
    ids, mask, sampled = (torch.zeros(len(items), longest, dtype=t) for t in (int, int, bool))
    for row, s in enumerate(items):
        length = len(s.record.token_ids)
        ids[row, :length], mask[row, :length] = torch.tensor(s.record.token_ids), 1
        sampled[row, :length] = torch.tensor(s.record.sampled)
    logits, models = [], []
    for ours in (policy.model, teacher.model):
        model = AutoModelForCausalLM.from_config(ours.config, dtype=torch.float32, attn_implementation="eager")
        model.load_state_dict(ours.state_dict())
        models.append(model)
        logits.append(model(input_ids=ids, attention_mask=mask).logits[:, :-1])
    loss = opsd.generalized_jsd_loss(logits[0], logits[1].detach(), sampled[:, 1:], beta=DEEPSPEED_BETA[kind]).loss
    loss.backward()
    assert value == pytest.approx(loss.item(), rel=1e-5)
    expected = {name: p.grad for name, p in models[0].named_parameters()}
    assert_equal_gradients(gradients(policy), expected, 1e-5)


def test_the_sampled_divergence_is_the_clipped_weighted_policy_loss_of_what_the_teacher_finds_likelier():
    """Value, gradient and clipping against the formula in plain floats, off policy."""
    [batch] = micro_batches(step())
    generator = torch.Generator().manual_seed(3)
    count, share, cut = len(batch.targets), 0.3, 1.5
    behaviour = -1.0 - torch.rand(count, generator=generator)
    old, logprobs, taught_ = (behaviour + 0.6 * torch.randn(count, generator=generator) for _ in range(3))
    batch = dataclasses.replace(batch, behaviour_logprobs=behaviour)
    loss = LossConfig(distill_weight=share, importance="token", importance_high=cut)
    lesson = TokenLogprobs(taught_, torch.full((count,), 2.0))
    expected, slopes, outside = 0.0, [], []
    for row in zip(logprobs, old, behaviour, taught_, batch.advantages, batch.weights, strict=True):
        new, before, drawn, told, reward, weight = (x.item() for x in row)
        ratio, importance = math.exp(new - before), min(math.exp(before - drawn), cut)
        slope, clipped = 0.0, False
        for part, advantage in ((1 - share, reward), (share, told - drawn)):
            bounded = min(max(ratio, 0.8), 1.28)
            expected -= weight * importance * part * min(ratio * advantage, bounded * advantage)
            passes = ratio * advantage <= bounded * advantage
            slope -= weight * importance * part * ratio * advantage * passes
            clipped = clipped or not passes
        slopes.append(slope)
        outside.append(clipped)
    logprobs.requires_grad_()
    value, columns = batch_loss(TokenLogprobs(logprobs, torch.ones(count)), batch, old, None, loss, lesson)
    value.backward()
    assert value.item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(logprobs.grad, torch.tensor(slopes), rtol=1e-4, atol=1e-7)
    assert columns.clipped.tolist() == outside and 0 < sum(outside) < count
    torch.testing.assert_close(columns.teacher_gap, behaviour - taught_)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mix_is_the_weighted_sum_of_both_gradients(kind):
    every, _ = taught()
    batches = batches_of(every)[0]  # of all rows, also those without advantage
    parts = {}
    for weight in (0.0, 0.3, 1.0):
        policy, teacher = taught({"divergence": kind}, weight=weight)
        leave_gradients(policy, teacher, batches)
        parts[weight] = gradients(policy)
    mixed = {name: 0.7 * g + 0.3 * parts[1.0][name] for name, g in parts[0.0].items()}
    assert_equal_gradients(parts[0.3], mixed, 1e-5)


def test_pure_distillation_still_pulls_toward_the_reference():
    """The KL's gradient is the one that it adds to a policy loss."""
    every, _ = taught()
    [batch] = batches_of(every)[0]
    reference = -2.0 - torch.rand(len(batch.targets), generator=torch.Generator().manual_seed(0))
    parts = {}
    for weight in (0.0, 1.0):
        for coefficient in (0.0, 0.5):
            policy, teacher = taught({"divergence": "jsd"}, weight=weight, loss={"kl_coef": coefficient})
            lesson = teacher.lessons([[batch]], ())[0][0] if teacher else None
            policy.train()
            out = policy.token_logprobs(batch, lesson)
            old, known = out.logprobs.detach(), reference if coefficient else None
            value, _ = batch_loss(out, batch, old, known, policy.config.loss, lesson)
            policy.backward(value, last=True)
            parts[weight, coefficient] = gradients(policy)
    added = [{name: parts[w, 0.5][name] - g for name, g in parts[w, 0.0].items()} for w in (0.0, 1.0)]
    assert_equal_gradients(added[1], added[0], 1e-4)
    assert any(g.any() for g in added[0].values())


class Stub(torch.nn.Module):
    """A model whose hidden states are given."""

    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self.hidden, self.dtype, self.config = hidden, hidden.dtype, None

    def base_model(self, **_):
        return type("Out", (), {"last_hidden_state": self.hidden[None]})


def test_only_sampled_tokens_enter_whatever_stands_at_prompts_and_tool_results():
    policy, _ = taught()
    [batch] = batches_of(policy)[0]
    hidden = torch.randn(batch.input_ids.shape[1], 8)
    others = torch.ones(len(hidden), dtype=torch.bool)
    others[batch.predictors] = False
    assert others.sum() > 10
    changed = torch.where(others[:, None], torch.full_like(hidden, 1e6), hidden)
    assert torch.equal(PredictingStates(Stub(hidden), "eager")(batch), PredictingStates(Stub(changed), "eager")(batch))


@pytest.mark.parametrize("kind", ["forward_kl", "sampled"])
def test_rows_without_advantage_are_taught_too(kind):
    policy, teacher = taught({"divergence": kind})
    items = [dataclasses.replace(s, advantage=0.0) for s in step()]
    [stats] = train(policy, teacher, 1, items=items)
    assert stats.tokens == sum(s.record.num_sampled for s in items)
    assert stats.updates[0].grad_norm > 0.0


@pytest.mark.parametrize("kind", DEEPSPEED_BETA)
def test_teaching_brings_the_policy_closer(kind):
    policy, teacher = taught({"divergence": kind})
    divergences = [stats.teacher.divergence for stats in train(policy, teacher, 12, rate=3e-3)]
    assert divergences[-1] < 0.8 * divergences[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_metrics_say_how_far_the_teacher_is_by_turn(kind):
    policy, teacher = taught({"divergence": kind})
    [stats] = train(policy, teacher, 1)
    row = stats.row(policy.config.loss)
    assert set(row["teacher_by_turn"]) == {"1", "2", "3"}
    counts = {"1": 0, "2": 0, "3": 0}
    for s in step():
        for number, turn in enumerate(s.record.turns, start=1):
            counts[str(number)] += turn.end - turn.start
    mean = sum(row["teacher_by_turn"][turn] * count for turn, count in counts.items()) / sum(counts.values())
    assert row["teacher_divergence"] == pytest.approx(mean, rel=1e-6)
    if kind == "sampled":
        assert row["teacher_gap"] == row["teacher_divergence"]
    else:
        assert row["loss"] == pytest.approx(row["teacher_divergence"], rel=1e-5)  # w = 1, a mean over tokens
    assert 0.0 < row["teacher_entropy"] < 6.0 and row["entropy"] > 0.0


def test_without_a_teacher_the_metrics_say_nothing_of_one():
    policy = make_policy()
    [stats] = train(policy, None, 1)
    assert not [name for name in stats.row(policy.config.loss) if "teacher" in name]


def test_several_updates_learn_from_one_pass_of_a_live_teacher():
    """The head that the lessons hold is the one of the pass, although the first update has moved the live one."""
    policy, teacher = taught({"source": "live", "path": "", "privilege": "x"}, train={"updates_per_rollout": 2},
                             rollout={"trajectories_per_step": 8, "samples_per_prompt": 2})  # fmt: skip
    minibatches = [ranks[0] for ranks in plan_updates(step(), policy.config, 1)]
    assert len(minibatches) == 2
    lessons = teacher.lessons(minibatches, [[5, 6, 7]] * 4)
    before = lessons[1][0].head.clone()
    stats = update(policy, minibatches, policy.config.loss, 1e-2, lessons)
    assert torch.equal(lessons[1][0].head, before)
    assert not torch.equal(policy.model.get_output_embeddings().weight, before)
    assert [u.ratio_error == 0.0 for u in stats.updates] == [True, False]


def test_what_is_not_finite_changes_no_weight():
    policy, teacher = taught()
    before = [p.detach().clone() for p in policy.model.parameters()]
    batches = batches_of(policy)[0]
    lessons = teacher.lessons([batches], ())
    lessons[0][0].hidden[0, 0] = float("nan")
    stats = update(policy, [batches], policy.config.loss, 1e-3, lessons)
    assert stats.updates[0].is_bad and stats.row(policy.config.loss)["teacher_divergence"] is None
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
