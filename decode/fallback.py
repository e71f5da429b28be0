"""Captured graphs where the device takes them, eager decoding where it does not: said once, counted in the metrics.

A capture can fail on a machine on which the model itself runs: no memory is left for the graphs, a kernel does not fit
the device, an operation may not be captured. The run then goes on several times slower, which nobody may overlook: one
warning names the cause and the settings, and every step that was decoded eagerly counts in `rollout_eager_steps`.
Graphs are captured when they are made, and again for each new temperature (an evaluation's): a temperature whose
capture fails is eager from then on, the others keep their graphs.

Left out: errors inside a replay. They leave the device in no state to go on from, and end the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from triton.errors import TritonError

from decode.interface import LAST_DRAW, Chunk, Decoder, Pending


class CaptureError(RuntimeError):
    """The device refused to capture a graph, or the memory for it."""


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Turns what goes wrong inside into a CaptureError, and leaves the stream as it was."""
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
    try:
        yield
    except CaptureError:
        raise
    except (RuntimeError, TritonError) as error:  # torch has no narrower kind for a failed capture
        if stream is not None:
            torch.cuda.set_stream(stream)  # torch.cuda.graph stays on its own where the end of a capture fails
        cause: BaseException = error
        while cause.__context__ is not None:  # the end of a broken capture raises once more, and knows no reason
            cause = cause.__context__
        raise CaptureError(f"{type(cause).__name__}: {cause}".splitlines()[0]) from error


class GraphsOrEager:
    """A `decode.eager.Decoder`; see the module."""

    def __init__(self, make_graphs: Callable[[], Any], eager: Decoder):
        """make_graphs: gives a `decode.graphs.GraphDecoder`, or raises CaptureError; eager: knows no `LAST_DRAW`."""
        self._eager, self._graphs = eager, None
        self._refused: set[float] = set()  # temperatures
        self._before: tuple[Sequence[Chunk], Pending] | None = None  # the last step that took graphs
        self.pipelined = True
        try:
            self._graphs = make_graphs()
        except CaptureError as error:
            self.pipelined = False
            _warn(error, "every step")

    @property
    def captures(self) -> int:
        return self._graphs.captures if self._graphs else 0

    @property
    def step_rows(self) -> int:
        return self._graphs.step_rows if self._graphs else 0

    def submit(self, chunks: Sequence[Chunk], temperature: float) -> Pending:
        """Queues a step. `pipelined` is that of the step submitted last."""
        self.pipelined = self._graphs is not None and temperature not in self._refused
        if self._graphs is not None and self.pipelined:
            try:
                pending = self._graphs.submit(chunks, temperature)
            except CaptureError as error:
                self._refused.add(temperature)
                self.pipelined = False
                _warn(error, f"steps at temperature {temperature:g}")
                chunks = self._with_draws(chunks)
            else:
                self._before = (chunks, pending)
                return pending
        return self._eager.submit(chunks, temperature)

    def _with_draws(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks with the tokens that the step before drew, which may not have been read yet."""
        drawn: dict[int, int] = {}
        if self._before:
            rows = [chunk.lane for chunk in self._before[0] if chunk.sample]
            drawn = dict(zip(rows, self._before[1].read().tokens, strict=True))
        return [
            dataclasses.replace(c, token_ids=[drawn[c.lane] if t == LAST_DRAW else t for t in c.token_ids])
            for c in chunks
        ]


def _warn(error: CaptureError, what: str) -> None:
    print(
        f"warning: CUDA graphs could not be captured ({error}); {what} will be decoded eagerly, several times slower "
        "(rollout_eager_steps counts them); lower rollout.kv_memory_fraction or rollout.decode_rows to leave memory "
        "for graphs, or set rollout.cuda_graphs=false",
        file=sys.stderr, flush=True,
    )  # fmt: skip
