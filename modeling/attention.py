"""The attention function that Hugging Face modules call, in both phases.

A batch is always one packed line of N tokens, `input_ids [1, N]`: rows lie end to end, nothing is padded, and no row
sees another. The model's own modules run unchanged; they hand queries, keys and values to `packed_attention`, which
passes them to the `rows` object that the caller put into the forward's keyword arguments. `TrainingRows` (here)
attends within each row; `decode.cache.PagedRows` also writes and reads the paged cache; CUDA decode brings its own.
Because one object decides, rollout and update cannot drift apart silently. Sliding windows and attention sinks are the
module's to name (`Extras`) and every `rows` object's to honour; `modeling.probe` checks it before training.

Left out: soft caps (refused by `check_supported`, which lists the families that are tested).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig

from modeling.routing import Recorded, Recorder
from modeling.sinks import PackedSinkAttention, PaddedSinkAttention, window_sizes

IMPLEMENTATION = "packed_rows"
# Passed as `attention_mask`: a mapping tells Hugging Face that masks are ready, so none is built.
NO_MASK: dict[str, None] = {"full_attention": None, "sliding_attention": None}

# CPU matrix products take another path, with other roundings, below 4 rows; vectorised loops treat a rest of less than
# 16 keys apart. Both phases keep clear of these, and a token's fp32 result is then the same bits alone or in a batch.
MIN_ROWS = 4
KEY_MULTIPLE = 16

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


def check_supported(config: PretrainedConfig) -> None:
    """Raises ValueError for a model whose attention this module would compute wrongly."""
    kinds = {"full_attention"} | ({"sliding_attention"} if config.model_type in WITH_WINDOWS else set())
    others = [kind for kind in getattr(config, "layer_types", None) or () if kind not in kinds]
    if others:
        raise ValueError(f"model type {config.model_type}: layers of type {others[0]!r} are not supported yet")
    if config.model_type not in SUPPORTED_FAMILIES:
        raise ValueError(
            f"model type {config.model_type!r} is not tested; supported: {', '.join(sorted(SUPPORTED_FAMILIES))}"
        )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


SUPPORTED_FAMILIES = {"qwen3", "qwen2", "llama", "gpt_oss"}
WITH_WINDOWS = {"gpt_oss"}


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
    """Causal attention within each row of a packed line, without padding: torch's own variable-length kernel."""

    routes: Recorder | Recorded | None = None

    def __init__(self, lengths: Sequence[int], device: torch.device):
        self._longest = max(lengths)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        self._ends = ends.to(device, torch.int32, non_blocking=True)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, extras: Extras = PLAIN
    ) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
        longest = self._longest
        if extras.sinks is not None:
            return PackedSinkAttention.apply(
                q, k, v, self._ends, self._ends, (longest, longest), scaling, extras.window, extras.sinks.float()
            )
        return torch.ops.aten._flash_attention_forward(
            q, k, v, self._ends, self._ends, longest, longest, 0.0, True, False, scale=scaling,
            **window_sizes(extras.window),
        )[0]  # fmt: skip


class TrainingRows:
    """Causal attention within each row of a packed line: rows are padded for the softmax alone."""

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
