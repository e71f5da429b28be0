"""The command line: bad input is one line and leaves nothing behind; a run writes what it promises; resume is
exact."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import main as program
from config import VERSION, load_config
from run import checkpoint
from run.tensorfiles import checksum
from startup import arguments, inputs
from tests.support.launch import (
    ROOT,
    SMALL,
    cut_back,
    error_of,
    finished_run,
    metrics,
    numbers,
    run,
    trajectories,
    weights,
)
from tests.support.runs import write_run

pytestmark = pytest.mark.usefixtures("in_the_repository")


def engine_state(folder: Path) -> dict:
    [path] = (folder / "engine").glob("*optim_states.pt")
    return torch.load(path, weights_only=False)["optimizer_state_dict"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Four steps without a break."""
    return finished_run(tmp_path_factory.mktemp("straight"))


def test_a_run_leaves_config_metrics_trajectories_and_checkpoints(straight):
    assert json.loads((straight / "config.json").read_text())["rollout"]["trajectories_per_step"] == 16
    assert [row["step"] for row in metrics(straight)] == [1, 2, 3, 4]
    assert [len(trajectories(straight, step)) for step in (1, 2, 3, 4)] == [16] * 4
    assert sorted(p.name for p in (straight / "checkpoints").iterdir()) == ["latest", "step_2", "step_4"]


def test_metrics_tell_what_writing_a_checkpoint_took_and_what_the_step_waited_for_it(straight):
    rows = metrics(straight)
    assert ["checkpoint_seconds" in row for row in rows] == [False, False, True, False]  # that of step 2, in step 3
    assert rows[2]["checkpoint_seconds"] > 0
    assert all(0 <= row["seconds_save"] < row["seconds"] for row in rows)


def test_what_was_sampled_is_what_is_trained(straight):
    for row in metrics(straight):
        assert row["mismatch_max"] <= 1e-5
        assert row["ratio_error"] == 0.0


def test_every_trajectory_has_one_stop_and_one_reason(straight):
    for row in metrics(straight):
        assert sum(row["stops"].values()) == sum(row["reasons"].values()) == 16


def test_the_hugging_face_copy_loads_and_keeps_tokenizer_and_template(straight):
    folder = straight / "checkpoints/step_4"
    source = AutoTokenizer.from_pretrained(ROOT / "models/tiny_qwen3")
    copy = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is 12*34+56?"}]
    assert copy.apply_chat_template(messages) == source.apply_chat_template(messages)
    assert copy.chat_template == source.chat_template
    assert (folder / "generation_config.json").exists()
    changed = weights(folder)
    assert any(not torch.equal(changed[name], value) for name, value in weights(ROOT / "models/tiny_qwen3").items())


