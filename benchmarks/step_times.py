"""Device time of the steps of a rollout by their number of sequences: where a rollout's seconds go.

An event is recorded before each step is queued. A step lasts until the next one starts, so a wait for a tool counts
with the step before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from decode.interface import Chunk

EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # most sequences of a kind, or lanes where chunks are longer


def device_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def kind_of(lengths: list[int]) -> tuple[bool, int]:
    """Whether some chunk is longer, and the edge of the step's kind; lengths: new tokens of each sequence"""
    rows, wide = sum(lengths), sum(lengths) > len(lengths)
    return wide, next((edge for edge in EDGES if rows <= edge), rows)


class StepTimes:
    """Times the steps of a decoder from now on."""

    def __init__(self, decoder: Any, mark: Callable[[], Any] = device_mark):
        """mark: returns an event recorded now, with `elapsed_time` and `synchronize`"""
        self._marks: list[Any] = []
        self._kinds: list[tuple[bool, int]] = []
        self._mark, submit = mark, decoder.submit

        def timed(chunks: Sequence[Chunk], temperature: float, **words: Any) -> Any:
            self._marks.append(mark())
            self._kinds.append(kind_of([len(chunk.token_ids) for chunk in chunks]))
            return submit(chunks, temperature, **words)

        decoder.submit = timed

    def table(self) -> str:
        """One text line for each kind of step since the last call."""
        end = self._mark()
        end.synchronize()
        marks = [*self._marks, end]
        spans: dict[tuple[bool, int], list[float]] = defaultdict(list)
        for i, kind in enumerate(self._kinds):
            spans[kind].append(marks[i].elapsed_time(marks[i + 1]))
        self._marks, self._kinds = [], []
        return "\n".join(
            f"{'rows, longer chunks' if wide else 'sequences':19} <= {edge:4} "
            f"{len(ms):6} x {sum(ms) / len(ms):.3f} ms = {sum(ms) / 1e3:.2f} s"
            for (wide, edge), ms in sorted(spans.items())
        )
