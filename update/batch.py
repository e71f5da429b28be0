"""Packed training batches: scored records dealt to ranks and packed into micro-batches.

Masks and lengths come from the records, never from pad or end ids. Left out: the weights, and which records share an
update (update/minibatch.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rollout.records import RolloutRecord, Scored


@dataclass(frozen=True, slots=True)
class ResponseTokenBatch:
    """Packed trajectories, one a row, for one forward. N tokens of all rows, M of them predict a sampled token.

    The last token of a row predicts nothing and is left out: a record of T tokens takes T - 1 places.
    """

    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N], from 0 in each row
    lengths: tuple[int, ...]  # tokens of each row; they sum to N
    prompts: tuple[int, ...]  # prompt_index of each row
    samples: tuple[int, ...]  # sample_index of each row; with its prompt it names the trajectory within the step
    predictors: Tensor  # [M] places in the packed tokens whose next token was sampled
    targets: Tensor  # [M] those next tokens
    behaviour_logprobs: Tensor  # [M] fp32, as recorded while sampling
    advantages: Tensor  # [M] fp32, the row's for each of its tokens
    weights: Tensor  # [M] fp32, the row's for each of its tokens; holds the global denominators
    rows: Tensor  # [M] the row of each
    turns: Tensor  # [M] the assistant turn of each, from 0
    since_tool: Tensor  # [M] sampled tokens since the last tool result; -1 in the first turn
    routes: Tensor | None = None  # [N, layers * k] uint8, as recorded; None without experts

    @classmethod
    def from_rollout(
        cls, records: Sequence[RolloutRecord], advantages: Sequence[float], weights: Sequence[float]
    ) -> ResponseTokenBatch:
        """advantages, weights: one of each record, repeated for each of its sampled tokens."""
        ids: list[int] = []
        positions: list[int] = []
        predictors: list[int] = []
        targets: list[int] = []
        behaviour: list[float] = []
        row_of: list[int] = []
        turn_of: list[int] = []
        since_tool: list[int] = []
        for row, record in enumerate(records):
            base = len(ids)
            ids.extend(record.token_ids[:-1])
            positions.extend(range(len(record.token_ids) - 1))
            for number, turn in enumerate(record.turns):
                count = turn.end - turn.start
                predictors.extend(range(base + turn.start - 1, base + turn.end - 1))
                targets.extend(record.token_ids[turn.start : turn.end])
                behaviour.extend(record.logprobs[turn.start : turn.end])
                row_of.extend([row] * count)
                turn_of.extend([number] * count)
                since_tool.extend(range(count) if number else [-1] * count)
        rows = torch.tensor(row_of)
        return cls(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            lengths=tuple(len(record.token_ids) - 1 for record in records),
            prompts=tuple(record.prompt_index for record in records),
            samples=tuple(record.sample_index for record in records),
            predictors=torch.tensor(predictors),
            targets=torch.tensor(targets),
            behaviour_logprobs=torch.tensor(behaviour, dtype=torch.float32),
            advantages=torch.tensor(advantages, dtype=torch.float32)[rows],
            weights=torch.tensor(weights, dtype=torch.float32)[rows],
            rows=rows,
            turns=torch.tensor(turn_of),
            since_tool=torch.tensor(since_tool),
            routes=_routes(records),
        )

    def to(self, device: torch.device) -> ResponseTokenBatch:
        tensors = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved: dict[str, Any] = {
            n: t.to(device, non_blocking=True) for n, t in tensors.items() if isinstance(t, Tensor)
        }
        return dataclasses.replace(self, **moved)


def _routes(records: Sequence[RolloutRecord]) -> Tensor | None:
    if not all(record.routes for record in records):
        return None
    rows = [torch.frombuffer(bytearray(r.routes), dtype=torch.uint8).view(len(r.token_ids) - 1, -1) for r in records]
    return torch.cat(rows)


def collate(
    scored: Sequence[Scored], weights: Sequence[float], max_tokens: int, world_size: int, leave_out_equal: bool
) -> list[list[ResponseTokenBatch]]:
    """Micro-batches of every rank, equal in number: [world_size][micro-batches].

    scored: all records of an update, every rank's, in (prompt, sample) order; each rank calls this with the same list
    weights: of each record's sampled tokens, denominators included
    max_tokens: most tokens in a micro-batch
    leave_out_equal: records of advantage 0 stay out of the forward, since they add exactly nothing to the gradient
        (unless `loss.needs_every_row`)
    A rank with nothing to train runs a batch of weight 0, since every rank must join the reduction.
    """
    weighted = list(zip(scored, weights, strict=True))
    active = [(s, w) for s, w in weighted if s.advantage != 0.0 or not leave_out_equal]
    active.sort(key=lambda pair: (-len(pair[0].record.token_ids), pair[0].record.prompt_index))
    shares: list[list[tuple[Scored, float]]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for item, weight in active:
        rank = loads.index(min(loads))
        shares[rank].append((item, weight))
        loads[rank] += len(item.record.token_ids)
    packed = [_pack(share, max_tokens) for share in shares]
    count = max(1, *map(len, packed))
    shortest = min((s.record for s in scored), key=lambda r: len(r.token_ids))
    idle = ResponseTokenBatch.from_rollout([shortest], [0.0], [0.0])
    return [groups + [idle] * (count - len(groups)) for groups in packed]


def _pack(items: Sequence[tuple[Scored, float]], max_tokens: int) -> list[ResponseTokenBatch]:
    """Rows of similar length together, longest first, at most `max_tokens` in each micro-batch."""
    groups: list[list[tuple[Scored, float]]] = []
    room = 0
    for item in items:
        length = len(item[0].record.token_ids) - 1
        if length > room:
            groups.append([])
            room = max_tokens
        groups[-1].append(item)
        room -= length
    return [
        ResponseTokenBatch.from_rollout([s.record for s, _ in g], [s.advantage for s, _ in g], [w for _, w in g])
        for g in groups
    ]


def by_trajectory(
    updates: Sequence[Sequence[Sequence[ResponseTokenBatch]]], values: Sequence[Tensor]
) -> dict[tuple[int, int], list[float]]:
    """(prompt_index, sample_index) of each trained trajectory -> the value of each of its sampled tokens.

    updates: [updates][ranks][micro-batches]
    values: of each update, over its trained tokens in that order  # [M] each
    """
    found = {}
    for update, column in zip(updates, values, strict=True):
        left = iter(column.tolist())
        for batch in chain.from_iterable(update):
            if not batch.weights.any():  # of a rank that had nothing to train
                continue
            counts = torch.bincount(batch.rows, minlength=len(batch.lengths)).tolist()
            for prompt, sample, count in zip(batch.prompts, batch.samples, counts, strict=True):
                found[prompt, sample] = [next(left) for _ in range(count)]
    return found