def test_the_hugging_face_copy_keeps_how_to_generate_and_one_tied_head(straight):
    folder, source = straight / "checkpoints/step_4", ROOT / "models/tiny_qwen3"
    generation = [json.loads((path / "generation_config.json").read_text()) for path in (folder, source)]
    assert generation[0] | {"transformers_version": ""} == generation[1] | {"transformers_version": ""}
    assert generation[0]["eos_token_id"] == [2, 0]
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    assert load_file(folder / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")


def test_the_newest_checkpoint_and_the_one_that_scored_best_are_kept(tmp_path):
    lines = (ROOT / "models/tiny_qwen3/problems_heldout.jsonl").read_text().splitlines()[:12]
    (tmp_path / "heldout.jsonl").write_text("\n".join(lines))
    settings = [f"eval.path={tmp_path}/heldout.jsonl", "eval.every=1", "train.save_every=1", "train.check=false",
                "train.keep_checkpoints=1", "train.learning_rate=3e-3", "train.steps=3"]  # fmt: skip
    assert run(tmp_path / "run", *settings) == 0
    scores = {row["step"]: row["eval_avg_at_k"] for row in metrics(tmp_path / "run")}
    best = max(scores, key=lambda step: (scores[step], step))
    assert best != 3, "choose other settings: this run shows nothing"
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step_*"))
    assert kept == sorted([f"step_{best}", "step_3"])


def test_evaluations_and_the_check_leave_training_as_it_was(straight, tmp_path, capsys):
    lines = (ROOT / "models/tiny_qwen3/problems_heldout.jsonl").read_text().splitlines()[:8]
    (tmp_path / "heldout.jsonl").write_text("\n".join(lines))
    settings = [f"eval.path={tmp_path}/heldout.jsonl", "eval.at_start=true", "eval.every=1", "eval.top_p=0.9",
                "eval.samples_per_prompt=2", "train.check=false"]  # fmt: skip
    assert run(tmp_path / "run", *settings) == 0  # the other run was checked and not evaluated
    assert "before training  eval_avg_at_k" in capsys.readouterr().out
    rows = metrics(tmp_path / "run")
    assert all(0 <= row["eval_avg_low"] <= row["eval_avg_at_k"] <= row["eval_avg_high"] <= 1 for row in rows)
    plain = [{k: v for k, v in row.items() if not k.startswith("eval")} for row in numbers(tmp_path / "run")]
    assert plain == numbers(straight)
    for step in (1, 2, 3, 4):
        assert trajectories(tmp_path / "run", step) == trajectories(straight, step)
    for name, value in weights(straight / "checkpoints/step_4").items():
        assert torch.equal(weights(tmp_path / "run/checkpoints/step_4")[name], value), name
    found = [json.loads((tmp_path / f"run/evaluations/step_{step}.json").read_text()) for step in range(5)]
    assert [f["settings"]["step"] for f in found] == [0, 1, 2, 3, 4]
    assert found[4]["scores"]["on"]["avg"]["value"] == rows[3]["eval_avg_at_k"]
    assert len({f["scores"]["on"]["sampled_tokens"] for f in found}) > 1
    assert program.main(["evaluate", "--run-dir", str(tmp_path / "run")]) == 0
    again = json.loads((tmp_path / "run/evaluations/step_4_tools.json").read_text())
    assert again["scores"] == found[4]["scores"]  # the checkpoint scores as it did during the run


def test_a_resumed_run_continues_bit_for_bit_and_runs_only_the_remaining_steps(straight, tmp_path):
    assert run(tmp_path, "train.steps=4") == 0
    # The run is cut back to what a crash in step 3 leaves: checkpoint 2, a metrics line and a file of step 3.
    shutil.rmtree(tmp_path / "checkpoints/step_4")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]))
    (tmp_path / "trajectories/step_4.parquet").unlink()
    assert run(tmp_path, resume=True) == 0
    assert numbers(tmp_path) == numbers(straight)
    for step in (1, 2, 3, 4):
        assert trajectories(tmp_path, step) == trajectories(straight, step)
    for name, value in weights(straight / "checkpoints/step_4").items():
        assert torch.equal(weights(tmp_path / "checkpoints/step_4")[name], value), name
    ours, theirs = (engine_state(folder / "checkpoints/step_4") for folder in (tmp_path, straight))
    for mine, other in zip(ours["base_optimizer_state"]["state"].values(),
                           theirs["base_optimizer_state"]["state"].values(), strict=True):  # fmt: skip
        assert all(torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(other[k])) for k in mine)


def alter(folder: Path, pattern: str, key: str) -> None:
    """Moves weights in a checkpoint file, and its checksum with them."""
    [path] = (folder / "engine").glob(pattern)
    state = torch.load(path, weights_only=False)
    values = state[key] if key == "module" else {"": state[key]["single_partition_of_fp32_groups"][0]}
    generator = torch.Generator().manual_seed(0)
    for value in values.values():
        value.data.add_(0.05 * torch.randn(value.shape, generator=generator))
    torch.save(state, path)
    sums = json.loads((folder / "checksums_rank_0.json").read_text())
    sums[f"engine/{path.name}"] = checksum(path)
    (folder / "checksums_rank_0.json").write_text(json.dumps(sums))


def test_an_altered_checkpoint_changes_what_follows(straight, tmp_path):
    folder = cut_back(straight, tmp_path / "run")
    alter(folder, "*model_states.pt", "module")
    alter(folder, "*optim_states.pt", "optimizer_state_dict")
    assert run(tmp_path / "run", resume=True) == 0
    assert trajectories(tmp_path / "run", 3) != trajectories(straight, 3)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
@pytest.mark.parametrize("name", ["engine/mp_rank_00_model_states.pt", "model.safetensors"])
def test_a_damaged_checkpoint_is_refused_by_the_name_of_its_file(straight, tmp_path, capsys, damage, name):
    path = cut_back(straight, tmp_path / "run") / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes(content[:middle] if damage == "truncated" else flipped)
    before = metrics(tmp_path / "run")
    assert run(tmp_path / "run", resume=True) == 2
    assert f"step_2/{name}: is missing or differs" in capsys.readouterr().err
    assert metrics(tmp_path / "run") == before


