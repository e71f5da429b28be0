"""The figures of an update's tokens: collected without waiting for the device, gathered over ranks, reduced once.

The gap of a token is d = training log-probability - recorded sampling log-probability. Percentiles and the effective
sample size need every token, so the columns themselves are gathered (a few floats a token), at the end of an update.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # for exp(d) alone; max and p99 are unbounded
DISTANCES = (1, 4, 16, 64)  # ends of the ranges of sampled tokens since a tool result
LAST_TURN = 8  # turns from here on are counted together


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Figures of M trained tokens; fp32 [M] each."""

    gap: Tensor  # d at the weights of this update
    old_gap: Tensor  # d at the weights of the ratio's denominator
    turns: Tensor  # from 0
    since_tool: Tensor  # -1 in the first turn
    entropy: Tensor  # nats
    top1: Tensor  # 0 or 1
    clipped: Tensor  # 0 or 1
    ratio_error: Tensor  # |pi / pi_old - 1|
    importance: Tensor
    importance_cut: Tensor  # 0 or 1
    kl: Tensor  # the estimate, 0 where there is no reference
    balance: Tensor  # of the routers, 1 where even; 0 where it is off
    flips: Tensor  # share of layers whose experts differ from those of sampling; NaN in a dense model
    divergence: Tensor  # from the teacher; these three are 0 where there is none
    teacher_gap: Tensor  # log policy - log teacher of the token
    teacher_entropy: Tensor  # nats
    trained: Tensor  # 0 or 1; 0 in the batch of a rank that has nothing to train

    @staticmethod
    def concatenate(parts: Sequence[TokenColumns]) -> TokenColumns:
        names = [f.name for f in dataclasses.fields(TokenColumns)]
        return TokenColumns(**{n: torch.cat([getattr(p, n) for p in parts]) for n in names})

    def gathered(self) -> TokenColumns:
        """The trained tokens of all ranks, in rank order, on CPU in fp64. Collective; waits for the device."""
        names = [f.name for f in dataclasses.fields(self)]
        table = torch.stack([getattr(self, n).float() for n in names])  # [C, M]
        if dist.get_world_size() > 1:
            table = _gather_columns(table)
        table = table.cpu().double()
        table = table[:, table[names.index("trained")] > 0]
        return TokenColumns(**dict(zip(names, table, strict=True)))


def _gather_columns(table: Tensor) -> Tensor:
    """[C, M of this rank] -> [C, M of all ranks]; ranks hold different numbers of tokens."""
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=table.device)
    sizes[dist.get_rank()] = table.shape[1]
    dist.all_reduce(sizes)
    counts = sizes.tolist()
    padded = torch.nn.functional.pad(table, (0, max(counts) - table.shape[1]))
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], dim=1)


@dataclass(frozen=True, slots=True)
class GapFigures:
    """How far the training log-probabilities are from the sampling ones. All 0 (ess 1) where they agree."""

    mean: float  # mean |d|
    p99: float  # of |d|
    max: float  # of |d|
    k1: float  # mean of -d: KL(sampling || training) (Schulman 2020), may be negative
    k3: float  # mean of exp(d) - 1 - d: the same, never negative
    ess: float  # effective sample size of the weights exp(d), as a share of the tokens (Kish 1965)
    by_turn: dict[str, float]  # mean |d| in the first, second, .. turn
    by_distance: dict[str, float]  # mean |d| by sampled tokens since the last tool result


@dataclass(frozen=True, slots=True)
class TeacherFigures:
    """How far the policy is from its teacher, per trained token."""

    divergence: float  # what loss.distill_weight minimises; for "sampled" the estimate of the reverse KL
    gap: float  # mean log policy - log teacher: the estimate of KL(policy || teacher) whatever the divergence
    entropy: float  # of the teacher, nats
    by_turn: dict[str, float]  # the divergence in the first, second, .. turn


def teacher_figures(columns: TokenColumns) -> TeacherFigures:
    """columns: as gathered"""
    return TeacherFigures(
        divergence=columns.divergence.mean().item(),
        gap=columns.teacher_gap.mean().item(),
        entropy=columns.teacher_entropy.mean().item(),
        by_turn=_by_turn(columns.divergence, columns.turns),
    )


def gap_figures(gap: Tensor, turns: Tensor, since_tool: Tensor) -> GapFigures:
    """gap, turns, since_tool: fp64 on CPU  # [M] each"""
    if gap.numel() == 0:
        return GapFigures(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, {}, {})
    size = gap.abs()
    bounded = gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = bounded.exp()
    return GapFigures(
        mean=size.mean().item(),
        p99=size.kthvalue(math.ceil(0.99 * size.numel())).values.item(),
        max=size.max().item(),
        k1=-gap.mean().item(),
        k3=(torch.expm1(bounded) - bounded).mean().item(),
        ess=(ratio.sum().square() / (ratio.numel() * ratio.square().sum())).item(),
        by_turn=_by_turn(size, turns),
        by_distance=_means(size, torch.bucketize(since_tool, torch.tensor((0, *DISTANCES)), right=True) - 1,
                           _distance_names()),
    )  # fmt: skip


def _by_turn(values: Tensor, turns: Tensor) -> dict[str, float]:
    return _means(values, turns.clamp(max=LAST_TURN - 1), _turn_names())


def _means(size: Tensor, bins: Tensor, names: list[str]) -> dict[str, float]:
    """Mean of `size` in each bin that holds a token; bin -1 is left out."""
    inside = bins >= 0
    index = bins[inside].long()
    sums = torch.bincount(index, weights=size[inside], minlength=len(names))
    counts = torch.bincount(index, minlength=len(names))
    return {n: (s / c).item() for n, s, c in zip(names, sums, counts, strict=True) if c}


def _turn_names() -> list[str]:
    return [*map(str, range(1, LAST_TURN)), f"{LAST_TURN}+"]


def _distance_names() -> list[str]:
    starts = (0, *DISTANCES)
    ranges = [str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in zip(starts, DISTANCES, strict=False)]
    return [*ranges, f"{DISTANCES[-1]}+"]
