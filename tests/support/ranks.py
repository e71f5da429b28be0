"""Runs on several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.launch import ROOT, SMALL

SETTINGS = (*SMALL, "train.save_every=1", "train.max_tokens_per_micro_batch=600")


def command(run_dir: Path, ranks: int, *extra: str) -> list[str]:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    return [*launcher, "main.py", "--config", "configs/tiny_cpu.json", "--run-dir", str(run_dir), *sets, *extra]


def launch(run_dir: Path, ranks: int, *extra: str) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command(run_dir, ranks, *extra), cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
