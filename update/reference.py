"""The frozen policy from before training, against which `loss.kl_coef` measures.

It holds its own copy of the weights. With `loss.kl_reference` "cpu" they wait in host memory and move to the device
for one forward a step: slower by two copies, but no device memory during rollout and update. The forward is the
policy's own (same attention, same head walk), so an untrained policy has a KL of exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Reference:
    def __init__(self, module: nn.Module, device: torch.device, stays: bool):
        """module: a packed batch in, `TokenLogprobs` out; stays: keeps its weights on the device between calls"""
        self._module = module.requires_grad_(False).eval()
        self._device, self._home = device, device if stays else torch.device("cpu")
        self._module.to(self._home)

    @torch.no_grad()
    def logprobs(self, batches: Iterable[Any]) -> list[Tensor]:
        """[M] for each batch of the device, in order."""
        self._module.to(self._device)
        values = [self._module(batch).logprobs for batch in batches]
        self._module.to(self._home)
        return values
