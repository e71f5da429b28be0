"""The attention function that Hugging Face modules call, in both phases.

A batch is always one packed line of N tokens, `input_ids [1, N]`: rows lie end to end, nothing is padded, and no row
sees another. The model's own modules run unchanged; they hand queries, keys and values to `packed_attention`, which
passes them to the `rows` object that the caller put into the forward's keyword arguments. `TrainingRows` (here)
attends within each row; `rollout.cache.PagedRows` also writes and reads the paged cache; CUDA decode brings its own.
Because one object decides, rollout and update cannot drift apart silently.

Left out: sliding windows and attention sinks (refused by `check_supported`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig

IMPLEMENTATION = "packed_rows"
# Passed as `attention_mask`: a mapping tells Hugging Face that masks are ready, so none is built.
NO_MASK: dict[str, None] = {"full_attention": None, "sliding_attention": None}

# CPU matrix products take another path, with other roundings, below 4 rows; vectorised loops treat a rest of less than
# 16 keys apart. Both phases keep clear of these, and a token's fp32 result is then the same bits alone or in a batch.
MIN_ROWS = 4
KEY_MULTIPLE = 16

# Shapes: query [B, G, Q, D], key and value [B, G, K, D], mask [B, 1, Q, K] or None for causal, scaling -> [B, G, Q,
# D].
Softmax = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


class Rows(Protocol):
    """What `packed_attention` needs to know about a batch."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
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
    **_: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention interface; returns ([1, N, H, D], no weights)."""
    return rows.attend(module.layer_idx, query[0], key[0], value[0], scaling)[None], None  # type: ignore[arg-type]


AttentionInterface.register(IMPLEMENTATION, packed_attention)


def check_supported(config: PretrainedConfig) -> None:
    """Raises ValueError for a model whose attention this module would compute wrongly."""
    windows = [kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"]
    if windows:
        raise ValueError(f"model type {config.model_type}: layers of type {windows[0]!r} are not supported yet")
    if config.model_type not in SUPPORTED_FAMILIES:
        raise ValueError(
            f"model type {config.model_type!r} is not tested; supported: {', '.join(sorted(SUPPORTED_FAMILIES))}"
        )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


SUPPORTED_FAMILIES = {"qwen3", "qwen2", "llama"}


def sdpa_softmax(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """torch's fused attention. See `Softmax` for shapes."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)


def eager_softmax(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """The textbook order of roundings: scores in the model dtype, softmax in fp32, probabilities in the model dtype.

    On CPU a row's bf16 result is then the same whether its queries come one by one or all at once. See `Softmax`.
    """
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
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

    def __init__(self, lengths: Sequence[int], device: torch.device):
        self._longest = max(lengths)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        self._ends = ends.to(device, torch.int32, non_blocking=True)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
        return torch.ops.aten._flash_attention_forward(
            q, k, v, self._ends, self._ends, self._longest, self._longest, 0.0, True, False, scale=scaling
        )[0]


class TrainingRows:
    """Causal attention within each row of a packed line: rows are padded for the softmax alone."""

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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        # Padding stands after a row's tokens, so the causal mask already hides it from every real query.
        heads = query.shape[0]
        q, k, v = (self._padded(x, heads) for x in (query, key, value))
        out = self._softmax(q, k, v, None, scaling)  # [B, H, T, D]
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self._unpad)

    def _padded(self, x: Tensor, heads: int) -> Tensor:
        """[G, N, D] -> [B, H, T, D]; each key head is repeated for its group of query heads."""
        rows = x.transpose(0, 1).index_select(0, self._pad)
        rows = rows.unflatten(0, (self._batch, self._longest)).transpose(1, 2)
        return rows.repeat_interleave(heads // x.shape[0], dim=1)
