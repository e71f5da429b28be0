"""Fuses the elementwise chains of Hugging Face's modules on CUDA: norms, gated activation, rotary embedding.

Whole layers are not compiled: the attention takes a Python object that differs in every batch. Instead each class's
own `forward` is compiled once, for any number of tokens, and bound to its instances; weights, hooks and checkpointing
stay as they are. Intermediate casts to the model dtype are kept, so results round where the modules' own do.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}


def compile_modules(model: PreTrainedModel) -> None:
    """Replaces, on this model's instances alone, the forward of every norm and MLP by a compiled one."""
    compiled: dict[type, Any] = {}
    for module in model.modules():
        kind = type(module)
        if not kind.__name__.endswith(("RMSNorm", "MLP")):
            continue
        if kind not in compiled:
            compiled[kind] = torch.compile(kind.forward, dynamic=True, options=OPTIONS)
        module.forward = MethodType(compiled[kind], module)
    family = sys.modules[type(model).__module__]
    rotary = family.apply_rotary_pos_emb
    if not hasattr(rotary, "_torchdynamo_orig_callable"):  # the family's module is shared by every model of a process
        family.apply_rotary_pos_emb = torch.compile(rotary, dynamic=True, options=OPTIONS)
