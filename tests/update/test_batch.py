"""Batches predict exactly the sampled tokens; no split changes what is trained; figures find their trajectories."""

from __future__ import annotations

import pytest
import torch

from run.trajectories import read_table
from tests.support.builders import record, scored
from tests.support.launch import ROOT, metrics, run
from update.batch import ResponseTokenBatch, by_trajectory, collate
from update.minibatch import token_weights


def items(*spans: str, prompt: int = 0):
    records = [record(s, prompt=prompt, sample=i, first_id=10 + 50 * i + 500 * prompt) for i, s in enumerate(spans)]
    return scored(records, [1.0 if i % 2 else -1.0 for i in range(len(records))])


def test_each_trajectory_gets_its_own_entropies_over_updates_ranks_and_micro_batches():
    first, second = items("PAAOA", "PPA", "PAA"), items("PAAAA", "PA", prompt=1)
    updates = [collate(part, [0.1] * len(part), 5, 2, leave_out_equal=True) for part in (first, second)]
    # Each token's entropy is made its id, so that a wrong place shows.
    entropies = [
        torch.cat([b.targets.double() for parts in update for b in parts if b.weights.any()]) for update in updates
    ]
    found = by_trajectory(updates, entropies)
    assert len(found) == 5
    for item in (*first, *second):
        drawn = [i for i, sampled in zip(item.record.token_ids, item.record.sampled, strict=True) if sampled]
        assert found[item.record.prompt_index, item.record.sample_index] == drawn


def test_the_batch_of_an_idle_rank_has_no_entropies():
    [only] = items("PAA")
    update = collate([only], [0.1], 50, 2, leave_out_equal=True)
    assert by_trajectory([update], [torch.tensor([1.0, 2.0])]) == {(0, 0): [1.0, 2.0]}


def test_equal_sequences_keep_entropies_of_their_own():
    twins = scored([record("PAA", sample=0), record("PAA", sample=1)], [1.0, -1.0])
    update = collate(twins, [0.1, 0.1], 50, 1, leave_out_equal=True)
    found = by_trajectory([update], [torch.tensor([1.0, 2.0, 3.0, 4.0])])
    assert found == {(0, 0): [1.0, 2.0], (0, 1): [3.0, 4.0]}


def test_a_run_stores_entropies_with_what_it_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert run(tmp_path, "train.steps=2", "train.check=false", "train.max_tokens_per_micro_batch=600") == 0
    for row in metrics(tmp_path):
        stored = read_table(tmp_path, row["step"]).to_pylist()
        for one in stored:
            assert len(one["entropies"]) == (sum(one["sampled"]) if one["advantage"] else 0)
        values = [value for one in stored for value in one["entropies"]]
        assert sum(values) / len(values) == pytest.approx(row["entropy"], rel=1e-6)


def test_a_batch_predicts_exactly_the_sampled_tokens():
    first, second = record("PPPAAOOA"), record("PAA", first_id=50)
    batch = ResponseTokenBatch.from_rollout([first, second], [0.5, -1.0], [0.1, 0.2])
    assert batch.input_ids.tolist() == [[*range(10, 17), 50, 51]]
    assert batch.position_ids.tolist() == [[*range(7), 0, 1]]
    assert batch.lengths == (7, 2)
    assert batch.targets.tolist() == [13, 14, 17, 51, 52]
    assert batch.predictors.tolist() == [2, 3, 6, 7, 8]
    assert (batch.input_ids[0][batch.predictors] + 1 == batch.targets).all()
    torch.testing.assert_close(batch.behaviour_logprobs, torch.tensor([-0.3, -0.4, -0.7, -0.1, -0.2]))
    torch.testing.assert_close(batch.advantages, torch.tensor([0.5, 0.5, 0.5, -1.0, -1.0]))
    torch.testing.assert_close(batch.weights, torch.tensor([0.1, 0.1, 0.1, 0.2, 0.2]))


def test_the_final_end_token_is_trained_even_if_it_is_the_pad_token():
    ended = record("PPA", first_id=7)
    batch = ResponseTokenBatch.from_rollout([ended], [1.0], [1.0])
    assert batch.targets.tolist() == [9]  # whatever id 9 means: masks come from the record


def step_of(lengths: list[int], advantages: list[float]):
    records = [record("P" + "A" * n, prompt=i // 2, sample=i % 2, first_id=100 * i) for i, n in enumerate(lengths)]
    return scored(records, advantages)


LENGTHS, ADVANTAGES = [1, 8, 3, 5, 2, 2, 7, 4], [1.0, -1.0, 0.0, 0.0, 0.5, -0.5, 1.0, -1.0]


def flat(ranks) -> dict[int, tuple[float, float]]:
    """target id -> (advantage, weight) over all ranks and micro-batches that weigh anything."""
    tokens = {}
    for batch in (b for batches in ranks for b in batches):
        for target, advantage, weight in zip(
            batch.targets.tolist(), batch.advantages.tolist(), batch.weights.tolist(), strict=True
        ):
            if weight:
                assert target not in tokens
                tokens[target] = (advantage, weight)
    return tokens


def deal(step, policy: str, max_tokens: int, world: int, leave_out_equal: bool = True):
    return collate(step, token_weights(step, policy, 8), max_tokens, world, leave_out_equal)


@pytest.mark.parametrize("policy", ["dapo", "grpo", "dr_grpo"])
def test_every_split_trains_the_same_tokens_with_the_same_weights(policy):
    step = step_of(LENGTHS, ADVANTAGES)
    whole = flat(deal(step, policy, 1000, 1))
    for max_tokens in (8, 9, 16):
        for world in (1, 2, 3, 5):
            ranks = deal(step, policy, max_tokens, world)
            assert flat(ranks) == whole
            assert len({len(batches) for batches in ranks}) == 1
            assert all(sum(b.lengths) <= max_tokens for batches in ranks for b in batches)


def test_dapo_weighs_every_token_of_the_step_alike():
    step = step_of(LENGTHS, ADVANTAGES)
    weights = {w for _, w in flat(deal(step, "dapo", 1000, 1)).values()}
    assert weights == {torch.tensor(1 / sum(LENGTHS)).item()}  # rows of advantage 0 count in the denominator


def test_grpo_weighs_every_trajectory_alike():
    step = step_of(LENGTHS, ADVANTAGES)
    sums = {}
    for target, (_, weight) in flat(deal(step, "grpo", 1000, 1)).items():
        sums[target // 100] = sums.get(target // 100, 0.0) + weight
    assert sums.keys() == {i for i, a in enumerate(ADVANTAGES) if a}
    assert all(abs(total - 1 / len(LENGTHS)) < 1e-6 for total in sums.values())


def test_a_rank_with_nothing_to_train_runs_batches_of_weight_zero():
    ranks = deal(step_of([3, 3], [1.0, -1.0]), "dapo", 1000, 4)
    assert [float(batches[0].weights.sum()) > 0 for batches in ranks] == [True, True, False, False]


def test_ranks_carry_equal_loads():
    step = step_of([50] * 4 + [10] * 20, [1.0, -1.0] * 12)
    loads = [sum(sum(b.lengths) for b in batches) for batches in deal(step, "dapo", 60, 2)]
    assert loads[0] == loads[1]
