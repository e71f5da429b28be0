"""DeepSpeed's part of a checkpoint: its files, and the random state of a process.

Nothing in a step draws from the random streams today; a model with dropout would.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from run import tensorfiles


class EngineFiles(TorchCheckpointEngine):
    """DeepSpeed's access to files: written without blocking other threads, read without a copy on the host."""

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder
        self.sums: dict[str, str] = {}  # checksums of the files written, by name below the folder

    def save(self, state_dict: Any, path: str | Path) -> None:
        self.sums[Path(path).relative_to(self._folder).as_posix()] = tensorfiles.save(state_dict, Path(path))

    def load(self, path: str | Path, map_location: Any = None) -> Any:
        return tensorfiles.load(Path(path))  # DeepSpeed asks for host memory wherever a state can be saved


def random_state() -> dict[str, Any]:
    """The state of this process's random streams."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restores what `random_state` returned; the GPUs' streams only on as many GPUs as it was taken on."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
