"""What a rollout did and where its time went. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RolloutStats:
    """Counts and seconds of one `generate` in one process; all of them add up over several in a row."""

    seconds: float = 0.0  # wall time of the whole; the parts below and what the schedule itself takes sum to it
    submit_seconds: float = 0.0  # host work of the decoder; without graphs its computation too
    read_seconds: float = 0.0  # waiting for draws, and what follows from them: turns, tool calls
    idle_seconds: float = 0.0  # no row decoded: every one, or with rollout.deterministic the engine, awaited a tool
    tool_seconds: float = 0.0  # wall time of all calls, from submission to delivery
    tools_open_seconds: float = 0.0  # wall time with at least one call under way
    steps: int = 0
    eager_steps: int = 0  # without captured graphs: all on CPU; on CUDA those of which decode/fallback.py warns
    running_rows: int = 0  # summed over steps
    row_slots: int = 0  # steps x rollout.decode_rows: what running_rows could have been
    decode_tokens: int = 0  # draws
    prefill_tokens: int = 0  # tokens computed beside the one that each draw starts from: prompts, results, recomputed
    reused_tokens: int = 0  # prompt tokens that a sibling found computed
    kept_tokens: int = 0  # tokens of earlier turns that a row found computed when its tool had answered
    preemptions: int = 0
    captures: int = 0  # CUDA graphs
