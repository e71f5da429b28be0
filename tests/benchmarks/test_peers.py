"""Drivers of other engines: their arguments are checked, and they end in one line where the engine is missing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from itertools import accumulate
from types import SimpleNamespace

import pytest

from benchmarks.peers import trl_step, vllm_rollout
from benchmarks.peers.shared import needed, prompts_and_results, shape_folder
from benchmarks.workload import WorkloadError, length_of, load_workload
from tests.support.launch import ROOT


def end_of(*words: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    return done.returncode, (done.stderr or done.stdout).splitlines()[-1]


@pytest.mark.parametrize("driver", ["vllm_rollout", "trl_step"])
def test_help_needs_no_engine(driver):
    assert end_of(f"benchmarks/peers/{driver}.py", "--help")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--repeat", "0"], "--repeat is 0: use at least 1"),
        (["--shape", "none"], "error: --shape is 'none': name a folder with config.json, or one of"),
        (["--workload", "none"], "error: workload file is 'none': name one of"),
        (["--context", "8190"], "the context holds 8190 tokens"),
    ],
)
def test_bad_arguments_end_in_one_line(words, said):
    status, line = end_of("benchmarks/peers/vllm_rollout.py", *words)
    assert status in (1, 2) and said in line


def test_a_missing_engine_ends_in_one_line():
    with pytest.raises(SystemExit, match=r"package no_such_engine is not installed: install requirements/peers\.txt"):
        needed("no_such_engine")


def test_groups_share_their_prompt_and_every_tool_result_has_its_length():
    rows, samples = load_workload("retool_64")
    found = prompts_and_results(rows, 1000, seed=1)
    assert found == prompts_and_results(rows, 1000, seed=1) != prompts_and_results(rows, 1000, seed=2)
    for row, (prompt, results) in zip(rows, found, strict=True):
        assert prompt == found[row["prompt"] * samples][0] and len(prompt) == row["prompt_tokens"]
        assert [len(ids) for ids in results] == [turn.get("tool_tokens", 0) for turn in row["turns"]]
        assert all(100 <= token < 600 for token in prompt)


def test_trl_takes_one_turn_of_equal_lengths():
    assert trl_step.lengths_of(load_workload("one_turn_64")[0]) == (256, 1024)
    for name in ("retool_64", "retool_256"):
        with pytest.raises(WorkloadError, match="TRL takes one turn and equal lengths"):
            trl_step.lengths_of(load_workload(name)[0])


def test_the_workloads_of_the_comparisons():
    rows, samples = load_workload("prompts_64")
    assert (len(rows), samples, {length_of(row) for row in rows}) == (64, 1, {768 + 512})
    rows, samples = load_workload("one_turn_64")
    assert (len(rows), samples, {length_of(row) for row in rows}) == (64, 8, {256 + 1024})


def test_every_driver_names_a_shape_that_is_shipped():
    assert (shape_folder(vllm_rollout.parse([]).shape) / "config.json").is_file()
    assert (shape_folder(trl_step.parse(["--generation", "vllm", "--tokenizer", "x"]).shape) / "config.json").is_file()


class FakeEngine:
    """Answers every turn with the number of tokens asked for; keeps the length of every sequence it was given."""

    def __init__(self):
        self.lengths: dict[str, list[int]] = {}

    async def generate(self, prompt, sampling, name):
        trajectory, _, _ = name.rpartition("-")
        self.lengths.setdefault(trajectory, []).append(len(prompt["prompt_token_ids"]))
        count = sampling.max_tokens
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * count, logprobs=[-1.0] * count)])


def test_a_turn_is_submitted_with_all_that_came_before_it(monkeypatch):
    kinds = SimpleNamespace(FINAL_ONLY=2)
    fake = SimpleNamespace(SamplingParams=lambda **words: SimpleNamespace(**words), RequestOutputKind=kinds)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", fake)
    rows, _ = load_workload("retool_64")
    engine = FakeEngine()
    driver = vllm_rollout.Driver(engine, vllm_rollout.parse(["--tools", "instant"]))
    asyncio.run(driver.sweep("r0", rows, prompts_and_results(rows, 1000, seed=1)))
    assert driver.tokens == 85_259
    for index, row in enumerate(rows):
        ends = [turn["new_tokens"] + turn.get("tool_tokens", 0) for turn in row["turns"]]
        assert engine.lengths[f"r0-{index}"] == list(accumulate(ends[:-1], initial=row["prompt_tokens"]))
