"""Device time of the steps of a rollout, by how many sequences they carry: where a rollout's seconds go.

An event is recorded before each step is queued; a step lasts until the next one starts, so the few waits for a tool
count with the step before them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from decode.interface import Chunk

EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # a kind's most sequences, or rows where chunks are longer


def device_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def kind_of(lengths: list[int]) -> tuple[bool, int]:
    """Whether some chunk is longer, and the edge of the step's kind; lengths: new tokens of each sequence"""
    rows, wide = sum(lengths), sum(lengths) > len(lengths)
    return wide, next((edge for edge in EDGES if rows <= edge), rows)


class StepTimes:
    """Watches a `decode.eager.Decoder` from now on."""

    def __init__(self, decoder: Any, mark: Callable[[], Any] = device_mark):
        """mark: gives an event of now, with `elapsed_time` and `synchronize`"""
        self._marks: list[Any] = []
        self._kinds: list[tuple[bool, int]] = []
        self._mark, submit = mark, decoder.submit

        def timed(chunks: Sequence[Chunk], temperature: float, **words: Any) -> Any:
            self._marks.append(mark())
            self._kinds.append(kind_of([len(chunk.token_ids) for chunk in chunks]))
            return submit(chunks, temperature, **words)

        decoder.submit = timed

    def table(self) -> str:
        """A line for each kind of step since the last call."""
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
