"""The policy inside DeepSpeed: gradients do not depend on the split, and the rollout sees the trained weights."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.runtime.rollout import RolloutEngine as DeepSpeedRolloutEngine
from transformers import AutoModelForCausalLM

import modeling.logprob
from policy import Policy, _count_again, build_optimizer
from rollout.engine import RolloutEngine
from run.tensorfiles import checksum
from tests.conftest import make_model
from tests.support.builders import mapped_files, record, scored
from tests.support.policies import (
    ROOT,
    assert_equal_gradients,
    config,
    gradients,
    make_policy,
    micro_batches,
    step,
)
from update.update import batch_loss, update

# DeepSpeed's CPU optimizer compiles for a minute where it has not yet, and needs a compiler for it.
OFFLOAD = [False, pytest.param(True, marks=pytest.mark.slow)]


def backward(policy: Policy, batches) -> float:
    """Gradients of the whole step are left in the engine; returns the loss."""
    total = 0.0
    policy.train()
    for index, batch in enumerate(batches):
        out = policy.token_logprobs(batch)
        loss, _ = batch_loss(out, batch, out.logprobs.detach(), None, policy.config.loss)
        policy.backward(loss, last=index == len(batches) - 1)
        total += loss.item()
    return total


@pytest.fixture(scope="module")
def whole():
    """Loss and gradients of the step as one micro-batch."""
    policy = make_policy()
    loss = backward(policy, micro_batches(step()))
    return loss, gradients(policy)


@pytest.mark.parametrize("max_tokens", [17, 30, 50])
def test_micro_batches_add_up_to_the_gradient_of_one(whole, max_tokens):
    batches = micro_batches(step(), max_tokens)
    assert len(batches) > 1
    policy = make_policy()
    loss = backward(policy, batches)
    assert abs(loss - whole[0]) < 1e-6
    assert_equal_gradients(gradients(policy), whole[1])


def test_the_gradient_equals_plain_autograd_over_a_padded_batch():
    """An independent restatement: Hugging Face's own attention, padding, a mask, one mean over sampled tokens.

    Random weights: the trained ones are so sharp that two fp32 forwards differ by 1e-5 of themselves.
    """
    policy = make_policy(model={"random_weights": True})
    backward(policy, micro_batches(step()))
    model = AutoModelForCausalLM.from_config(policy.model.config, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(policy.model.state_dict())
    items = step()
    longest = max(len(s.record.token_ids) for s in items)
    ids, mask, sampled, advantages = (torch.zeros(len(items), longest, dtype=t) for t in (int, int, bool, float))
    for row, s in enumerate(items):
        length = len(s.record.token_ids)
        ids[row, :length] = torch.tensor(s.record.token_ids)
        mask[row, :length] = 1
        sampled[row, :length] = torch.tensor(s.record.sampled)
        advantages[row] = s.advantage
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    loss = -(advantages[:, 1:] * logprobs)[sampled[:, 1:]].sum() / sampled.sum()
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    assert_equal_gradients(gradients(policy), expected, 3e-6)  # other kernels, other roundings
    flipped = {n: -g for n, g in expected.items()}
    with pytest.raises(AssertionError):
        assert_equal_gradients(gradients(policy), flipped)


def test_a_tied_head_walked_in_chunks_gives_the_same_gradient(whole, monkeypatch):
    monkeypatch.setattr(modeling.logprob, "CHUNK_LOGITS", 5 * 315)
    policy = make_policy()
    backward(policy, micro_batches(step()))
    assert_equal_gradients(gradients(policy), whole[1])


def test_gradient_checkpointing_gives_the_same_gradient(whole):
    policy = make_policy(model={"gradient_checkpointing": True})
    backward(policy, micro_batches(step()))
    assert_equal_gradients(gradients(policy), whole[1])


def test_in_bf16_many_micro_batches_are_added_up_in_fp32():
    items = scored([record("PPAAAAAA", prompt=i // 2, sample=i % 2, first_id=5 + i) for i in range(64)], [1.0] * 64)
    one, many = (make_policy(model={"dtype": "bfloat16"}) for _ in range(2))
    backward(one, micro_batches(items))
    batches = micro_batches(items, 7)
    assert len(batches) == 64
    backward(many, batches)
    # Rounding each part once to bf16 errs by 2^-9 at most; adding 64 parts up in bf16 errs by several per cent.
    assert_equal_gradients(gradients(many), gradients(one), 2e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_1_adds_up_micro_batches_as_zero_2_does(dtype):
    batches = micro_batches(step(), 17)
    assert len(batches) > 2
    found = []
    for stage in (1, 2):
        policy = make_policy(model={"dtype": dtype}, train={"zero_stage": stage})
        stats = update(policy, [batches], policy.config.loss, 1e-3)
        found.append((stats.updates[0].grad_norm, policy.model.get_input_embeddings().weight.detach().float()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6 if dtype == "float32" else 1e-3)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-7 if dtype == "float32" else 4e-3)


def test_an_update_trains_the_very_weights_that_the_rollout_samples():
    policy = make_policy()
    addresses = {name: p.data_ptr() for name, p in policy.model.named_parameters()}
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    for _ in range(3):
        update(policy, [micro_batches(step())], policy.config.loss, 1e-3)
    after = dict(policy.model.named_parameters())
    assert {name: p.data_ptr() for name, p in after.items()} == addresses
    assert all((after[name] - value).abs().max() > 1e-4 for name, value in before.items())


def test_the_learning_rate_of_each_step_is_the_one_given():
    policy = make_policy()
    before = policy.model.get_input_embeddings().weight.detach().clone()
    update(policy, [micro_batches(step())], policy.config.loss, 1e-5)
    change = (policy.model.get_input_embeddings().weight - before).abs().max().item()
    assert abs(change - 1e-5) < 1e-6  # Adam's first step moves by the learning rate


def test_the_norm_is_reported_before_clipping_and_clipping_limits_the_gradient():
    free, clipped = make_policy(), make_policy(train={"max_grad_norm": 1e-3})
    batches = micro_batches(step())
    norms = [update(p, [batches], p.config.loss, 1e-3).updates[0].grad_norm for p in (free, clipped)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert norms[0] > 1e-2


def test_the_first_ratio_is_exactly_one_and_nothing_is_clipped():
    policy = make_policy()
    stats = update(policy, [micro_batches(step(), 30)], policy.config.loss, 1e-3)
    assert stats.updates[0].ratio_error == 0.0
    assert stats.updates[0].clip_fraction == 0.0
    assert stats.tokens == sum(s.record.num_sampled for s in step() if s.advantage)


def test_deepspeed_leaves_the_models_modules_as_they_were():
    plain = AutoModelForCausalLM.from_pretrained(ROOT / "models/tiny_qwen3")
    policy = make_policy()
    assert [type(m) for m in policy.model.modules()] == [type(m) for m in plain.modules()]


def test_vectors_and_the_embedding_are_not_decayed():
    model = make_model("qwen2")
    optimizer = build_optimizer(model, config(train={"weight_decay": 0.1}))
    names = {id(p): name for name, p in model.named_parameters()}
    free = {names[id(p)] for group in optimizer.param_groups if not group["weight_decay"] for p in group["params"]}
    assert all("norm" in name or "bias" in name or "embed" in name for name in free)
    assert {name for name in names.values() if "norm" in name or "bias" in name or "embed" in name} == free


def test_random_weights_have_the_true_shape_and_repeat_with_the_seed():
    first, second = (make_policy(model={"random_weights": True}).model for _ in range(2))
    other = make_policy(model={"random_weights": True}, train={"seed": 1}).model
    shapes = {n: p.shape for n, p in make_policy().model.named_parameters()}
    assert {n: p.shape for n, p in first.named_parameters()} == shapes
    weights = [m.get_input_embeddings().weight for m in (first, second, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_our_engine_has_the_methods_of_deepspeeds():
    for name in DeepSpeedRolloutEngine.__abstractmethods__:
        assert callable(getattr(RolloutEngine, name))


def test_saving_meets_no_other_rank_so_that_none_waits_for_one_whose_disk_is_full(tmp_path, monkeypatch):
    policy = make_policy()

    def refuse(*_, **__):
        raise AssertionError("a collective call")

    for name in ("barrier", "all_reduce", "all_gather", "broadcast"):
        monkeypatch.setattr(deepspeed.comm, name, refuse)
    sums = policy.save(tmp_path)
    files = list((tmp_path / "engine").iterdir())
    assert {p.suffix for p in files} == {".pt"}
    assert sums == {f"engine/{p.name}": checksum(p) for p in files}  # without reading them again


@pytest.mark.parametrize("offload", OFFLOAD)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_holds_no_page_of_its_checkpoint(tmp_path, offload, dtype):
    """Which may be removed, on another machine too, while the run goes on."""
    settings = {"model": {"dtype": dtype}, "train": {"offload_optimizer": offload}}
    first = make_policy(**settings)
    backward(first, micro_batches(step()))
    first.step(1e-3)
    first.save(tmp_path)
    second = make_policy(**settings)
    second.load(tmp_path)
    assert str(tmp_path) not in mapped_files()
    states = [list(policy._optimizer.state.values()) for policy in (first, second)]
    for saved, resumed in zip(*states, strict=True):
        assert saved["exp_avg"].any() and torch.equal(saved["exp_avg"], resumed["exp_avg"])


@pytest.mark.parametrize("offload", OFFLOAD)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_optimizer_takes_the_steps_of_one_that_never_stopped(tmp_path, offload, dtype):
    settings = {"model": {"dtype": dtype}, "train": {"offload_optimizer": offload, "weight_decay": 0.1}}
    batches, straight = micro_batches(step()), make_policy(**settings)
    for _ in range(5):
        update(straight, [batches], straight.config.loss, 1e-3)
    straight.save(tmp_path)
    resumed = make_policy(**settings)
    resumed.load(tmp_path)
    for policy in (straight, resumed):
        for _ in range(2):
            update(policy, [batches], policy.config.loss, 1e-3)
    for name, value in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    masters = [list(policy._optimizer.state) for policy in (straight, resumed)]  # fp32, beside bf16 weights
    assert all(torch.equal(one, other) for one, other in zip(*masters, strict=True))


def test_a_resumed_cpu_optimizer_counts_its_steps_one_by_one():
    """The slow case above says why; this one needs no compiler."""
    seen = []

    def adam_update(number, step, rate, beta1, beta2, *rest):
        seen.append((number, step, rate, beta1, beta2))
        assert all(tensor.numel() == 0 for tensor in rest[-4:])

    state = {"a": {"step": 3}, "b": {"step": 3}}
    groups = [{"betas": (0.9, 0.99)}]
    _count_again(SimpleNamespace(
        param_groups=groups, state=state, opt_id=7, ds_opt_adam=SimpleNamespace(adam_update=adam_update)
    ))  # fmt: skip
    assert seen == [(7, step, 0.0, 0.9, 0.99) for step in (1, 2, 3)]


def test_a_resumed_optimizer_follows_the_settings_of_this_run(tmp_path):
    first = make_policy(train={"weight_decay": 0.1})
    first.save(tmp_path)
    second = make_policy(train={"weight_decay": 0.2, "adam_beta1": 0.5, "adam_beta2": 0.6})
    second.load(tmp_path)
    groups = second._optimizer.param_groups
    assert {group["betas"] for group in groups} == {(0.5, 0.6)}
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.2]


@pytest.mark.parametrize("replay", [False, True])
def test_micro_batches_of_a_mixture_of_experts_add_up_too(tmp_path, replay):
    make_model("gpt_oss").save_pretrained(tmp_path)
    items = step()
    if replay:  # other experts than the live ones, the same in every split
        items = [
            dataclasses.replace(s, record=dataclasses.replace(s.record, routes=bytes([1, 3, 0, 2]) * (len(r) - 1)))
            for s in items if (r := s.record.token_ids)
        ]  # fmt: skip

    def policy():
        model = {"path": str(tmp_path), "dtype": "float32", "gradient_checkpointing": True, "router_replay": replay}
        return make_policy(model=model)

    whole, split = policy(), policy()
    loss = backward(whole, micro_batches(items))
    assert backward(split, micro_batches(items, 17)) == pytest.approx(loss, abs=1e-6)
    assert_equal_gradients(gradients(split), gradients(whole))
