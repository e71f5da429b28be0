"""Which decoder layers keep their activations for the backward pass, and which compute them again.

A layer that is recomputed costs its forward once more, a third of its time; a layer that is kept costs memory. With
`model.gradient_checkpointing` "auto" every micro-batch keeps as many layers as fit: the first layer is run and what it
left in memory is the measure for all others, so no forecast of shapes is needed and any family serves. The last layers
are the ones kept, since the backward pass frees them first.

Invariant: values and gradients do not depend on the choice (in one dtype, on one device, up to the order of the
device's own atomic sums). Recomputation is non-reentrant: a tied head's gradient must arrive once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SLACK = 0.04  # of the device's memory: fragments, workspaces of the libraries
LOGITS_SHARE = 0.15  # of the room that is left
LAYERS_AT_ONCE = 2  # one layer's gradients and temporaries, counted in activations of a layer


class Recompute:
    """Stands around the forwards of a model's layers."""

    def __init__(self, layers: Any, choice: bool | str, device: torch.device):
        """choice: True recomputes every layer, False none, "auto" as many as memory asks for (on CPU every one)."""
        self._count, self._device = len(layers), device
        self._auto = choice == "auto" and device.type == "cuda"
        self._first_kept = 0 if choice is False else self._count
        self._keeps_logits = choice is False
        self.to_come = 0  # bytes that the backward pass allocates beside activations; set before each forward
        self._reserve = 0
        for index, layer in enumerate(layers):
            layer.forward = partial(self._run, layer, index, layer.forward)

    def begin(self, logits: int) -> bool:
        """Before a forward: whether its logits (in bytes) are kept for the backward pass as well.

        A byte of logits saves about as much time as a byte of a layer, so they are kept where they are few.
        """
        if not self._auto:
            return self._keeps_logits
        room = free_bytes(self._device) - self.to_come
        keep = logits <= LOGITS_SHARE * room
        self._reserve = self.to_come + (logits if keep else 0)
        return keep

    @property
    def kept(self) -> int:
        """Layers of the last forward that kept their activations, the first aside where it was the measure."""
        return self._count - self._first_kept

    def _run(self, layer: Any, index: int, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if not (layer.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if self._auto and index == 0:
            return self._measure(forward, *args, **kwargs)
        if index >= self._first_kept:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def _measure(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        before = torch.cuda.memory_allocated(self._device)
        out = forward(*args, **kwargs)
        each = max(1, torch.cuda.memory_allocated(self._device) - before)  # its output is among them
        passed_on = out.numel() * out.element_size()
        room = free_bytes(self._device) - self._reserve - LAYERS_AT_ONCE * each - self._count * passed_on
        fit = max(0, room) // max(1, each - passed_on)
        self._first_kept = max(1, self._count - fit)
        return out


def free_bytes(device: torch.device) -> int:
    """What this process can still allocate, the slack aside: free on the device or unused in torch's own pools."""
    free, total = torch.cuda.mem_get_info(device)
    pooled = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + pooled - int(SLACK * total)
