"""The entropy of each trained token's distribution, put back to the trajectory that it belongs to.

The update's forward gives it at no cost; the rollout, whose sampler is captured, does not compute it. With one update
a rollout it is that of the very distribution the token was drawn from; a later update sees weights that have moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from update.minibatch import Update


def by_line(updates: Sequence[Update], entropies: Sequence[Tensor]) -> dict[tuple[int, ...], list[float]]:
    """Token ids of a trajectory without its last -> the entropy of each of its sampled tokens, in nats.

    A trajectory that was not trained is absent. Equal lines have equal entropies, so the ids are name enough.

    updates: [updates][ranks][micro-batches]
    entropies: of each update, over its trained tokens in that order  # [M] each
    """
    found = {}
    for update, values in zip(updates, entropies, strict=True):
        left = iter(values.tolist())
        for batch in chain.from_iterable(update):
            if not batch.weights.any():  # of a rank that had nothing to train
                continue
            counts = torch.bincount(batch.rows, minlength=len(batch.lengths)).tolist()
            for line, count in zip(batch.input_ids[0].split(batch.lengths), counts, strict=True):
                found[tuple(line.tolist())] = [next(left) for _ in range(count)]
    return found
