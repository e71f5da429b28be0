"""The supported model families, one row each: what every part of the trainer needs to know about a family.

A new dense family whose layers are those of Qwen3, Qwen2 or Llama is one row here. Readers: `check_supported` and
`can_fuse` below, `decode.weights` (the captured decoder) and `rollout.chat.formats` (chats are named, not imported).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Rotary tables that depend on the position alone; "dynamic" and "longrope" change with the length of the batch.
STATIC_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Family:
    """What a family needs beyond its own Hugging Face modules."""

    chat: str  # the format of its turns: a name in `rollout.chat.formats.CHATS`
    layers: frozenset[str] = frozenset({"full_attention"})  # kinds of attention layers; all are tested
    fused: bool = True  # `modeling.train_layers` restates its layers
    captured: bool = True  # `decode.stack` restates its layers
    late_norms: bool = False  # RMSNorm rounds once, after its weight, instead of before it as well


FAMILIES = {
    "qwen3": Family(chat="template"),
    "qwen2": Family(chat="template"),
    "llama": Family(chat="template"),
    "gpt_oss": Family(
        chat="harmony", layers=frozenset({"full_attention", "sliding_attention"}), fused=False, late_norms=True
    ),
}


def check_supported(config: Any) -> None:
    """Raises ValueError for a model whose attention would be computed wrongly; config: the Hugging Face one."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(f"model type {config.model_type!r} is not tested; supported: {', '.join(sorted(FAMILIES))}")
    others = [kind for kind in getattr(config, "layer_types", None) or () if kind not in family.layers]
    if others:
        raise ValueError(f"model type {config.model_type}: layers of type {others[0]!r} are not supported yet")


def can_fuse(config: Any, device: torch.device) -> bool:
    """Whether `modeling.train_layers` computes what this model's modules compute; config: the Hugging Face one."""
    family = FAMILIES.get(config.model_type)
    return (
        device.type == "cuda"
        and family is not None
        and family.fused
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in STATIC_ROPES
    )
