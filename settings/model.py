"""Settings of the model: which one, how it computes, how its chat template is filled."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from typing import Literal

from configs.schema import require


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    path: str = ""  # folder or hub name with config, weights, tokenizer and chat template
    tokenizer_path: str = ""  # where the tokenizer lies; empty: beside the weights
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # auto: SDPA per row on CPU, torch's varlen kernel on CUDA; eager: the plain softmax, exact across both phases
    attn_implementation: Literal["auto", "eager"] = "auto"
    # true: the backward pass computes every layer again; false: none; auto: as many as the GPU's memory asks for
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    router_replay: bool = False  # mixtures of experts: the update takes the experts that sampling took
    random_weights: bool = False  # the true shape from config.json alone, seeded by train.seed
    enable_thinking: bool = True  # hybrid templates: False appends the empty think block to every assistant header
    reasoning_effort: Literal["low", "medium", "high"] | None = None  # GPT-OSS's prompt; null: medium
    current_date: str | None = None  # YYYY-MM-DD, likewise; null: its release date, never the clock

    def __post_init__(self) -> None:
        require(bool(self.path), "model.path", self.path, "name a model folder, e.g. models/tiny_qwen3")
        day = self.current_date
        require(
            day is None or _is_date(day), "model.current_date", day,
            "write YYYY-MM-DD, a day that exists, or null",
        )  # fmt: skip


def _is_date(text: str) -> bool:
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) is None:  # ISO 8601 has more forms
        return False
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True
