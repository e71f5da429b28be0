"""Every Triton kernel compiles for the GPU it is meant for; no GPU is needed to know that."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.launch import ROOT

pytest.importorskip("triton", reason="triton is not installed")


def test_every_kernel_compiles_for_hopper():
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
