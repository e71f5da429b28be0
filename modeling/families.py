"""Which model families are supported, and by which kernels."""

from __future__ import annotations

from typing import Any

import torch

FAMILIES = ("qwen3", "qwen2", "llama")  # dense
MIXTURES = ("gpt_oss",)
# Rotary tables that depend on the position alone; "dynamic" and "longrope" change with the length of the batch.
STATIC_ROPES = ("default", "linear", "llama3", "yarn")


def can_fuse(config: Any, device: torch.device) -> bool:
    """Whether `modeling.train_layers` computes what this model's modules compute; config: the Hugging Face one."""
    return (
        device.type == "cuda"
        and config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in STATIC_ROPES
    )
