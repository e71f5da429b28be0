"""Which experts each token took: recorded while sampling, compared while training, and replayed if asked.

`watch` puts one hook on every router. The attention of the same layer, which runs just before it, tells it which batch
is under way (`modeling.attention.Rows.routes`), in the forward pass and again where a layer is recomputed for its
backward pass; so a recorded choice is replayed wherever the layer runs, and no batch sees another's.
`Recorder` writes choices beside the keys of the paged cache; `Recorded` counts the tokens whose choice differs now (a
flip: another kernel's last bit may tip a close race), and with `replay` puts the recorded experts in their place,
weighted by the live logits, which alone carry the gradient.

Left out: families whose router weighs its experts other than by a softmax over the chosen logits (GPT-OSS's).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

UNKNOWN = 255  # in place of an expert id: the token was not computed while sampling


class Link:
    """From a layer's attention, which sets `routes`, to its router."""

    def __init__(self) -> None:
        self.routes: Recorder | Recorded | None = None


def watch(model: Any) -> None:
    """Lets the batches of a causal LM see, and change, what its routers choose; nothing happens in a dense one."""
    for index, layer in enumerate(model.base_model.layers):
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            layer.self_attn.link = link = Link()
            router.register_forward_hook(_hook(link, index))


def _hook(link: Link, layer: int) -> Any:
    def choose(_: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """output: logits [N, E], shares and ids of the chosen experts [N, k] each"""
        routes, link.routes = link.routes, None  # a forward with another attention must not meet it
        if routes is None:
            return output
        logits, shares, ids = output
        return logits, *routes.choose(layer, logits, shares, ids)

    return choose


class Recorder:
    """Writes the choices of new tokens to their places in a paged cache.

    store: [L, pages, page_size, k] uint8; pages, offsets: of each new token  # [N]
    """

    def __init__(self, store: Tensor, pages: Tensor, offsets: Tensor):
        self._store, self._pages, self._offsets = store, pages, offsets

    def choose(self, layer: int, logits: Tensor, shares: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        self._store[layer, self._pages, self._offsets] = ids.to(torch.uint8)
        return shares, ids


class Recorded:
    """The recorded choices of a training batch.

    ids: [N, L * k] uint8, UNKNOWN where there is none; replay: take them instead of the live ones
    """

    def __init__(self, ids: Tensor, layers: int, replay: bool):
        self._ids = ids.view(len(ids), layers, -1)
        self._replay = replay
        self._flips = torch.zeros(layers, len(ids), device=ids.device)

    @property
    def flips(self) -> Tensor:
        """Share of the layers in which a token's live experts are not the recorded ones  # [N] fp32"""
        return self._flips.mean(dim=0)

    def choose(self, layer: int, logits: Tensor, shares: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        recorded = self._ids[:, layer]
        known = recorded != UNKNOWN
        recorded = torch.where(known, recorded.to(ids.dtype), ids)
        # Set anew, so that a layer which is computed twice counts once.
        self._flips[layer] = (recorded.sort(dim=1).values != ids.sort(dim=1).values).any(dim=1).float()
        if not self._replay:
            return shares, ids
        chosen = torch.softmax(logits.gather(1, recorded), dim=1, dtype=shares.dtype)
        return chosen, recorded
