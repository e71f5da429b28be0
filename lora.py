"""LoRA through Hugging Face's own adapter interface (`peft`, an optional package): injected in place, never merged.

The model's class and forward stay; the rollout and the update run the very same adapted layers, so what is sampled is
what is trained. Merging into bf16 weights and back would lose bits; there is no dropout, for the same reason. The
weights without adapters are the policy before training, so a KL reference needs no second copy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from config import ConfigError, LoraConfig


def check_available(lora: LoraConfig) -> None:
    """Raises ConfigError where `lora` asks for a package that is not there."""
    if lora.rank and importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "lora.rank", lora.rank, "needs the package peft; pip install -r requirements-lora.txt, or set 0"
        )


def add_adapters(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Adapters on every linear layer but the head; all else is frozen. The output does not change: B starts at 0."""
    import peft

    adapters = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, bias="none", target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model.add_adapter(adapters)


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was before training, for a forward without gradient."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
