"""The attention function that Hugging Face modules call, in both phases.

A batch is always N packed tokens, `input_ids [1, N]`: sequences lie end to end, nothing is padded, and no sequence
sees another. The model's own modules run unchanged; they hand queries, keys and values to `packed_attention`, which
passes them to the `rows` object that the caller put into the forward's keyword arguments. `TrainingRows` (here)
attends within each row; `decode.cache.PagedRows` also writes and reads the paged cache; CUDA decode brings its own.
Because one object decides, rollout and update cannot drift apart silently. Sliding windows and attention sinks are the
module's to name (`Extras`) and every `rows` object's to honour; `modeling.probe` checks it before training.

A sink is a learned score per head that takes part in the softmax and brings no value: a sink s turns a softmax with
log-sum-exp L into one with L' = log(e^L + e^s), and its output O into O' = O e^(L-L'). So any attention kernel that
gives L serves, forward and backward: the stock backward, fed O' and L' instead of its own, computes the gradients of
q, k and v, and d loss / d s = -sum e^(s-L') (dO . O') over all queries of the head. Nothing of O(T^2) is kept.

Left out: soft caps (`modeling.families` lists the families that are tested, and refuses every other).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from modeling.routing import Recorded, Recorder

IMPLEMENTATION = "packed_rows"
# Passed as `attention_mask`: a mapping tells Hugging Face that masks are ready, so none is built.
NO_MASK: dict[str, None] = {"full_attention": None, "sliding_attention": None}

# CPU matrix products take another path, with other roundings, below 4 rows; vectorised loops treat a rest of less than
# 16 keys apart. Both phases keep clear of these, and a token's fp32 result is then the same bits alone or in a batch.
MIN_ROWS = 4
KEY_MULTIPLE = 16
# Vectorised loops on CPU round what is left over at a tensor's end otherwise; padded to this nothing is left over, and
# a query's result in fp32 is the same bits in both phases.
LOOP = 64

# Shapes: query [B, G, Q, D], key and value [B, G, K, D], mask [B, 1, Q, K] bool or None for causal, scaling, sinks
# fp32 [G, Q] or [G, 1] or None -> [B, G, Q, D].
Softmax = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Extras:
    """What a layer's attention has beside the plain causal softmax."""

    window: int | None = None  # a token sees itself and window - 1 before it; None: all before it
    sinks: Tensor | None = None  # a score per query head that takes part in the softmax and brings no value  # [H]


PLAIN = Extras()


class Rows(Protocol):
    """What `packed_attention` needs to know about a batch."""

    routes: Recorder | Recorded | None  # what becomes of its tokens' experts (`modeling.routing`)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, extras: Extras = PLAIN
    ) -> Tensor:
        """query [H, N, D], key and value [G, N, D] with H a multiple of G; returns [N, H, D]."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, G, N, D]
    value: Tensor,  # [1, G, N, D]
    attention_mask: Tensor | None,
    *,
    rows: Rows,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,  # Hugging Face's name for sinks  # [H]
    **_: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention interface; returns ([1, N, H, D], no weights)."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    link = getattr(module, "link", None)
    if link is not None:
        link.routes = rows.routes
    return rows.attend(layer, query[0], key[0], value[0], scaling, Extras(sliding_window, s_aux))[None], None


AttentionInterface.register(IMPLEMENTATION, packed_attention)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def sdpa_softmax(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor | None = None
) -> Tensor:
    """torch's fused attention; with sinks on other devices than CPU the textbook. See `Softmax` for shapes."""
    if sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)
    if query.device.type != "cpu":
        return eager_softmax(query, key, value, mask, scaling, sinks)
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    return PaddedSinkAttention.apply(query, key, value, mask, scaling, sinks)


