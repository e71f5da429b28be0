"""Device time of the steps of a rollout, by how many sequences they carry: where a rollout's seconds go.

An event is recorded before each replay of a captured step; a step lasts until the next one starts, so the few waits
for a tool count with the step before them. Steps that go through no graph are not seen.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # a kind's most sequences, or rows where chunks are longer


def kind_of(lengths: list[int]) -> str:
    """lengths: new tokens of each sequence of a step"""
    rows, wide = sum(lengths), sum(lengths) > len(lengths)
    edge = next((edge for edge in EDGES if rows <= edge), rows)
    return f"{'rows, longer chunks' if wide else 'sequences'} <= {edge}"


class StepTimes:
    """Watches a `rollout.graphs.GraphDecoder` from now on."""

    def __init__(self, decoder: Any):
        self._events: list[torch.cuda.Event] = []
        self._kinds: list[str] = []
        replay = decoder._replay

        def timed(chunks: list, temperature: float, turn: int) -> None:
            self._mark()
            self._kinds.append(kind_of([len(chunk.token_ids) for chunk in chunks]))
            replay(chunks, temperature, turn)

        decoder._replay = timed

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def take(self) -> dict[str, dict[str, float]]:
        """Steps, milliseconds of each and seconds in all, by kind, since the last call."""
        self._mark()
        torch.cuda.synchronize()
        spans: dict[str, list[float]] = defaultdict(list)
        for i, kind in enumerate(self._kinds):
            spans[kind].append(self._events[i].elapsed_time(self._events[i + 1]))
        self._events, self._kinds = [], []
        return {
            kind: {"steps": len(ms), "ms": round(sum(ms) / len(ms), 3), "seconds": round(sum(ms) / 1e3, 3)}
            for kind, ms in sorted(spans.items(), key=lambda item: (item[0][0] == "r", int(item[0].split()[-1])))
        }
