"""Where the files and folders that settings name are looked for: the working folder, beside the config, the project.

Standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_PATHS = ("model.path", "model.tokenizer_path", "model.chat_template", "data.path", "eval.path", "teacher.path")
PROJECT = Path(__file__).absolute().parents[1]
_beside: list[Path] = [PROJECT]  # the newest config's folder, then the project


def look_beside(config: str | Path) -> None:
    """Takes this config's folder as the one beside which paths are looked for."""
    _beside[:] = [Path(config).absolute().parent, PROJECT]


def places(path: str) -> list[Path]:
    """Where a path is looked for, all absolute; the first that exists is meant."""
    return list(dict.fromkeys(Path(os.path.abspath(folder / path)) for folder in (Path.cwd(), *_beside)))


def located(raw: dict[str, Any]) -> dict[str, Any]:
    """Settings with absolute paths for what is not in the working folder but beside the config or in the project."""
    raw = {name: dict(values) if isinstance(values, dict) else values for name, values in raw.items()}
    for section, _, key in (name.partition(".") for name in _PATHS):
        value = raw[section].get(key) if isinstance(raw.get(section), dict) else None
        if isinstance(value, str) and value and not os.path.exists(value):
            raw[section][key] = next((str(place) for place in places(value) if place.exists()), value)
    return raw
