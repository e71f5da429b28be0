"""Entropies of an update find the trajectories they belong to, over updates, ranks and micro-batches."""

from __future__ import annotations

import pytest
import torch

from data import collate
from run.trajectories import read_table
from tests.support.builders import record, scored
from tests.support.launch import ROOT, metrics, run
from update.entropies import by_line


def items(*spans: str, prompt: int = 0):
    records = [record(s, prompt=prompt, sample=i, first_id=10 + 50 * i + 500 * prompt) for i, s in enumerate(spans)]
    return scored(records, [1.0 if i % 2 else -1.0 for i in range(len(records))])


def test_each_row_gets_its_own_over_updates_ranks_and_micro_batches():
    first, second = items("PAAOA", "PPA", "PAA"), items("PAAAA", "PA", prompt=1)
    updates = [collate(part, [0.1] * len(part), 5, 2, leave_out_equal=True) for part in (first, second)]
    # Each token's entropy is made its id, so that a wrong place shows.
    entropies = [
        torch.cat([b.targets.double() for parts in update for b in parts if b.weights.any()]) for update in updates
    ]
    found = by_line(updates, entropies)
    assert len(found) == 5
    for item in (*first, *second):
        drawn = [i for i, sampled in zip(item.record.token_ids, item.record.sampled, strict=True) if sampled]
        assert found[item.record.token_ids[:-1]] == drawn


def test_the_batch_of_an_idle_rank_has_none():
    [only] = items("PAA")
    update = collate([only], [0.1], 50, 2, leave_out_equal=True)
    assert by_line([update], [torch.tensor([1.0, 2.0])]) == {only.record.token_ids[:-1]: [1.0, 2.0]}


def test_a_run_stores_them_with_what_it_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert run(tmp_path, "train.steps=2", "train.check=false", "train.max_tokens_per_micro_batch=600") == 0
    for row in metrics(tmp_path):
        stored = read_table(tmp_path, row["step"]).to_pylist()
        for one in stored:
            assert len(one["entropies"]) == (sum(one["sampled"]) if one["advantage"] else 0)
        values = [value for one in stored for value in one["entropies"]]
        assert sum(values) / len(values) == pytest.approx(row["entropy"], rel=1e-6)
