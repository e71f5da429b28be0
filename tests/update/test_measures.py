"""The gap between training and sampling log-probabilities: each figure by its plain definition."""

from __future__ import annotations

import math

import pytest
import torch

from policy import init_distributed
from tests.support.oracle import mutant
from tests.support.policies import CPU
from update import measures
from update.measures import GapFigures, TokenColumns, gap_figures

GAP = [0.0, 0.5, -0.25, 1.5, -0.75, 0.125]
TURNS = [0, 0, 1, 1, 9, 12]
SINCE = [-1, -1, 0, 3, 70, 4]


def figures(module=measures, gap=GAP, turns=TURNS, since=SINCE) -> GapFigures:
    return module.gap_figures(*(torch.tensor(v, dtype=torch.float64) for v in (gap, turns, since)))


def plain() -> dict:
    n = len(GAP)
    ratios = [math.exp(d) for d in GAP]
    return {
        "mean": math.fsum(map(abs, GAP)) / n,
        "p99": 1.5,
        "max": 1.5,
        "k1": sum(-d for d in GAP) / n,
        "k3": sum(math.exp(d) - 1 - d for d in GAP) / n,
        "ess": sum(ratios) ** 2 / sum(r * r for r in ratios) / n,
        "by_turn": {"1": 0.25, "2": 0.875, "8+": 0.4375},
        "by_distance": {"0": 0.25, "1-3": 1.5, "4-15": 0.125, "64+": 0.75},
    }


def test_every_figure_is_its_definition():
    for name, value in plain().items():
        assert getattr(figures(), name) == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize(
    ("text", "replacement", "name"),
    [
        ("k1=-gap", "k1=gap", "k1"),
        ("expm1(bounded) - bounded", "expm1(-bounded) + bounded", "k3"),
        ("ratio = bounded.exp()", "ratio = size.exp()", "ess"),
        ("(ratio.numel() * ratio.square().sum())", "(ratio.square().sum())", "ess"),
        ("size.kthvalue(math.ceil(0.99 * size.numel()))", "size.kthvalue(math.floor(0.99 * size.numel()))", "p99"),
        ("right=True", "right=False", "by_distance"),
        ("max=LAST_TURN - 1", "max=LAST_TURN - 2", "by_turn"),
    ],
)
def test_a_changed_term_is_noticed(text, replacement, name):
    changed = getattr(figures(mutant(measures, text, replacement)), name)
    assert changed != pytest.approx(plain()[name], rel=1e-6)


def test_p99_leaves_one_token_in_a_hundred_above():
    gap = [0.001 * i for i in range(1000)]
    got = figures(gap=gap, turns=[0] * 1000, since=[-1] * 1000)
    assert got.p99 == pytest.approx(0.989)
    assert got.max == pytest.approx(0.999)


def test_equal_log_probabilities_give_exact_zeros_and_a_full_sample():
    got = figures(gap=[0.0] * 6)
    assert (got.mean, got.p99, got.max, got.k1, got.k3, got.ess) == (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


def test_one_token_that_outweighs_all_others_is_a_sample_of_one():
    got = figures(gap=[-30.0] * 5 + [10.0])
    assert got.ess == pytest.approx(1 / 6, rel=1e-6)


def test_no_token_has_no_gap():
    assert gap_figures(*(torch.zeros(0, dtype=torch.float64),) * 3).ess == 1.0


def test_tokens_of_idle_batches_are_left_out():
    init_distributed(CPU)
    column = torch.tensor([1.0, 2.0, 3.0])
    names = TokenColumns.__dataclass_fields__
    columns = TokenColumns(**(dict.fromkeys(names, column) | {"trained": torch.tensor([1.0, 0.0, 1.0])}))
    assert columns.gathered().gap.tolist() == [1.0, 3.0]