def eager_softmax(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor | None = None
) -> Tensor:
    """The textbook order of roundings: scores in the model dtype, softmax in fp32, probabilities in the model dtype.

    On CPU a row's bf16 result is then the same whether its queries come one by one or all at once. See `Softmax`.
    """
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    else:
        # Keys keep their places, and a whole number of KEY_MULTIPLE: the sink stands behind them, masked ones after.
        column = F.pad(sinks[..., None], (0, KEY_MULTIPLE - 1), value=float("-inf")).expand(*scores.shape[:3], -1)
        weights = torch.softmax(torch.cat([scores.float(), column], dim=-1), dim=-1)
        weights = weights[..., : key.shape[2]].to(query.dtype)
    return torch.matmul(weights, value)


SOFTMAX: dict[str, Softmax] = {"auto": sdpa_softmax, "eager": eager_softmax}


def training_rows(lengths: Sequence[int], implementation: str, like: Tensor) -> Rows:
    """Rows of a training batch for hidden states such as `like`: flash attention in half precision on CUDA, else SDPA.

    implementation: model.attn_implementation
    """
    if implementation == "auto" and like.device.type == "cuda" and like.dtype in (torch.bfloat16, torch.float16):
        return FlashTrainingRows(lengths, like.device)
    return TrainingRows(lengths, SOFTMAX[implementation], like.device)


class FlashTrainingRows:
    """Causal attention within each packed sequence, without padding: torch's own variable-length kernel."""

    routes: Recorder | Recorded | None = None

    def __init__(self, lengths: Sequence[int], device: torch.device):
        self._longest = max(lengths)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        self._ends = ends.to(device, torch.int32, non_blocking=True)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, extras: Extras = PLAIN
    ) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
        return packed_flash(q, k, v, (self._ends, self._ends), (self._longest, self._longest), scaling, extras)


