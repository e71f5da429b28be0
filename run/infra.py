"""When the sandbox fails so often that training on would be noise: its trajectories are dropped, then the run ends."""

from __future__ import annotations

from collections.abc import Sequence

from config import UserError
from rollout.records import RolloutRecord, StopReason

MAX_SHARE = 0.01  # of a step's trajectories


class InfraError(UserError, RuntimeError):
    """The sandbox failed too often."""


def check_sandbox(records: Sequence[RolloutRecord]) -> None:
    """Raises InfraError where it spoilt too many of a step's trajectories."""
    spoilt = sum(r.stop is StopReason.TOOL_INFRA for r in records)
    if spoilt > MAX_SHARE * len(records):
        raise InfraError(
            f"the sandbox failed in {spoilt} of {len(records)} trajectories of one step, more than "
            f"{MAX_SHARE:.0%}; see the tool's report at the start of the run"
        )
