"""LoRA by `peft` (an optional package, imported only here): adapters injected in place and never merged.

The model's class and forward stay; the rollout and the update run the very same adapted layers, so what is sampled is
what is trained. Merging into bf16 weights and back would lose bits; there is no dropout, for the same reason. The
weights without adapters are the policy before training, so a KL reference needs no second copy. What is written is the
adapter in peft's own form: `peft.PeftModel.from_pretrained(base model, folder)` reads it.

Left out: an exported model with the adapters merged in.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from config import ConfigError, LoraConfig


def check_available(lora: LoraConfig) -> None:
    """Raises ConfigError where `lora` asks for a package that is not there."""
    if lora.rank and importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "lora.rank", lora.rank, "needs the package peft; pip install -r requirements-lora.txt, or set 0"
        )


def add_adapters(model: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    """Adapters on every linear layer but the head; all else is frozen. The output does not change: B starts at 0."""
    import peft

    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(_settings(model, lora), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def save_adapters(model: PreTrainedModel, lora: LoraConfig, folder: Path) -> None:
    import peft

    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    prefixed = {f"base_model.model.{name}": value.contiguous() for name, value in state.items()}
    _settings(model, lora).save_pretrained(folder)
    save_file(prefixed, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was before training, for a forward without gradient."""
    layers = [m for m in model.modules() if hasattr(m, "lora_A")]
    _enable(layers, False)
    try:
        yield
    finally:
        _enable(layers, True)


def _enable(layers: list[Any], on: bool) -> None:
    for layer in layers:
        layer.enable_adapters(on)


def _settings(model: PreTrainedModel, lora: LoraConfig) -> Any:
    import peft

    return peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, bias="none", target_modules="all-linear",
        task_type="CAUSAL_LM", base_model_name_or_path=model.name_or_path,
    )  # fmt: skip
