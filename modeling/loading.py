"""The Hugging Face model with our attention and experts: from a checkpoint, or random weights of its true shape.

A packed weight has no gradient: GPT-OSS's mxfp4 is unpacked to the training dtype on loading, other packed checkpoints
are refused. Unpacked, the model is saved as any other, without the quantization entry that would make a reader expect
packed weights.
"""

from __future__ import annotations

from json import JSONDecodeError
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import Mxfp4Config

from config import ConfigError, ModelConfig
from modeling import attention, experts, lora
from modeling.families import can_fuse
from modeling.routing import watch

transformers_logging.disable_progress_bar()
SHIPPED = Path(__file__).parent.parent / "models" / "shapes"


def build_model(
    config: ModelConfig, seed: int, device: torch.device, adapters: Path | None = None, *, name: str = "model.path"
) -> PreTrainedModel:
    """The model on its device; random weights are seeded by `seed` and disturb no random state.

    adapters: folder of LoRA adapters to sample through. name: of the setting that `config.path` is.
    Raises ConfigError where the weights cannot be read, or the adapters are not this model's.
    """
    dtype = getattr(torch, config.dtype)
    ours = {"attn_implementation": attention.IMPLEMENTATION, "experts_implementation": experts.IMPLEMENTATION}
    shape = AutoConfig.from_pretrained(shape_source(config))
    if config.random_weights:
        forget_quantization(shape)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(shape, dtype=dtype, **ours)
    else:
        ours |= loading_options(shape, device)
        try:
            model = AutoModelForCausalLM.from_pretrained(config.path, dtype=dtype, **ours)
        except (SafetensorError, JSONDecodeError, OSError) as error:
            raise ConfigError(
                name, config.path,
                f"its weights cannot be read ({str(error).splitlines()[0]}); fetch or copy them anew",
            ) from error  # fmt: skip
        model = model.to(device)  # type: ignore[arg-type]  # transformers wraps `to` without its signature
    if can_fuse(model.config, device):
        from modeling.train_layers import fuse  # needs Triton, which comes with torch's CUDA builds

        fuse(model)
    watch(model)
    if adapters:
        lora.load_adapters(model, adapters)
    return model


def shape_source(model: ModelConfig) -> str:
    """A folder or hub name with config.json. `model.random_weights` needs no download for a shape shipped here."""
    shipped = SHIPPED / Path(model.path).name
    return str(shipped) if model.random_weights and shipped.is_dir() else model.path


def check_quantization(shape: PretrainedConfig) -> None:
    """Raises ValueError for a checkpoint whose weights cannot be unpacked for training."""
    method = _method(shape)
    if method not in (None, "mxfp4"):
        raise ValueError(
            f"its weights are packed by {method}, which cannot be trained; name the unquantized checkpoint"
        )


def loading_options(shape: PretrainedConfig, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` beside the dtype.

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
