"""The environment in which launch scripts are tried."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PYTHON_FIRST = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SKIP_INSTALL": "1"}


def environment(**variables: str) -> dict[str, str]:
    launcher = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NUM_GPUS", "HOSTFILE", "NNODES",
                "PROGRAM"}  # fmt: skip
    return {k: v for k, v in os.environ.items() if k not in launcher} | PYTHON_FIRST | variables
