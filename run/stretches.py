"""Which settings trained which step: `config.json` holds the current ones, `settings.jsonl` those of every stretch.

A run may be resumed with other settings, so what looks back at a step (audit, replay, curves) must take those it was
trained with. A line of `settings.jsonl` is `{"first_step": 1, "config": {...}}`; a stretch ends where the next begins.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from config import with_defaults
from configs.schema import differences, read_json
from run.files import DamageError, json_lines, write_whole

LAST = 1 << 62  # past every step


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps (from 1) that were trained with the same settings."""

    steps: range
    config: dict[str, Any]  # resolved, by section


def stretches(run_dir: Path) -> list[Stretch]:
    """In order, covering every step; a run without `settings.jsonl` has one. Raises ConfigError, DamageError.

    A setting that is newer than the run stands at its default.
    """
    path = run_dir / "settings.jsonl"
    if not path.exists():
        return [Stretch(range(1, LAST), with_defaults(read_json(run_dir / "config.json")))]
    lines = [line for _, line in json_lines(path)]
    if not lines:
        raise DamageError(f"{path}: is empty; remove it, and config.json counts for every step")
    ends = [*(line["first_step"] for line in lines[1:]), LAST]
    return [
        Stretch(range(line["first_step"], end), with_defaults(line["config"]))
        for line, end in zip(lines, ends, strict=True)
    ]


def settings_of(run_dir: Path, step: int) -> dict[str, Any]:
    """The resolved config, by section, of step `step` (from 1)."""
    return next(stretch.config for stretch in stretches(run_dir) if step in stretch.steps)


def begin_stretch(run_dir: Path, first_step: int, resolved: str) -> None:
    """Records `resolved` (JSON) as the settings of steps from `first_step` on, in place of what was recorded."""
    kept = [stretch for stretch in stretches(run_dir) if stretch.steps.start < first_step] if first_step > 1 else []
    config = json.loads(resolved)
    if not kept or differences(kept[-1].config, config):
        kept.append(Stretch(range(first_step, LAST), config))
    lines = [json.dumps({"first_step": stretch.steps.start, "config": stretch.config}) for stretch in kept]
    write_whole(run_dir / "settings.jsonl", "".join(line + "\n" for line in lines))
    write_whole(run_dir / "config.json", resolved)


def changes(run_dir: Path) -> list[str]:
    """One line for each setting that a resume changed."""
    found = stretches(run_dir)
    return [
        f"from step {later.steps.start}: {name} {json.dumps(was)} -> {json.dumps(now)}"
        for earlier, later in pairwise(found)
        for name, (was, now) in differences(earlier.config, later.config).items()
    ]
