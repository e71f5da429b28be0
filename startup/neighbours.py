"""In fp32 on a CPU a token's log-prob must not depend on the sequences beside it, nor on how it was read.

Alone, packed with others, and in the pieces in which it was sampled it must be the same number, or a resumed run would
part from the uninterrupted one. Matrix products keep that by habits of the processor's libraries, so each start of a
run looks at it. Left out: bf16 and GPUs, where the mismatch is measured and bounded.
"""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from rollout.records import RolloutRecord
from startup.building import Parts
from update.batch import ResponseTokenBatch

GROSS = 1e-4  # above it what is sampled is not what is trained, which is another finding
FIX = "set train.num_threads=1 or MKL_CBWR=COMPATIBLE, or take inexact resumes with train.check=false"


@torch.no_grad()
def compared(
    parts: Parts, packed: Callable[[Sequence[RolloutRecord]], ResponseTokenBatch], records: Sequence[RolloutRecord]
) -> list[tuple[Literal["ok", "FAIL"], str]]:
    """One finding, or none where exactness is not promised."""
    if parts.policy.device.type != "cpu" or parts.config.model.dtype != "float32":
        return []
    batch = packed(records)
    together = parts.policy.token_logprobs(batch).logprobs
    alone = torch.cat([parts.policy.token_logprobs(packed([record])).logprobs for record in records])
    differs = {"alone": (together - alone).abs().max().item()}
    pieces = (together - batch.behaviour_logprobs).abs().max().item()
    if pieces <= GROSS:
        differs["in pieces"] = pieces
    way = max(differs, key=lambda name: differs[name])
    where = f"{processor()}, {torch.get_num_threads()} threads"
    if differs[way] > 0:
        return [
            ("FAIL", f"a token's log-prob read {way} differs by {differs[way]:.2g} from among others ({where}); {FIX}")
        ]
    return [("ok", f"{len(alone)} log-probs are the same {', '.join(differs)} and among others ({where})")]


def processor() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.machine()
