"""What the drivers of other engines share: the scripted tokens, the folder of random weights, the missing package.

Invariant: importing this needs neither vLLM nor TRL; the tests import every driver without them.
"""

from __future__ import annotations

import json
import os
import random
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from benchmarks.workload import Row

SHAPES = Path(__file__).resolve().parent.parent.parent / "models" / "shapes"
FIRST_ID = 100  # below it lie control tokens of some vocabularies; the last 400 ids are control tokens of Qwen3's
LAST_IDS = 400


def stay_offline() -> None:
    """No driver downloads: weights are random, prompts are token ids."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "VLLM_NO_USAGE_STATS"):
        os.environ[name] = "1"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # its kernels compile at the first use


def needed(package: str) -> Any:
    """The package, or the program ends with one line."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        fix = "install requirements/peers.txt into an environment of its own"
        raise SystemExit(f"error: package {error.name} is not installed: {fix}") from None


def versions(*packages: str) -> dict[str, str]:
    return {package: metadata.version(package) for package in packages}


def shape_folder(shape: str) -> Path:
    """A folder of models/shapes or any folder with config.json."""
    folder = Path(shape) if Path(shape).is_dir() else SHAPES / shape
    if not (folder / "config.json").is_file():
        known = ", ".join(sorted(p.name for p in SHAPES.iterdir()))
        raise SystemExit(f"error: --shape is {shape!r}: name a folder with config.json, or one of {known}")
    return folder


def vocabulary_of(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["vocab_size"]


def prompts_and_results(rows: list[Row], vocabulary: int, seed: int) -> list[tuple[list[int], list[list[int]]]]:
    """Of each trajectory the prompt's ids, shared by its group, and the ids of the tool result after each turn."""
    generator = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [generator.randrange(FIRST_ID, vocabulary - LAST_IDS) for _ in range(count)]

    prompts: dict[int, list[int]] = {}
    found = []
    for row in rows:
        if row["prompt"] not in prompts:
            prompts[row["prompt"]] = ids(row["prompt_tokens"])
        found.append((prompts[row["prompt"]], [ids(turn.get("tool_tokens", 0)) for turn in row["turns"]]))
    return found
