"""Layers over fused kernels equal the model's own modules, value and gradient; on CPU in Triton's interpreter."""

from __future__ import annotations

import copy

import pytest
import torch

import tests.interpreted as interpreted
from modeling.attention import NO_MASK, TrainingRows, eager_softmax
from modeling.fused import can_fuse
from modeling.recompute import Recompute
from tests.conftest import make_model

train_layers = pytest.importorskip("modeling.train_layers", reason="needs Triton")
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


def test_in_fp32_values_and_gradients_are_those_of_the_modules(family):
    plain, fused = model_pair(family, torch.float32)
    expected, got = hidden_states(plain), hidden_states(fused)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    theirs, ours = gradients(plain, expected), gradients(fused, got)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_in_half_precision_the_forward_rounds_where_the_modules_round(family):
    # fp16, since Triton's interpreter cuts bf16 off where the device rounds.
    plain, fused = model_pair(family, torch.float16)
    with torch.no_grad():
        expected, got = hidden_states(plain).float(), hidden_states(fused).float()
    # Sums of squares in another order may turn a rounding; anything more would be another rounding point.
    assert (got != expected).float().mean() < 0.2
    assert (got - expected).abs().max() <= 2**-9 * expected.abs().max()


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


def test_only_models_that_the_kernels_restate_are_fused():
    cuda = torch.device("cuda")
    config = make_model("qwen3").config
    assert can_fuse(config, cuda)
    assert not can_fuse(config, torch.device("cpu"))
    for change in ({"model_type": "gpt_oss"}, {"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": "dynamic"}}):
        other = copy.deepcopy(config)
        for name, value in change.items():
            setattr(other, name, value) if name != "model_type" else setattr(type(other), name, value)
        try:
            assert not can_fuse(other, cuda), change
        finally:
            type(config).model_type = "qwen3"
