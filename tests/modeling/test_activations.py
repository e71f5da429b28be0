"""Layers are recomputed or kept as memory asks, and gradients do not depend on it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import modeling.activations as recompute_module
from modeling.activations import Recompute

EACH = 1000  # bytes that a layer of `Counted` leaves in the pretended memory
PASSED_ON = 4 * 8 * 4  # of its output


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8) * 1.1)
        self.calls = 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        return torch.tanh(x @ self.weight) * scale


class PretendedGpu:
    """Memory in which every forward of a layer takes EACH bytes."""

    def __init__(self, layers, free: int):
        self.layers, self.free = layers, free

    def allocated(self, _):
        return EACH * sum(layer.calls for layer in self.layers)


def stack(count: int, choice, device="cpu"):
    torch.manual_seed(0)
    layers = [Counted() for _ in range(count)]
    return layers, Recompute(layers, choice, torch.device(device))


def gradients(layers):
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    for layer in layers:
        x = layer(x, scale=0.9)
    x.square().sum().backward()
    return [layer.weight.grad for layer in layers]


@pytest.mark.parametrize(("choice", "calls"), [(True, 2), (False, 1), ("auto", 2)])
def test_on_a_cpu_all_layers_or_none_run_again(choice, calls):
    layers, _ = stack(3, choice)
    plain, _ = stack(3, False)
    assert all(torch.equal(a, b) for a, b in zip(gradients(layers), gradients(plain), strict=True))
    assert [layer.calls for layer in layers] == [calls] * 3


def test_nothing_runs_again_without_a_gradient_or_in_evaluation():
    layers, _ = stack(2, True)
    with torch.no_grad():
        layers[0](torch.ones(4, 8))
    layers[1].eval()
    layers[1](torch.ones(4, 8)).sum().backward()
    assert [layer.calls for layer in layers] == [1, 1]


@pytest.mark.parametrize("fit", [0, 1, 3, 5, 100])
def test_on_a_gpu_the_first_layer_is_measured_and_the_last_that_fit_are_kept(monkeypatch, fit):
    layers, recompute = stack(6, "auto", "cuda")
    needed = 6 * PASSED_ON + recompute_module.LAYERS_AT_ONCE * EACH  # for the rest to run at all
    gpu = PretendedGpu(layers, needed + 500 + 7 + fit * (EACH - PASSED_ON))
    monkeypatch.setattr(torch.cuda, "memory_allocated", gpu.allocated)
    monkeypatch.setattr(recompute_module, "free_bytes", lambda _: gpu.free)
    recompute.to_come = 500
    assert not recompute.begin(10**9)
    gradients(layers)
    kept = min(fit, 5)
    assert [layer.calls for layer in layers] == [1] + [2] * (5 - kept) + [1] * kept
    assert recompute.kept == kept


def test_logits_are_kept_where_they_are_a_small_part_of_the_room(monkeypatch):
    _, recompute = stack(2, "auto", "cuda")
    monkeypatch.setattr(recompute_module, "free_bytes", lambda _: 1000)
    recompute.to_come = 500
    assert recompute.begin(70) and not recompute.begin(80)
    assert not stack(2, True)[1].begin(1) and stack(2, False)[1].begin(1)
