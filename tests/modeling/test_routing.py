"""Experts are recorded while sampling, compared while training, and replayed if asked (G13)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from decode.cache import PagedCache
from modeling.activations import Recompute
from modeling.attention import IMPLEMENTATION
from modeling.packed_model import TokenLogprobModule
from modeling.routing import UNKNOWN, watch
from tests.conftest import make_model
from tests.support.policies import ROOT, make_policy
from tests.support.routes import DRAWS, PROMPT, batch_of, sampled

LAYERS, TOP_K, EXPERTS = 2, 2, 4


def watched(seed_of_router: int | None = None):
    model = make_model("gpt_oss")
    watch(model)
    if seed_of_router is not None:  # other experts are the best now
        generator = torch.Generator().manual_seed(seed_of_router)
        for layer in model.model.layers:
            layer.mlp.router.bias.data = torch.randn(EXPERTS, generator=generator) * 3
    return model


def live_ids(model, record) -> torch.Tensor:
    """The router's own choices for the record's tokens but the last, by Hugging Face's forward  # [T - 1, L, k]"""
    found = []
    routers = [layer.mlp.router for layer in model.model.layers]
    hooks = [router.register_forward_hook(lambda m, a, out: found.append(out[2])) for router in routers]
    with torch.no_grad():
        TokenLogprobModule(model, "auto", 1.0)(dataclasses.replace(batch_of(record), routes=None))
    for hook in hooks:
        hook.remove()
    return torch.stack([ids[: len(record.token_ids) - 1] for ids in found], dim=1)


def test_what_sampling_records_is_what_the_router_chose():
    model = watched()
    record = sampled(model)
    routes = torch.frombuffer(bytearray(record.routes), dtype=torch.uint8).view(-1, LAYERS, TOP_K)
    assert torch.equal(routes.long(), live_ids(model, record))


@torch.no_grad()
def test_without_a_flip_replay_changes_not_one_bit_and_the_flip_rate_is_zero():
    model = watched()
    record = sampled(model)
    batch = batch_of(record)
    live, replayed = (TokenLogprobModule(model, "auto", 1.0, router_replay=on)(batch) for on in (False, True))
    assert torch.equal(live.logprobs, replayed.logprobs)
    assert live.flips.sum() == 0
    assert torch.equal(live.logprobs[:DRAWS], torch.tensor(record.logprobs[PROMPT:])), "sampled as trained"


def test_flips_are_counted_and_replayed_experts_weigh_in_by_live_logits():
    record = sampled(watched())
    model = watched(seed_of_router=5)
    recorded = torch.frombuffer(bytearray(record.routes), dtype=torch.uint8).view(-1, LAYERS, TOP_K).long()
    batch = batch_of(record)
    out = TokenLogprobModule(model, "auto", 1.0, router_replay=True)(batch)
    chosen: list[torch.Tensor] = []

    def forced(module, args, output):  # the same by hand: recorded experts, softmax of the live logits
        logits = output[0]
        ids = recorded[:, len(chosen)].repeat(2, 1)
        chosen.append(ids)
        return logits, torch.softmax(logits.gather(1, ids), dim=1), ids

    by_hand = watched(seed_of_router=5)
    for layer in by_hand.model.layers:
        layer.mlp.router._forward_hooks.clear()
        layer.mlp.router.register_forward_hook(forced)
    expected = TokenLogprobModule(by_hand, "auto", 1.0)(dataclasses.replace(batch, routes=None))
    assert torch.equal(out.logprobs, expected.logprobs)
    first_live = live_ids(model, record)[:, 0].sort(1).values
    flipped = (first_live != recorded[:, 0].sort(1).values).any(1)[PROMPT - 1 :]
    assert flipped.any()
    assert (out.flips[:DRAWS] >= flipped / LAYERS).all()
    for run in (out, expected):
        run.logprobs.sum().backward()
    for (name, mine), (_, theirs) in zip(model.named_parameters(), by_hand.named_parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name
    assert model.model.layers[0].mlp.router.weight.grad.any()


def gradients(checkpointing: bool, interleaved: bool) -> dict[str, torch.Tensor]:
    record = sampled(watched())
    model = watched(seed_of_router=5).train()
    recompute = Recompute(model.base_model.layers, checkpointing, torch.device("cpu"))
    module = TokenLogprobModule(model, "auto", 1.0, recompute, router_replay=True)
    first = module(batch_of(record)).logprobs.sum()
    if interleaved:  # another batch's forward before this one's backward
        other = dataclasses.replace(record, routes=bytes([3, 2, 3, 2]) * (len(record.token_ids) - 1))
        module(batch_of(other))
    first.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_layer_that_is_recomputed_replays_its_own_batch(interleaved):
    plain, recomputed = gradients(False, interleaved), gradients(True, interleaved)
    for name, gradient in plain.items():
        assert torch.equal(gradient, recomputed[name]), name


@pytest.mark.parametrize("replay", [False, True])
def test_the_policy_replays_where_the_settings_ask_for_it(replay):
    path = str(ROOT / "models/tiny_gpt_oss")
    policy = make_policy(model={"path": path, "router_replay": replay})
    record = sampled(policy.model)
    layers, k, tokens = policy.model.config.num_hidden_layers, TOP_K, len(record.token_ids) - 1
    other = dataclasses.replace(record, routes=bytes([3, 2]) * (layers * k // 2 * tokens))
    policy.train()
    ours, theirs = (policy.frozen_logprobs(batch_of(r)) for r in (record, other))
    assert torch.equal(ours, theirs) == (not replay)
    assert policy.token_logprobs(batch_of(other)).flips.any()


@torch.no_grad()
def test_a_forward_with_another_attention_meets_no_recorded_experts():
    model, ids = watched(), torch.arange(5)[None]
    model.set_attn_implementation("eager")
    expected = model(input_ids=ids).logits
    model.set_attn_implementation(IMPLEMENTATION)
    other = dataclasses.replace(record := sampled(model), routes=bytes([3, 2]) * LAYERS * (len(record.token_ids) - 1))
    TokenLogprobModule(model, "auto", 1.0, router_replay=True)(batch_of(other))
    model.set_attn_implementation("eager")
    assert torch.equal(model(input_ids=ids).logits, expected)


@torch.no_grad()
def test_tokens_that_sampling_did_not_compute_are_routed_live():
    model = watched()
    record = sampled(model)
    unknown = dataclasses.replace(record, routes=bytes([UNKNOWN]) * len(record.routes))
    module = TokenLogprobModule(watched(seed_of_router=5), "auto", 1.0, router_replay=True)
    out = module(batch_of(unknown))
    assert out.flips.sum() == 0
    assert torch.equal(out.logprobs, module(dataclasses.replace(batch_of(record), routes=None)).logprobs)


def test_the_cache_gives_unknown_for_what_it_has_not_computed():
    cache = PagedCache(make_model("gpt_oss").config, 6, 4, torch.float32, "cpu")
    cache.routes.copy_(torch.randint(EXPERTS, cache.routes.shape))
    found = torch.frombuffer(bytearray(cache.routes_of([3, 1], 6, 9)), dtype=torch.uint8).view(9, LAYERS, TOP_K)
    assert torch.equal(found[5], cache.routes[:, 1, 1])
    assert (found[:6] < EXPERTS).all()
    assert (found[6:] == UNKNOWN).all()
    assert cache.routes_of([], 0, 3) == bytes([UNKNOWN]) * (3 * LAYERS * TOP_K)
