"""Layers over fused kernels equal the model's own modules, value and gradient; on CPU in Triton's interpreter."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

import tests.support.interpreted as interpreted
from modeling.activations import Recompute
from modeling.attention import NO_MASK, TrainingRows, eager_softmax
from modeling.families import can_fuse
from tests.conftest import make_model

train_layers = pytest.importorskip("modeling.train_layers", reason="needs Triton")
from modeling.train_gate import silu_gate  # noqa: E402
from modeling.train_norm import add_norm, norm  # noqa: E402
from modeling.train_rotary import norm_rotate  # noqa: E402

DEVICE = interpreted.DEVICE
LENGTHS = (5, 9, 3)


def model_pair(family: str, dtype: torch.dtype):
    plain = make_model(family, dtype).to(DEVICE)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    fused = copy.deepcopy(plain)
    train_layers.fuse(fused)
    return plain.train(), fused.train()


def hidden_states(model):
    ids = torch.arange(sum(LENGTHS), device=DEVICE)[None] * 7 % 300
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(DEVICE)
    rows = TrainingRows(LENGTHS, eager_softmax, DEVICE)
    return model.base_model(
        input_ids=ids, position_ids=positions, attention_mask=NO_MASK, use_cache=False, rows=rows
    ).last_hidden_state


def gradients(model, out):
    torch.manual_seed(0)
    (out.float() * torch.randn(out.shape, device=DEVICE)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_in_fp32_values_and_gradients_are_those_of_the_modules(family):
    plain, fused = model_pair(family, torch.float32)
    expected, got = hidden_states(plain), hidden_states(fused)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    theirs, ours = gradients(plain, expected), gradients(fused, got)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


# Triton's interpreter cuts bf16 off where the device rounds; it rounds fp16.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def assert_rounded_alike(got, expected):
    """The last bit of a sum or of an exponential may turn a rounding; another rounding point would turn many."""
    assert got.dtype == expected.dtype == HALF
    assert (got != expected).float().mean() < 0.01
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-6)


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE, HALF)


def test_the_norm_rounds_where_the_module_rounds():
    module = Qwen3RMSNorm(48).to(DEVICE, HALF)
    with torch.no_grad():
        module.weight.copy_(normal(48))
    x, add = normal(40, 48), normal(1, 40, 48)[0]
    total, normed = add_norm(x, add, module.weight, module.variance_epsilon)
    assert torch.equal(total, x + add)
    assert_rounded_alike(normed, module(x + add))
    assert_rounded_alike(norm(x, module.weight, module.variance_epsilon)[1], module(x))


def test_the_gate_rounds_where_the_module_rounds():
    gate, up = normal(40, 96), normal(1, 40, 96)[0]
    assert_rounded_alike(silu_gate(gate, up), torch.nn.functional.silu(gate) * up)


def test_heads_are_normed_and_turned_with_the_roundings_of_the_module():
    attention = make_model("qwen3", HALF).to(DEVICE).base_model.layers[0].self_attn
    with torch.no_grad():
        attention.q_norm.weight.copy_(normal(16))
    q, k = normal(40, 6, 16), normal(1, 40, 2, 16)[0]
    angles = torch.arange(40.0, device=DEVICE)[:, None] / torch.arange(1, 9, device=DEVICE)
    cos, sin = (table.to(HALF).repeat(1, 2) for table in (angles.cos(), angles.sin()))
    norms = (attention.q_norm.weight, attention.k_norm.weight)
    got = norm_rotate(q, k, norms, cos, sin, attention.q_norm.variance_epsilon)
    normed = attention.q_norm(q), attention.k_norm(k)
    expected = apply_rotary_pos_emb(*normed, cos, sin)
    for ours, theirs in zip(got, expected, strict=True):
        assert_rounded_alike(ours, theirs)


def test_recomputed_layers_give_the_same_gradients():
    _, fused = model_pair("qwen3", torch.float32)
    again = copy.deepcopy(fused)
    train_layers.fuse(again)
    Recompute(again.base_model.layers, True, torch.device(DEVICE))
    kept, recomputed = (gradients(m, hidden_states(m)) for m in (fused, again))
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def test_a_wrapped_down_projection_is_called_and_not_read():
    """As an adapter's is; its own gradient must arrive too."""

    class Doubled(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.factor = inner, torch.nn.Parameter(torch.tensor(2.0, device=DEVICE))

        def forward(self, x):
            return self.factor * self.inner(x)

    plain, fused = model_pair("qwen3", torch.float32)
    for model in (plain, fused):
        mlp = model.base_model.layers[0].mlp
        mlp.down_proj = Doubled(mlp.down_proj)
    theirs, ours = (gradients(model, hidden_states(model)) for model in (plain, fused))
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize(
    "change", [{"model_type": "gpt_oss"}, {"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": "dynamic"}}]
)
def test_only_models_that_the_kernels_restate_are_fused_and_only_on_cuda(change):
    config = {"model_type": "qwen3", "hidden_act": "silu", "rope_parameters": {"rope_type": "default"}}
    cuda = torch.device("cuda")
    assert can_fuse(SimpleNamespace(**config), cuda)
    assert not can_fuse(SimpleNamespace(**config), torch.device("cpu"))
    assert not can_fuse(SimpleNamespace(**config | change), cuda)
