"""Frozen answers of openai-harmony."""

from __future__ import annotations

import json
from pathlib import Path

FROZEN = json.loads((Path(__file__).parents[1] / "cases" / "harmony_chat.json").read_text(encoding="utf-8"))
