"""Which experts each token took: recorded while sampling, compared while training, and replayed if asked.

`watch` puts one hook on every router. The attention of the same layer, which runs just before it, tells it which batch
is under way (`modeling.attention.Rows.routes`), in the forward pass and again where a layer is recomputed for its
backward pass; so a recorded choice is replayed wherever the layer runs, and no batch sees another's.
`Recorder` writes choices beside the keys of the paged cache; `Recorded` counts the tokens whose choice differs now (a
flip: another kernel's last bit may tip a close race), and with `replay` puts the recorded experts in their place,
weighted by the live logits, which alone carry the gradient. With `rows` it also measures how evenly each row's tokens
are spread over the experts, differentiably, for `loss.router_balance`.

Left out: families whose router weighs its experts other than by a softmax over the chosen logits (GPT-OSS's).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

UNKNOWN = 255  # in place of an expert id: the token was not computed while sampling


class RouterLink:
    """From a layer's attention, which sets `routes`, to its router."""

    def __init__(self) -> None:
        self.routes: Recorder | Recorded | None = None


def watch(model: Any) -> None:
    """Lets the batches of a causal LM see, and change, what its routers choose; nothing happens in a dense one."""
    for index, layer in enumerate(model.base_model.layers):
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            layer.self_attn.link = link = RouterLink()
            router.register_forward_hook(_hook(link, index))


def _hook(link: RouterLink, layer: int) -> Any:
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
    rows: the row of each token  # [N], for `balance`; None: it is not measured
    """

    def __init__(self, ids: Tensor, layers: int, replay: bool, rows: Tensor | None = None):
        self._ids = ids.view(len(ids), layers, -1)
        self._replay, self._rows = replay, rows
        self._flips = torch.zeros(layers, len(ids), device=ids.device)
        self._balances: dict[int, Tensor] = {}  # by layer

    @property
    def flips(self) -> Tensor:
        """Share of the layers in which a token's live experts are not the recorded ones  # [N] fp32"""
        return self._flips.mean(dim=0)

    @property
    def balance(self) -> Tensor | None:
        """`token_balance`, mean over the layers  # [N] fp32; None where it is not measured"""
        return torch.stack(list(self._balances.values())).mean(dim=0) if self._balances else None

    def choose(self, layer: int, logits: Tensor, shares: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        recorded = self._ids[:, layer]
        known = recorded != UNKNOWN
        recorded = torch.where(known, recorded.to(ids.dtype), ids)
        # Set anew, so that a layer which is computed twice counts once.
        self._flips[layer] = (recorded.sort(dim=1).values != ids.sort(dim=1).values).any(dim=1).float()
        taken = recorded if self._replay else ids
        if self._rows is not None:
            self._balances[layer] = token_balance(logits, taken, self._rows)
        if not self._replay:
            return shares, ids
        chosen = torch.softmax(logits.gather(1, recorded), dim=1, dtype=shares.dtype)
        return chosen, recorded


def token_balance(logits: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """Each token's part of its row's balance loss; a row's mean is 1 where its experts share alike  # [N] fp32

    DeepSeek-V3 (2024), eq. 17 to 20, without its coefficient: of row i with T tokens, E/k sum_e (C_e / T) mean_t p_te,
    where C_e counts the tokens that took expert e (no gradient) and p is the softmax over all experts. Of rows and not
    of batches, so that it does not depend on how rows are split over micro-batches and ranks.
    logits [N, E]; ids: the experts taken  # [N, k]; rows: the row of each token  # [N]
    """
    experts = logits.shape[1]
    taken = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, ids, 1.0)
    counts = torch.zeros(int(rows.max()) + 1, experts, device=logits.device).index_add_(0, rows, taken)
    share = counts / counts.sum(dim=1, keepdim=True)  # k T is the sum
    return experts * (share[rows] * torch.softmax(logits.float(), dim=1)).sum(dim=1)
