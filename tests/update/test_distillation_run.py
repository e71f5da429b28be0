"""Distillation through the command line: what is refused before data is read, weight 0, resume, privilege, and the
tiny config's own parts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import main as program
from run.trajectories import read_step
from tests.support.launch import ROOT, finished_run, metrics, numbers, run, trajectories, weights
from tests.support.runs import TINY
from tests.support.shell import environment
from update.teacher import Teacher

FIRST = ["train.steps=2", "train.save_every=1", "train.check=false"]
TAUGHT = ["loss.distill_weight=1", f"teacher.path={TINY}", *FIRST]


pytestmark = pytest.mark.usefixtures("in_the_repository")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Two steps of GRPO."""
    return finished_run(tmp_path_factory.mktemp("plain"), *FIRST)


def teacher_folder(tmp_path: Path, **shape: int) -> Path:
    """The tiny model's folder again, with another shape in its config."""
    folder = tmp_path / "teacher"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text()) | shape
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_weight_0_is_grpo_bit_for_bit_whatever_the_teacher_section_says(plain, tmp_path):
    raw = json.loads((plain / "config.json").read_text())  # a resolved one may name what has no effect
    raw["teacher"] |= {"path": str(TINY), "divergence": "jsd", "top_k": 3}
    (tmp_path / "given.json").write_text(json.dumps(raw))
    assert program.main(["--config", str(tmp_path / "given.json"), "--run-dir", str(tmp_path)]) == 0
    assert numbers(tmp_path) == numbers(plain)
    for step in (1, 2):
        assert trajectories(tmp_path, step) == trajectories(plain, step)
    ours = weights(tmp_path / "checkpoints/step_2")
    assert all(torch.equal(ours[name], value) for name, value in weights(plain / "checkpoints/step_2").items())


def test_another_tokenizer_is_refused_with_both_sizes_before_data_is_read(tmp_path, capsys):
    folder = teacher_folder(tmp_path, vocab_size=400)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    (first, one), (second, other) = list(vocabulary.items())[-2:]
    vocabulary[first], vocabulary[second] = other, one
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert run(tmp_path / "run", *TAUGHT[:1], f"teacher.path={folder}", "data.path=not_there.jsonl") == 2
    error = capsys.readouterr().err
    assert "teacher.path=" in error and "vocabulary of 400, the policy one of 339" in error
    assert "share the policy's tokenizer" in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_random_shapes_of_other_vocabularies_are_refused_with_both_sizes(tmp_path, capsys):
    folder = teacher_folder(tmp_path, vocab_size=400)
    settings = [f"teacher.path={folder}", "model.random_weights=true", "data.path=not_there.jsonl"]
    assert run(tmp_path / "run", *TAUGHT[:1], *settings) == 2
    assert "vocabulary of 400, the policy one of 339" in capsys.readouterr().err