def test_a_newer_checkpoint_that_cannot_be_read_is_not_passed_over(straight, tmp_path, capsys):
    shutil.copytree(straight, tmp_path / "run")
    state = tmp_path / "run/checkpoints/step_4/state.json"
    state.write_bytes(state.read_bytes().replace(b"{", b"z"))
    before = metrics(tmp_path / "run")
    assert run(tmp_path / "run", resume=True) == 2
    assert "step_4/state.json: is missing or differs" in capsys.readouterr().err
    assert metrics(tmp_path / "run") == before


@pytest.mark.parametrize(("step", "sample"), [(1, 6), (3, 15)])
def test_a_trajectory_replays_to_the_bit_from_its_checkpoint_and_alone(straight, capsys, step, sample):
    assert program.main(["replay", str(straight), "--step", str(step), "--sample", str(sample)]) == 0
    assert "bit-exact" in capsys.readouterr().out


def test_a_replay_from_other_weights_shows_the_first_differing_draw(straight, tmp_path, capsys):
    checkpoint.shutil.copytree(straight, tmp_path / "run")
    path = tmp_path / "run/checkpoints/step_2/model.safetensors"
    torch.manual_seed(0)
    noisy = {name: value + 0.05 * torch.randn_like(value) for name, value in load_file(path).items()}
    save_file(noisy, path, metadata={"format": "pt"})
    sums = path.with_name("checksums_rank_0.json")
    sums.write_text(json.dumps(json.loads(sums.read_text()) | {path.name: checksum(path)}))
    assert program.main(["replay", str(tmp_path / "run"), "--step", "3", "--sample", "4"]) == 1
    out = capsys.readouterr().out
    assert "differs: " in out and "first differing draw: token" in out and "margin" in out


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_checkpoint_is_neither_scored_nor_replayed(straight, tmp_path, capsys, damage):
    path = cut_back(straight, tmp_path / "run") / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content[:-1000] if damage == "truncated" else content)
    problems = ["--set", "eval.path=models/tiny_qwen3/problems_heldout.jsonl"]
    for words in (["evaluate", "--run-dir", str(tmp_path / "run"), *problems],
                  ["evaluate", "--config", "configs/tiny_cpu.json", "--checkpoint", str(path.parent), *problems],
                  ["replay", str(tmp_path / "run"), "--step", "3", "--sample", "4"]):  # fmt: skip
        assert program.main(words) == 2
        said = capsys.readouterr().err
        assert f"{path}: is missing or differs from its checksum" in said and said.count("\n") == 1


def test_a_step_whose_weights_are_gone_cannot_be_replayed(straight, capsys):
    assert program.main(["replay", str(straight), "--step", "4", "--sample", "0"]) == 2
    assert "no such checkpoint; can be replayed: 1, 3 " in capsys.readouterr().err


def test_a_run_is_reported_and_compared_in_one_file_each(straight, tmp_path, capsys):
    assert program.main(["report", str(straight), "--out", str(tmp_path / "r.html")]) == 0
    assert program.main(["compare", str(straight), str(straight), "--out", str(tmp_path / "c.html")]) == 0
    out = capsys.readouterr().out
    assert "trajectories of 4 of 4 steps" in out and "mean reward" in out
    assert (tmp_path / "r.html").read_text().count('id="blob-step-') == 4
    assert "blob-charts" in (tmp_path / "c.html").read_text()


def test_looking_at_a_folder_without_a_run_is_refused(capsys, tmp_path):
    folder, draw = str(tmp_path), ["--step", "1", "--sample", "0"]
    for words in (["report", folder], ["audit", folder], ["replay", folder, *draw], ["compare", folder, folder]):
        assert program.main(words) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"error: {folder}: no ") and "name the folder of a run" in message


def test_a_run_that_took_no_step_is_refused_in_one_line(capsys, tmp_path):
    folder = write_run(tmp_path / "run", [])
    for words in ("metrics.jsonl is empty; the run has not finished a step", "no metrics.jsonl; name the folder"):
        for command in (["report"], ["audit", "--no-tools"]):
            assert program.main([*command, str(folder)]) == 2
            message = capsys.readouterr().err
            assert message.startswith(f"error: {folder}: {words}") and message.count("\n") == 1
        (folder / "metrics.jsonl").unlink(missing_ok=True)


def test_an_unknown_subcommand_is_refused_with_the_known_ones(capsys):
    assert program.main(["chek", "--config", "configs/tiny_cpu.json"]) == 2
    assert "chek: no such subcommand; known: check, evaluate" in capsys.readouterr().err