class TrainingRows:
    """Causal attention within each packed sequence: sequences are padded for the softmax alone."""

    routes: Recorder | Recorded | None = None

    def __init__(self, lengths: Sequence[int], softmax: Softmax, device: torch.device | str = "cpu"):
        """lengths: tokens of each row; they sum to N."""
        self._softmax = softmax
        self._batch, self._longest = len(lengths), round_up(max(lengths), KEY_MULTIPLE)
        steps = torch.arange(self._longest)
        counts = torch.tensor(list(lengths))
        starts = counts.cumsum(0) - counts
        real = steps[None] < counts[:, None]  # [B, T]
        self._pad = torch.where(real, starts[:, None] + steps, 0).flatten().to(device)  # [B * T] into the line
        self._unpad = real.flatten().nonzero().flatten().to(device)  # [N] into the padded rows
        self._windows: dict[int, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, extras: Extras = PLAIN
    ) -> Tensor:
        # Padding stands after a row's tokens, so the causal mask already hides it from every real query.
        heads = query.shape[0]
        q, k, v = (self._padded(x, heads) for x in (query, key, value))
        mask = None if extras.window is None else self._within(extras.window, query.device)
        sinks = None if extras.sinks is None else extras.sinks.float()[:, None]
        out = self._softmax(q, k, v, mask, scaling, sinks)  # [B, H, T, D]
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self._unpad)

    def _padded(self, x: Tensor, heads: int) -> Tensor:
        """[G, N, D] -> [B, H, T, D]; each key head is repeated for its group of query heads."""
        rows = x.transpose(0, 1).index_select(0, self._pad)
        rows = rows.unflatten(0, (self._batch, self._longest)).transpose(1, 2)
        return rows.repeat_interleave(heads // x.shape[0], dim=1)

    def _within(self, window: int, device: torch.device) -> Tensor:
        """Which keys a query sees  # [1, 1, T, T]; the same for every layer with this window."""
        if window not in self._windows:
            steps = torch.arange(self._longest, device=device)
            self._windows[window] = visible(steps, steps, window)[None, None]
        return self._windows[window]


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Whether the query at a position [..., Q] sees the key at a position [K]  # [..., Q, K] bool"""
    seen = keys <= queries[..., None]
    return seen if window is None else seen & (keys > queries[..., None] - window)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out [..., D] and its log-sum-exp lse [...] without sinks -> both with; sinks fp32, broadcast to lse."""
    count = lse.numel()
    rest = -count % LOOP if lse.device.type == "cpu" else 0
    flat, against = (F.pad(x.flatten(), (0, rest)) for x in (lse, sinks.expand_as(lse)))
    total = torch.logaddexp(flat, against)
    share = (flat - total).exp()[:count].view_as(lse)
    return (out * share[..., None]).to(out.dtype), total[:count].view_as(lse)


def by_sinks(grad_out: Tensor, out: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """d loss / d sink of every query  # [...] fp32; out and total are those with sinks."""
    return -(sinks - total).exp() * (grad_out.float() * out.float()).sum(-1)


class PaddedSinkAttention(torch.autograd.Function):
    """torch's CPU flash attention with sinks: (q, k, v [B, H, T, D], mask, scaling, sinks) -> [B, H, T, D].

    mask: additive, in the dtype of q, or None for causal; sinks: fp32, one a query  # [H, T] or [H, 1]
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor
    ) -> Tensor:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=scaling
        )
        out, total = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, mask, sinks, out, total)
        ctx.scaling = scaling
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, sinks, out, total = ctx.saved_tensors
        grad_out = gradients[0]
        by_q, by_k, by_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, total, 0.0, mask is None, attn_mask=mask, scale=ctx.scaling
        )
        return by_q, by_k, by_v, None, None, by_sinks(grad_out, out, total, sinks).sum(0).sum_to_size(sinks.shape)


class PackedSinkAttention(torch.autograd.Function):
    """torch's variable-length flash attention with sinks, causal, for rows that lie end to end on CUDA.

    (q [N, H, D], k and v [M, G, D], ends of the rows among queries and keys [rows + 1] int32 each, the longest row of
    each, scaling, window or None, sinks [H] fp32) -> [N, H, D]
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, longest: tuple[int, int],
        scaling: float, window: int | None, sinks: Tensor,
    ) -> Tensor:  # fmt: skip
        # A longest query row of 1 would make the kernel fold heads into rows, and the log-sum-exps with them.
        longest = (max(longest[0], 2), longest[1])
        options = {"scale": scaling, **window_sizes(window)}
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, q_ends, k_ends, *longest, 0.0, True, False, **options
        )
        out, total = with_sinks(out, lse.T, sinks)
        total = total.T.contiguous()  # [H, N], as the backward kernel wants it
        ctx.save_for_backward(q, k, v, q_ends, k_ends, sinks, out, total, state, unused)
        ctx.longest, ctx.options = longest, options
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, q_ends, k_ends, sinks, out, total, state, unused = ctx.saved_tensors
        grad_out = gradients[0].contiguous()
        by_q, by_k, by_v = torch.ops.aten._flash_attention_backward(
            grad_out, q, k, v, out, total, q_ends, k_ends, *ctx.longest, 0.0, True, state, unused, **ctx.options
        )
        return by_q, by_k, by_v, None, None, None, None, None, by_sinks(grad_out, out, total.T, sinks).sum(0)


def packed_flash(
    q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int, int], scaling: float,
    extras: Extras,
) -> Tensor:  # fmt: skip
    """Causal attention of rows that lie end to end on CUDA; see `PackedSinkAttention` for the shapes."""
    if extras.sinks is not None:
        return PackedSinkAttention.apply(q, k, v, *ends, longest, scaling, extras.window, extras.sinks.float())
    options = {"scale": scaling, **window_sizes(extras.window)}
    return torch.ops.aten._flash_attention_forward(q, k, v, *ends, *longest, 0.0, True, False, **options)[0]


def window_sizes(window: int | None) -> dict[str, int]:
    """The flash operator's words for: a token sees itself and window - 1 before it; nothing where all are seen."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
