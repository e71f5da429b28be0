"""The state of a process's random streams, as a checkpoint keeps it.

Nothing in a step draws from these streams today; a model with dropout would.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def take() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def put_back(state: dict[str, Any]) -> None:
    """The GPUs' streams only where there are as many GPUs as when it was taken."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
