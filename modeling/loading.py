"""The Hugging Face model with our attention and experts: from a checkpoint, or random weights of its true shape."""

from __future__ import annotations

from json import JSONDecodeError
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from config import ConfigError, ModelConfig
from modeling import attention, experts, lora
from modeling.families import can_fuse
from modeling.quantized import forget_quantization, loading_options
from modeling.routing import watch
from modeling.shapes import shape_source

transformers_logging.disable_progress_bar()


def build_model(
    config: ModelConfig, seed: int, device: torch.device, adapters: Path | None = None, *, name: str = "model.path"
) -> PreTrainedModel:  # fmt: skip
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
