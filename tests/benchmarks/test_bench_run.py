"""The benchmark of whole steps: two ranks follow the script, save, go on, and train as one rank does."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.workload import length_of, load_workload, scripted_ids, scripts_of
from run.trajectories import read_step
from tests.support.launch import ROOT, metrics
from tests.support.shell import environment

SHRINK = 45
SETTINGS = ("model.random_weights=false", "train.schedule=constant", "train.save_every=1", "train.steps=2")


def bench(run_dir: Path, ranks: int, *words: str) -> tuple[list[dict], dict]:
    """The lines of the steps, and the line of the whole."""
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    given = ["--run-dir", str(run_dir), "--workload", "retool_64", "--shrink", str(SHRINK), *sets, *words]
    done = subprocess.run(
        ["bash", "scripts/tiny_cpu.sh", *given], cwd=ROOT, capture_output=True, text=True,
        env=environment(PROGRAM="benchmarks/bench_run.py", NUM_GPUS=str(ranks), OMP_NUM_THREADS="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    [whole] = [line for line in lines if "benchmark" in line]  # of one rank alone
    return [line for line in lines if "step" in line], whole


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "two"
    return folder, *bench(folder, 2)


def test_shrunk_trajectories_keep_their_turns_and_at_least_a_token_of_each():
    whole, samples = load_workload("retool_64", 1)
    small, same = load_workload("retool_64", 1, SHRINK)
    assert samples == same == 8
    for before, after in zip(whole, small, strict=True):
        assert [list(turn) for turn in before["turns"]] == [list(turn) for turn in after["turns"]]
        assert all(turn["new_tokens"] >= 1 and turn.get("tool_tokens", 1) >= 1 for turn in after["turns"])
        assert 1 < length_of(after) <= 192
    assert max(map(length_of, small)) == pytest.approx(max(map(length_of, whole)) / SHRINK, rel=0.1)


def test_two_ranks_sample_the_scripted_trajectories(two):
    scripts = scripts_of(load_workload("retool_64", 1, SHRINK)[0])
    for step in (1, 2):
        rows = read_step(two[0], step)
        assert [(row["prompt_index"], row["sample_index"]) for row in rows] == list(scripts)
        for row in rows:
            script = scripts[row["prompt_index"], row["sample_index"]]
            lengths = [turn["new_tokens"] for turn in script["turns"]]
            assert [turn["end"] - turn["start"] for turn in row["turns"]] == lengths
            assert (row["turns"][0]["start"], len(row["token_ids"])) == (script["prompt_tokens"], length_of(script))
            for place, (turn, after) in enumerate(pairwise(row["turns"])):
                ids = scripted_ids(after["start"] - turn["end"], row["prompt_index"], row["sample_index"], place)
                assert row["token_ids"][turn["end"] : after["start"]] == ids
            assert row["stop"] == "answered" and row["policy_step"] == step - 1


def test_half_of_each_group_is_right_so_that_all_is_trained(two):
    for row in metrics(two[0]):
        assert (row["correct"], row["equal_groups"], row["tokens"]) == (0.5, 0.0, row["sampled_tokens"])
        assert row["tool_calls"] == sum(len(s["turns"]) - 1 for s in load_workload("retool_64", 1)[0])


def test_the_lines_tell_phases_ranks_balance_and_saves(two):
    _, lines, whole = two
    assert whole["steps"] == lines and (whole["ranks"], whole["continued_after"]) == (2, None)
    for line, row in zip(lines, metrics(two[0]), strict=True):
        assert (line["loss"], line["grad_norm"]) == (row["loss"], row["grad_norm"])
        for phase in ("rollout", "update", "save", "write"):
            assert line[f"seconds_{phase}"] <= line[f"slowest_{phase}"] + 1e-4
        ranks = line["rollout_per_rank"]
        best = max(line["longest_seconds"], sum(ranks) / 2)
        assert line["balance"] == pytest.approx(max(ranks) / best, abs=0.02) and line["balance"] >= 0.999
        assert sum(line["tokens_per_rank"]) == row["sampled_tokens"]
        assert all(0.1 < gigabytes < 10 for gigabytes in line["resident_gb"]) and len(line["resident_gb"]) == 2
    assert [[len(figures) for figures in save.values()] for save in whole["saves"]] == [[2] * 6] * 2  # by rank
    for save in whole["saves"]:
        assert max(save["seconds_save"] + save["seconds_save_pretrained"]) <= max(save["seconds"]) + 1e-3
        assert 0 == save["seconds_save_pretrained"][1] < save["seconds_save_pretrained"][0]  # rank 0 alone
    assert whole["checkpoint_gb"] > 0


def test_one_rank_goes_on_from_the_checkpoint_and_trains_the_same_step_alike(two, tmp_path):
    """Step 2 from the weights after step 1, on what two ranks had sampled; no gradient depends on Adam's moments."""
    shutil.copytree(two[0], tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/step_2")
    [line], whole = bench(tmp_path / "again", 1, "--resume", "--no-save", "--like", str(two[0]))
    assert (line["step"], whole["continued_after"]) == (2, 1)
    assert line["like"] == {name: two[1][1][name] for name in ("loss", "grad_norm", "tokens")}
    for name in ("loss", "grad_norm", "tokens"):
        assert line[name] == pytest.approx(line["like"][name], rel=1e-5)
    assert whole["saves"] == [] and not (tmp_path / "again/checkpoints/step_2").exists()