@pytest.mark.parametrize("divergence", ["reverse_kl", "sampled"])
def test_a_longer_head_with_the_same_tokenizer_is_compared_over_what_both_have(tmp_path, capsys, divergence):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY)
    model.resize_token_embeddings(352, mean_resizing=False)
    shutil.copytree(TINY, tmp_path / "longer")
    model.save_pretrained(tmp_path / "longer")
    lengths = ["train.steps=1", "train.check=false", f"teacher.divergence={divergence}"]
    assert run(tmp_path / "a", "loss.distill_weight=1", f"teacher.path={tmp_path}/longer", *lengths) == 0
    assert (
        "vocabulary of 352, the policy one of 339; their tokenizers are equal, so the first 339"
        in capsys.readouterr().out
    )
    assert run(tmp_path / "b", "loss.distill_weight=1", f"teacher.path={TINY}", *lengths) == 0
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["teacher.top_k=339"], ["teacher.top_k=339", "of 339", "set less"]),
        (["teacher.path=", "teacher.source=base", "teacher.top_k=339"], ["teacher.top_k=339", "of 339", "set less"]),
        (["rollout.context_length=1024", "teacher.path=", "teacher.source=live", "teacher.privilege=It is {answer}."],
         ["teacher.privilege=", "max_position_embeddings=1024", "shorten it"]),
        (["teacher.path=nowhere"], ["teacher.path='nowhere'", "neither a folder nor a hub name"]),
        (["teacher.path=", "teacher.source=base", "teacher.privilege= {hint}", "data.hint_field=why"],
         ["'why' is missing", "data.hint_field"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(tmp_path, capsys, settings, words):
    assert run(tmp_path, *TAUGHT, *settings) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and not [word for word in words if word not in error], error


@pytest.mark.parametrize(
    "told",
    [
        ["teacher.divergence=jsd"],
        ["teacher.path=", "teacher.source=ema", "teacher.ema_decay=0.5", "teacher.privilege= It is {answer}."],
    ],
    ids=["model", "ema"],
)  # fmt: skip
def test_a_resumed_run_continues_bit_for_bit(tmp_path, told):
    assert run(tmp_path / "straight", *TAUGHT, *told) == 0
    shutil.copytree(tmp_path / "straight", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut/checkpoints/step_2")
    assert run(tmp_path / "cut", *TAUGHT, *told, resume=True) == 0
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "straight")
    assert all(row["teacher_divergence"] > 0 for row in metrics(tmp_path / "cut") if "ema" in str(told))
    ours = weights(tmp_path / "cut/checkpoints/step_2")
    for name, value in weights(tmp_path / "straight/checkpoints/step_2").items():
        assert torch.equal(ours[name], value), name
    files = {file.name for file in (tmp_path / "cut/checkpoints/step_2/engine").iterdir()}
    assert ("teacher_mean.pt" in files) == ("ema" in str(told))  # resume needs nothing else of a teacher


def test_a_resumed_run_may_take_any_teacher_but_a_mean_that_its_checkpoint_lacks(plain, tmp_path, capsys):
    shutil.copytree(plain, tmp_path / "run")
    ema = ["teacher.source=ema", "teacher.privilege= It is {answer}.", "loss.distill_weight=0.5"]
    assert run(tmp_path / "run", *FIRST, *ema, "train.steps=3", resume=True) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "teacher.source='ema'" in error and "checkpoints/step_2" in error
    base = ["teacher.source=base", *ema[1:]]
    assert run(tmp_path / "run", *FIRST, *base, "train.steps=3", resume=True) == 0
    assert "teacher.source changed from 'model' to 'base'" in capsys.readouterr().out
    assert metrics(tmp_path / "run")[-1]["teacher_divergence"] > 0.0


def test_each_trajectorys_teacher_is_told_the_answer_of_its_own_problem(tmp_path, monkeypatch):
    seen, lessons = [], Teacher.lessons
    tokenizer = AutoTokenizer.from_pretrained(TINY)

    def watched(self, minibatches, prompts):
        for batch in (batch for batches in minibatches for batch in batches):
            for line, told in zip(batch.input_ids[0].split(batch.lengths), batch.prompts, strict=True):
                seen.append((tokenizer.decode(line), tokenizer.decode(prompts[told])))
        return lessons(self, minibatches, prompts)

    monkeypatch.setattr(Teacher, "lessons", watched)
    settings = ["teacher.path=", "teacher.source=base", "teacher.privilege= The answer is {answer}."]
    assert run(tmp_path, *TAUGHT, *settings) == 0
    answers = {p["prompt"]: str(p["answer"]) for p in map(json.loads, (TINY / "problems.jsonl").open())}
    for line, told in seen:
        [problem] = [prompt for prompt in answers if prompt in line]
        assert f"{problem} The answer is {answers[problem]}." in told
    assert len(seen) == 2 * 16


def test_a_run_has_seconds_of_each_phase_multi_turn_tool_trajectories_and_an_audit(tmp_path, capsys):
    settings = ["teacher.path=", "teacher.source=base", "teacher.privilege= The answer is {answer}."]
    assert run(tmp_path, *TAUGHT, *settings, "rollout.samples_per_prompt=1") == 0
    row = metrics(tmp_path)[-1]
    assert {"seconds_rollout", "seconds_teacher", "seconds_update"} <= set(row)
    assert row["seconds"] >= row["seconds_rollout"] + row["seconds_teacher"] + row["seconds_update"]
    assert max(len(r["turns"]) for r in read_step(tmp_path, 1)) > 1
    assert row["ratio_error"] == 0.0 and row["mismatch_max"] <= 1e-5
    assert row["tokens"] == row["sampled_tokens"]
    # One sample a prompt: every advantage is 0, and the teacher trains every row all the same.
    assert program.main(["audit", str(tmp_path), "--no-tools"]) == 0
    said = capsys.readouterr().out
    assert "2 losses not recomputed: loss.distill_weight is above 0" in said and "; 0 differ" in said


@pytest.mark.parametrize("divergence", ["jsd", "sampled"])
def test_the_check_asks_the_teacher_once(capsys, divergence):
    sets = [
        *TAUGHT[:2],
        "teacher.path=",
        "teacher.source=base",
        "teacher.privilege= {answer}",
        f"teacher.divergence={divergence}",
    ]
    words = [word for setting in sets for word in ("--set", setting)]
    assert program.main(["check", "--config", "configs/tiny_cpu.json", *words]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if " teacher " in line]
    found = re.search(r"ok +teacher +KL\(policy \|\| teacher\) about (\S+) nats a token; a pass took \S+ s", line)
    assert 0.0 < abs(float(found[1])) < 5.0


def test_the_audit_says_why_no_loss_can_be_recomputed():
    from audit.losses import unstored

    config = {"loss": {"kl_coef": 0.0, "importance": "off", "distill_weight": 0.5}}
    assert "loss.distill_weight is above 0" in unstored(config)
    assert unstored({"loss": config["loss"] | {"distill_weight": 0.0}}) is None


@pytest.mark.slow
def test_a_student_that_cannot_use_the_tool_learns_it_from_the_trained_teacher(tmp_path):
    """Minutes: the script makes teacher and student where they are absent."""
    done = subprocess.run(
        ["bash", "scripts/tiny_opsd_cpu.sh", "--run-dir", str(tmp_path / "run")], cwd=ROOT, capture_output=True,
        text=True, env=environment(NUM_GPUS="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "before training  eval_avg_at_k 0 " in done.stdout
    assert metrics(tmp_path / "run")[-1]["eval_avg_at_k"] >= 0.9