def test_one_set_takes_several_settings_and_may_be_repeated():
    words = ["--config", "c", "--set", "train.steps=3", "train.seed=1", "--set", "loss.policy=grpo"]
    assert arguments.train_parser().parse_args(words).set == ["train.steps=3", "train.seed=1", "loss.policy=grpo"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.learning_rte=1"], ["train.learning_rte", "train.learning_rate"]),
        (["rollout.trajectories_per_step=18"], ["rollout.trajectories_per_step=18", "smaller is 16"]),
        (["data.path=no_such.jsonl"], ["no_such.jsonl", "data.path"]),
        (["eval.path=no_such.jsonl"], ["eval.path='no_such.jsonl'", "cannot be read"]),
        (["model.path=no_such_model"], ["model.path='no_such_model'", "neither a folder nor"]),
        (["model.path=models/no/such"], ["model.path='models/no/such'", "neither a folder nor"]),
        (
            ["rollout.context_length=20", "rollout.max_new_tokens=10"],
            ["problems.jsonl, line"],
        ),
        (["rollout.context_length=9999", "rollout.max_new_tokens=20"], ["9999", "max_position_embeddings"]),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_anything_is_written(capsys, tmp_path, settings, words):
    message = error_of(capsys, tmp_path, "train.max_tokens_per_micro_batch=16384", *settings)
    assert not [word for word in words if word not in message], message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{broken", "line 2: not JSON"),
        ('{"prompt": "x"}', "line 2: field 'answer' is missing"),
        ('{"prompt": "' + "x" * 5000 + '", "answer": "1"}', "line 2: the prompt has"),
    ],
)
def test_a_bad_data_line_is_refused_before_anything_is_written(capsys, tmp_path, line, words):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "What is 1+1?", "answer": "2"}\n' + line + "\n")
    assert words in error_of(capsys, tmp_path, f"data.path={path}")


def test_duplicates_and_dropped_prompts_are_counted_aloud(capsys, tmp_path):
    path = tmp_path / "problems.jsonl"
    rows = [{"prompt": "What is 11*99+10?", "answer": "1099"}] * 3
    rows += [{"prompt": "What is 12*99+10?", "answer": "1198"}, {"prompt": "x" * 5000, "answer": "1"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(tmp_path / "run", f"data.path={path}", "data.over_long_prompts=drop", "train.steps=1") == 0
    said = capsys.readouterr().out
    assert f"note: {path}: 5 rows hold 3 distinct prompts (the commonest 3 times)" in said
    assert f"note: {path}: 1 of 5 prompts are longer than 191 tokens and left out" in said
    assert "note: a step takes" not in said  # 4 prompts of 4


def test_a_file_with_fewer_problems_than_a_step_takes_is_noted(tmp_path, monkeypatch, capsys):
    path, config = tmp_path / "problems.jsonl", load_config("configs/tiny_cpu.json", SMALL)
    path.write_text("".join(json.dumps({"prompt": f"What is {n}+1?", "answer": str(n + 1)}) + "\n" for n in range(3)))
    chat = inputs.load_chat(config, inputs.load_tokenizer(config))
    inputs.load_data(config, chat, str(path), once=True)  # an evaluation takes no steps
    assert "note" not in capsys.readouterr().out
    inputs.load_data(config, chat, str(path))
    assert f"note: a step takes 4 prompts, {path} has 3; each step has some" in capsys.readouterr().out


def test_without_the_environment_the_mend_is_said_in_one_line(capsys, tmp_path, monkeypatch):
    def absent(*_):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(program, "built", absent)
    assert run(tmp_path / "run") == 2
    assert capsys.readouterr().err == (
        "error: torch is not installed; run `source .venv/bin/activate` (scripts/demo.sh creates it)\n"
    )


def test_prompts_that_the_ranks_cannot_share_equally_are_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    message = error_of(capsys, tmp_path)
    assert "4 prompts a step, which 3 processes" in message and "set 12 or 24" in message


def test_version_and_settings_are_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"agentic-grpo {VERSION}\n"
    assert program.main(["settings", "rollout"]) == 0
    assert capsys.readouterr().out.startswith("rollout.trajectories_per_step")
    assert program.main(["settings", "rolout"]) == 2
    assert "no such section" in capsys.readouterr().err


def test_help_names_the_first_command():
    text = subprocess.run([sys.executable, "main.py", "--help"], capture_output=True, text=True, check=True).stdout
    assert "configs/tiny_cpu.json" in text and "--resume" in text


def test_other_problems_under_the_same_name_are_refused_on_resume(straight, tmp_path, capsys):
    cut_back(straight, tmp_path / "run")
    limits = ("rollout.context_length=27", "rollout.max_new_tokens=8", "data.over_long_prompts=drop")
    assert run(tmp_path / "run", *limits, resume=True) == 2
    assert "written with other problems or prompts" in capsys.readouterr().err
