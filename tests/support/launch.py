"""Runs of main.py, and what they leave behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import main as program
from run.trajectories import read_step

ROOT = Path(__file__).parents[2]


SMALL = [
    "rollout.trajectories_per_step=16", "rollout.samples_per_prompt=4", "rollout.decode_rows=16",
    "rollout.deterministic=true", "rollout.max_turns=3", "train.steps=4", "train.save_every=2",
]  # fmt: skip


def run(run_dir: Path, *settings: str, resume: bool = False) -> int:
    sets = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    resuming = ["--resume"] if resume else []
    return program.main(["--config", "configs/tiny_cpu.json", "--run-dir", str(run_dir), *sets, *resuming])


def finished_run(run_dir: Path, *settings: str) -> Path:
    """For fixtures of a module, which stand outside `in_the_repository`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert run(run_dir, *settings) == 0
    return run_dir


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def numbers(run_dir: Path) -> list[dict]:
    """Metrics without what time decides: seconds, rates, and which rank computed what in which step."""
    timed = ("seconds", "per_second", "mismatch", "rollout_")
    return [{k: v for k, v in row.items() if not any(t in k for t in timed)} for row in metrics(run_dir)]


def trajectories(run_dir: Path, step: int) -> list[dict]:
    """Rows of a step, tool times and behaviour log-probs aside."""
    rows = read_step(run_dir, step)
    for row in rows:
        del row["logprobs"]
        for call in (call for turn in row["turns"] for call in turn["calls"]):
            del call["wall_s"]
    return rows


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def cut_back(straight: Path, run_dir: Path) -> Path:
    """A copy of the run whose newest checkpoint is that of step 2."""
    shutil.copytree(straight, run_dir)
    shutil.rmtree(run_dir / "checkpoints/step_4")
    return run_dir / "checkpoints/step_2"


def error_of(capsys, tmp_path: Path, *settings: str, resume: bool = False) -> str:
    folder = tmp_path / "run"
    assert run(folder, *settings, resume=resume) == 2
    assert not folder.exists()
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    return message
