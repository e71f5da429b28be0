"""What main.py has built for a run, as one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from config import Config
from rollout.records import Sample
from startup.forecast import Memory


@dataclass(frozen=True, slots=True)
class Parts:
    config: Config
    shape: Any  # the model's Hugging Face config
    tokenizer: Any
    chat: Any
    data: Any  # trainer.TrainingData: problems and their rendered prompts
    eval_data: Any  # likewise, or None
    tool: Any  # tools.PythonTool, or None
    policy: Any
    engine: Any
    sample: Sample
    memory: Memory  # the forecast
    rank: int
    world_size: int
    teacher: Any = None  # teacher.Teacher, or None
