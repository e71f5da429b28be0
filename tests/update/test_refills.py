"""Groups without a spread are replaced by those of other problems, boundedly, and reproducibly."""

from __future__ import annotations

from config import parse_config
from data import Problem, ProblemStream, TrainingData
from policy import init_distributed
from run.console import PlainConsole
from run.trajectories import read_step
from run.writers import RunWriter
from tests.support.builders import record
from tests.support.fakes import fake_parts
from tests.support.policies import CPU
from trainer import Trainer


def trainer(tmp_path, spread, refills: int, problems: int = 9, prompts: int = 2):
    """spread: the prompt_index values whose groups get two different rewards; every prompt is its problem's number."""
    init_distributed(CPU)
    config = parse_config({
        "model": {"path": "m"}, "data": {"path": "d", "shuffle": False},
        "rollout": {"trajectories_per_step": 2 * prompts, "samples_per_prompt": 2, "max_refills": refills},
    })  # fmt: skip
    calls = []

    def sample(texts, step, work, sampling, rows):
        lines = {True: ("PPA", "PPAA"), False: ("PPA", "PPA")}  # FakeChat reads id 12 as right, id 13 as wrong
        made = []
        while (number := work.take()) < 2 * len(texts):
            index, i = divmod(number, 2)
            made.append(record(lines[index in spread][i], prompt=index, sample=i, first_id=10))
        calls.append((texts, sorted({r.prompt_index for r in made}), step))
        return made

    data = TrainingData([Problem("x", "12", line) for line in range(problems)], [[n] for n in range(problems)])
    writer = RunWriter(tmp_path, None, PlainConsole(steps=1))
    return Trainer(fake_parts(config, data, sample, steps=3), tmp_path, writer), calls


def test_equal_groups_are_replaced_until_the_step_is_full(tmp_path):
    made, calls = trainer(tmp_path, spread={1, 3}, refills=5)
    step = made._sample_groups(0)
    assert {s.record.prompt_index for s in step.trained} == {1, 3}
    assert [indices for _, indices, _ in calls] == [[0, 1], [2], [3]]  # one group was missing, twice
    assert len(set(step.indices)) == 4  # no problem twice in a step
    assert [text for [text] in calls[-1][0]] == step.indices
    assert len(step.records) == len(step.scored) == 8
    assert step.rounds == 3
    assert step.rollout_stats["steps"] == 9  # summed over the rounds


def test_rounds_are_bounded_and_the_step_trains_on_what_there_is(tmp_path):
    made, calls = trainer(tmp_path, spread={1}, refills=2)
    step = made._sample_groups(0)
    assert len(calls) == step.rounds == 3
    assert {s.record.prompt_index for s in step.trained} == {1}


def test_where_nothing_ever_has_a_spread_the_step_is_skipped_and_written(tmp_path):
    made, calls = trainer(tmp_path, spread=set(), refills=2)
    row = made.train_step(0)
    assert (row["skipped"], row["refills"], row["kept_trajectories"]) == (True, 2, 0)
    assert row["nothing_trained"] == "all rewards of each group are equal"
    assert row["trajectories"] == 12
    assert len(read_step(tmp_path, 1)) == 12
    assert len(calls) == 3


def test_without_refills_equal_groups_stay_in_the_step(tmp_path):
    made, calls = trainer(tmp_path, spread={1}, refills=0)
    step = made._sample_groups(0)
    assert {s.record.prompt_index for s in step.trained} == {0, 1}
    assert len(calls) == 1


def test_refilling_ends_where_the_data_does(tmp_path):
    made, calls = trainer(tmp_path, spread=set(), refills=9, problems=3)
    assert made._sample_groups(0).rounds == len(calls) == 2


def test_refills_are_a_function_of_seed_step_and_round_and_leave_the_order_alone():
    stream, again = ProblemStream(50, seed=5, shuffle=True), ProblemStream(50, seed=5, shuffle=True)
    used = stream.indices(3, 4)
    drawn = stream.refill(3, 1, 6, used)
    assert again.refill(3, 1, 6, used) == drawn  # a resumed run has drawn nothing before
    assert len(set(drawn)) == 6 and not set(drawn) & set(used)
    assert stream.refill(3, 2, 6, used) != drawn != stream.refill(4, 1, 6, used)
    assert ProblemStream(50, seed=6, shuffle=True).refill(3, 1, 6, used) != drawn
    assert stream.indices(4, 4) == again.indices(4, 4)
