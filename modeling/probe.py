"""Does the attention that is about to train compute what the model's own eager attention computes? Asked at start.

One layer of each kind (full, sliding) gets two short rows. Output, the gradient of the input and that of the sinks
must equal those of Hugging Face's eager code in fp32 within what the dtype explains; sinks must have a gradient at
all. Both run on copies of the layer, the sinks of the copies set to 1, so that the answer depends neither on the
weights' state nor on what is frozen, and nothing of the model is touched. A dense layer is taken whole, of a mixture
of experts the attention alone: a token that two experts tie for would be no fault of the attention's.

Left out: windows wider than WIDEST, in which the two rows see everything; the rollout's attention, which the check
before a run compares token by token (`startup/check.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from config import ConfigError
from modeling.attention import visible
from modeling.packed_model import batch_rows

WIDEST = 512  # tokens
SHORT_ROW = 20  # tokens
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # norm-relative; bf16 itself makes about 1e-2


def check_attention(model: Any, implementation: str) -> None:
    """Raises ConfigError for model.attn_implementation where training would differ from eager attention.

    model: a Hugging Face causal LM with our attention
    """
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
    for kind in sorted(set(kinds)):
        layer = model.base_model.layers[kinds.index(kind)]
        problem = _problem(layer, model.config, model.base_model.rotary_emb, implementation)
        if problem:
            other = "set eager" if implementation != "eager" else "this model cannot be trained here"
            raise ConfigError(
                "model.attn_implementation", implementation,
                f"trains another model than the one that samples: in {model.config.model_type}'s {kind} layers "
                f"{problem}; {other}",
            )  # fmt: skip


def _problem(layer: Any, shape: Any, rotary: Any, implementation: str) -> str | None:
    """What differs in this layer, in words."""
    attention = layer.self_attn
    window = getattr(attention, "sliding_window", None)
    lengths = (min(window or WIDEST // 8, WIDEST) + 8, SHORT_ROW)
    part = attention if hasattr(layer.mlp, "experts") else layer
    dtype, device = attention.o_proj.weight.dtype, attention.o_proj.weight.device
    width = attention.q_proj.in_features
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, sum(lengths), width, generator=generator).to(device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]

    def ours(block: Any, x: Tensor) -> Tensor:
        rows = batch_rows(shape, implementation, lengths, x)
        turned = rotary(x[None], positions)
        return _output(block(x[None], position_embeddings=turned, attention_mask=None, rows=rows))

    def eager(block: Any, x: Tensor) -> Tensor:
        parts = x.split(lengths)
        return torch.cat([_output(_eager(block, rotary, row, window)) for row in parts])

    got = _values_and_gradients(copy.deepcopy(part), ours, x.to(dtype), weight.to(dtype))
    exact = _values_and_gradients(_as_published(part), eager, x.to(dtype).float(), weight.to(dtype).float())
    for name, value in exact.items():
        mine = got[name]
        if not bool(mine.any()):
            return f"{name} is zero: it is dropped"
        error = ((mine.float() - value).norm() / value.norm()).item()
        if not error <= TOLERANCE[dtype]:  # NaN fails too
            return f"{name} differs from eager attention's by {error:.1g} of its norm, {TOLERANCE[dtype]} is allowed"
    return None


def _as_published(part: Any) -> Any:
    """An fp32 copy that runs Hugging Face's own forwards with its eager attention."""
    block = copy.deepcopy(part).float()
    for module in block.modules():
        module.__dict__.pop("forward", None)
    attention = getattr(block, "self_attn", block)
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "eager"
    return block


def _eager(block: Any, rotary: Any, row: Tensor, window: int | None) -> Any:
    """row [T, hidden]"""
    steps = torch.arange(len(row), device=row.device)
    mask = torch.zeros(len(row), len(row), device=row.device)
    mask = mask.masked_fill(~visible(steps, steps, window), torch.finfo(row.dtype).min)[None, None]
    return block(row[None], position_embeddings=rotary(row[None], steps[None]), attention_mask=mask)


def _output(result: Any) -> Tensor:
    """[N, hidden] of what a layer or an attention module returns."""
    return (result[0] if isinstance(result, tuple) else result)[0]


def _values_and_gradients(
    block: Any, forward: Callable[[Any, Tensor], Tensor], x: Tensor, weight: Tensor
) -> dict[str, Tensor]:
    """Output, and the gradients of (output * weight).sum(), by name; 0 where there is none."""
    x.requires_grad_()
    sinks = getattr(getattr(block, "self_attn", block), "sinks", None)
    block.requires_grad_(False)
    leaves = {"the gradient of its input": x}
    if sinks is not None:
        with torch.no_grad():
            sinks.fill_(1.0)
        leaves["the gradient of its sinks"] = sinks.requires_grad_()
    with torch.enable_grad():
        out = forward(block, x)
        gradients = torch.autograd.grad((out * weight).sum(), list(leaves.values()), allow_unused=True)
    values = [torch.zeros(1, device=x.device) if g is None else g for g in gradients]
    return {"the output": out.detach(), **dict(zip(leaves, values, strict=True))}
