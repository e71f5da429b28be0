"""LoRA by `peft` (an optional package, imported only here): adapters injected in place and never merged.

The model's class and forward stay; the rollout and the update run the very same adapted layers, so what is sampled is
what is trained. Merging into bf16 weights and back would lose bits; there is no dropout, for the same reason. The
weights without adapters are the policy before training, so a KL reference needs no second copy. What is written is the
adapter in peft's own form: `peft.PeftModel.from_pretrained(base model, folder)` reads it, as `load_adapters` does for
an evaluation or a replay.

Left out: an exported model with the adapters merged in.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from config import ConfigError, LoraConfig

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor's name in it, since peft saves the model that it wraps around ours


def check_available(lora: LoraConfig) -> None:
    """Raises ConfigError where `lora` asks for a package that is not there."""
    if lora.rank and importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "lora.rank", lora.rank, "needs the package peft; pip install -r requirements/lora.txt, or set 0"
        )


def check_readable(folder: Path) -> None:
    """Raises ConfigError where adapters in peft's form cannot be read: no peft, no weights, or not LoRA's."""
    if importlib.util.find_spec("peft") is None:
        raise _unreadable(folder, "are read by the package peft; pip install -r requirements/lora.txt")
    if not (folder / WEIGHTS).exists():
        raise _unreadable(folder, f"lack {WEIGHTS}; name a whole folder")
    _read_settings(folder)


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
    settings = _settings(model, lora)
    settings.target_modules = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if hasattr(m, "lora_A")})
    settings.inference_mode = True  # as peft writes it; what it reads is frozen unless asked otherwise
    settings.save_pretrained(folder)
    prefixed = {PREFIX + name: value.contiguous() for name, value in state.items()}
    save_file(prefixed, folder / WEIGHTS, metadata={"format": "pt"})


def load_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Puts the adapters of `folder` on their base, unmerged, as they were trained.

    Raises ConfigError where they are damaged or were made for another model.
    """
    import peft

    settings = _read_settings(folder)
    try:
        state = load_file(folder / WEIGHTS)
        peft.inject_adapter_in_model(settings, model)
    except (SafetensorError, ValueError) as error:
        raise _unreadable(folder, f"do not go onto {model.name_or_path}: {str(error).splitlines()[0]}") from error
    there = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    if {n: t.shape for n, t in state.items()} != {PREFIX + n: t.shape for n, t in there.items()}:
        raise _unreadable(
            folder, f"were made for another model than {model.name_or_path}; set model.path to their base"
        )
    peft.set_peft_model_state_dict(model, state)


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

    base = str(model.name_or_path)
    base = os.path.abspath(base) if os.path.isdir(base) else base  # or it would be found from one folder alone
    return peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, bias="none", target_modules="all-linear",
        task_type="CAUSAL_LM", base_model_name_or_path=base,
    )  # fmt: skip


def _read_settings(folder: Path) -> Any:
    import peft

    try:
        settings = peft.PeftConfig.from_pretrained(str(folder))
    except (TypeError, ValueError) as error:
        raise _unreadable(folder, f"adapter_config.json cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(settings, peft.LoraConfig):
        raise _unreadable(folder, f"are {settings.peft_type} and not LoRA; merge them into their base")
    return settings


def _unreadable(folder: Path, what: str) -> ConfigError:
    return ConfigError("adapters", str(folder), what)
