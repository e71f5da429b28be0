"""Checkpoints with packed weights: GPT-OSS's mxfp4 is unpacked to the training dtype on loading, others are refused.

A packed weight has no gradient. Unpacked, the model is saved as any other, without the quantization entry that would
make a reader expect packed weights.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.utils.quantization_config import Mxfp4Config


def check_quantization(shape: PretrainedConfig) -> None:
    """Raises ValueError for a checkpoint whose weights cannot be unpacked for training."""
    method = _method(shape)
    if method not in (None, "mxfp4"):
        raise ValueError(
            f"its weights are packed by {method}, which cannot be trained; name the unquantized checkpoint"
        )


def loading_options(shape: PretrainedConfig, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` must be told beside the dtype.

    Packed weights are unpacked tensor by tensor where they will stay. In host memory every rank of a host would hold
    the whole model unpacked (42 GB at 20B); weights that need no unpacking are mapped from the file and never copied.
    """
    if _method(shape) != "mxfp4":
        return {}
    return {"quantization_config": Mxfp4Config(dequantize=True), "device_map": {"": device}}


def forget_quantization(shape: PretrainedConfig) -> None:
    """For weights that were never packed: random ones of a packed checkpoint's shape."""
    if _method(shape) is not None:
        del shape.quantization_config


def _method(shape: PretrainedConfig) -> str | None:
    packed = getattr(shape, "quantization_config", None)
    if packed is None:
        return None
    return packed["quant_method"] if isinstance(packed, dict) else str(packed.quant_method.value)
