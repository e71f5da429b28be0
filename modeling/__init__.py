"""What the network computes, shared by rollout and update.

Importing this package asks MKL for one order of accumulation: on Intel processors its products otherwise take other
kernels, with other roundings, for other numbers of rows or threads, and a token's log-probability would depend on the
sequences beside it. `MKL_CBWR=AUTO,STRICT` is MKL's own switch; a value that you set is kept. On other processors the
products do not depend on the number of rows from `attention.MIN_ROWS` on, so they are left alone.
"""

import os
from pathlib import Path


def _is_intel() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text(errors="replace")


if _is_intel():
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # read at MKL's first product, not when torch is imported
