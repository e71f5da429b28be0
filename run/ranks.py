"""Communication between ranks outside DeepSpeed: gathered objects and shared work.

It uses a gloo group of its own, since it carries Python objects. One rank needs neither group nor store.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from rollout.records import Work
from run.files import DamageError, WriteError


class Ranks:
    """This rank and the others; made once per process, after the process group."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._failure: str | None = None
        if self.world_size == 1:
            return
        self._group = dist.new_group(backend="gloo")
        host = os.environ["MASTER_ADDR"]
        port = self.gather(self._serve(host) if self.rank == 0 else None)[0]
        if self.rank:
            self._store = dist.TCPStore(host, port, is_master=False)

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item, in rank order. Collective."""
        if self.world_size == 1:
            return [item]
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item, group=self._group)
        return items

    def attempt(self, write: Callable[..., None], *values: Any) -> None:
        """Calls `write(*values)`. A failure to write is kept for `raise_any`; later calls do nothing."""
        if self._failure is None:
            try:
                write(*values)
            except (WriteError, DamageError) as error:
                self._failure = str(error)

    def raise_any(self) -> None:
        """Raises a WriteError on every rank for what any rank met, so that all end together. Collective."""
        failures = [failure for failure in self.gather(self._failure) if failure]
        if failures:
            raise WriteError(failures[0])

    def deal(self, name: str, end: int, first: int = 0) -> Work:
        """The trajectories `first` to `end`, each given to one rank. Use a name once."""
        count = itertools.count(1).__next__ if self.world_size == 1 else lambda: self._store.add(name, 1)
        return Work(lambda: first + count() - 1, share=-(-(end - first) // self.world_size))

    def _serve(self, host: str) -> int:
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return self._store.port
