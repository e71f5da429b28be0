"""Where a model's shape comes from: its own config.json, or the shipped one when weights are random anyway."""

from __future__ import annotations

from pathlib import Path

from config import ModelConfig

SHIPPED = Path(__file__).parent.parent / "models" / "shapes"


def shape_source(model: ModelConfig) -> str:
    """A folder or hub name with config.json; `model.random_weights` needs no download for a shape shipped here."""
    shipped = SHIPPED / Path(model.path).name
    return str(shipped) if model.random_weights and shipped.is_dir() else model.path
