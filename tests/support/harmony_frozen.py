"""What several test files use of test_chat_harmony."""

from __future__ import annotations

import json
from pathlib import Path

FROZEN = json.loads((Path(__file__).parent / "cases" / "harmony_chat.json").read_text(encoding="utf-8"))
