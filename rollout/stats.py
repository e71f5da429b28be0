"""What a rollout did and where its time went. Standard library only."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class RolloutStats:
    """Counts and seconds of one `generate` in one process; all of them add up over several in a row."""

    seconds: float = 0.0  # wall time of the whole: submit, read and idle, and what scheduling takes
    submit_seconds: float = 0.0  # host work of the decoder; without graphs its computation too
    read_seconds: float = 0.0  # waiting for draws, and what follows from them: turns, tool calls
    idle_seconds: float = 0.0  # no sequence decoded: all, or with rollout.deterministic the engine, waited for a tool
    tool_seconds: float = 0.0  # wall time of all calls, from submission to delivery
    tools_open_seconds: float = 0.0  # wall time with at least one call under way
    steps: int = 0
    eager_steps: int = 0  # without captured graphs: all on CPU; on CUDA those that decode/fallback.py warns of
    running_rows: int = 0  # summed over steps
    row_slots: int = 0  # steps x rollout.decode_rows: what running_rows could have been
    decode_tokens: int = 0  # draws
    prefill_tokens: int = 0  # tokens computed without a draw: prompts, tool results, recomputed ones
    reused_tokens: int = 0  # prompt tokens that a sibling had computed
    kept_tokens: int = 0  # tokens of earlier turns still computed when the tool had answered
    preemptions: int = 0
    captures: int = 0  # CUDA graphs

    def phase(self, name: str, counts: bool = True) -> Phase:
        """`with stats.phase("read_seconds"):` adds the wall time inside to that field, where it `counts`."""
        return Phase(self, name, counts)


class Phase:
    """A part of a rollout's wall time. A class and not a generator, since every step enters three."""

    __slots__ = ("_began", "_counts", "_name", "_stats")

    def __init__(self, stats: RolloutStats, name: str, counts: bool):
        self._stats, self._name, self._counts = stats, name, counts

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._counts:
            seconds = getattr(self._stats, self._name) + time.perf_counter() - self._began
            setattr(self._stats, self._name, seconds)
