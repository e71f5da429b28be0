"""Every line passes on the tiny run, fails or notes where its subject is broken, and leaves the run as it was."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import main as program
from config import load_config
from data import Problem, TrainingData
from rollout.records import SamplingConfig, StopReason, Work
from startup.building import device_of
from startup.check import CheckError, Finding, _odd_references, check, masked, require_pass
from tests.support.engines import FakeTool, Result

ROOT = Path(__file__).parents[2]
SAMPLING = SamplingConfig(
    max_new_tokens=40, temperature=1.0, n_samples_per_prompt=2, max_turns=3, context_length=192, seed=0
)
NAMES = [
    "prompt", "lengths", "held out", "stop ids", "gold", "tool", "template", "rollout", "ratio", "memory", "time",
    "mask",
]  # fmt: skip


@pytest.fixture(scope="module")
def parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with program.built(load_config("configs/tiny_cpu.json")) as made:
            yield made


def lines_of(parts, **changes) -> dict[str, Finding]:
    return {line.name: line for line in check(dataclasses.replace(parts, **changes))}


def sampled_with(parts, change):
    """Parts whose rollout returns altered records."""
    return lines_of(parts, sample=lambda *arguments: [change(record) for record in parts.sample(*arguments)])


@pytest.fixture(scope="module")
def healthy(parts):
    return lines_of(parts)


def test_every_question_has_its_line_and_none_fails(healthy):
    assert list(healthy) == NAMES
    assert {name for name, line in healthy.items() if line.state != "ok"} == {"prompt"}
    require_pass(list(healthy.values()))


def test_what_the_lines_say(healthy):
    assert "2048 prompts of 26 to 27 tokens" in healthy["lengths"].text
    assert "off 1 by 0; |sampling - training log-prob| mean 0, largest 0" in healthy["ratio"].text
    assert "<|im_end|> 2" in healthy["stop ids"].text
    assert "the first 100 references" in healthy["gold"].text
    assert "gave ok '42'" in healthy["tool"].text
    assert "4 trajectories" in healthy["rollout"].text
    assert "⟦" in healthy["mask"].text and healthy["mask"].text.startswith("<|im_start|>system")


def test_the_mask_shows_sampled_text_alone_between_brackets(parts):
    prompts = parts.data.prompts[:1]
    [record, _] = parts.sample(prompts, 0, Work(), SAMPLING, ())
    shown = masked(record, parts.tokenizer.decode)
    inside = "".join(piece.partition("⟧")[0] for piece in shown.split("⟦")[1:])
    sampled = [t for t, drawn in zip(record.token_ids, record.sampled, strict=True) if drawn]
    assert inside == parts.tokenizer.decode(sampled)


def test_the_check_leaves_random_state_weights_and_data_alone(parts):
    before = {name: value.clone() for name, value in parts.policy.model.state_dict().items()}
    state = torch.get_rng_state()
    check(parts)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in parts.policy.model.state_dict().items())
    assert all(parameter.grad is None for parameter in parts.policy.model.parameters())


def test_a_prompt_that_asks_for_a_box_is_no_note(parts):
    prompt = parts.tokenizer.encode("Use \\boxed{}.")
    data = TrainingData(parts.data.problems, [prompt, *parts.data.prompts[1:]])
    assert lines_of(parts, data=data)["prompt"].state == "ok"


def test_prompts_that_leave_less_than_one_turn_are_noted(parts):
    data = TrainingData(parts.data.problems, [*parts.data.prompts, [5] * 150])
    line = lines_of(parts, data=data)["lengths"]
    assert line.state == "note" and "1 leave less than one turn" in line.text


def test_evaluation_prompts_that_are_trained_on_are_noted(parts):
    seen = TrainingData([Problem("new", "1", 1), parts.data.problems[5]], parts.data.prompts[:2])
    line = lines_of(parts, eval_data=seen)["held out"]
    assert line.state == "note" and "1 of 2 evaluation prompts" in line.text
    fresh = TrainingData([Problem("new", "1", 1)], parts.data.prompts[:1])
    assert lines_of(parts, eval_data=fresh)["held out"].state == "ok"


@pytest.mark.parametrize(
    ("section", "settings", "name", "words"),
    [
        ("eval", {"every": 5}, "held out", "eval.path is empty"),
        ("eval", {"at_start": True}, "held out", "eval.path is empty"),
        ("teacher", {"path": "some/model"}, "teacher", "loss.distill_weight is 0"),
    ],
)
def test_settings_that_do_nothing_are_noted(parts, section, settings, name, words):
    changed = dataclasses.replace(getattr(parts.config, section), **settings)
    line = lines_of(parts, config=dataclasses.replace(parts.config, **{section: changed}))[name]
    assert line.state == "note" and words in line.text


def test_the_shown_end_of_a_prompt_begins_with_a_whole_token(healthy):
    assert "ending in '<|im_start|>user" in healthy["prompt"].text


def test_a_reference_that_is_not_graded_right_fails_with_its_line(parts):
    data = TrainingData([Problem("x", "1", 1), Problem("y", "}{", 7)], parts.data.prompts[:2])
    line = lines_of(parts, data=data)["gold"]
    assert line.state == "FAIL" and "line 7" in line.text


def test_references_that_hardly_any_response_matches_are_noted_for_both_files(parts):
    odd = TrainingData([Problem("x", "1", 1), Problem("y", "3+4=7\n#### 7", 2)], parts.data.prompts[:2])
    wide = TrainingData([Problem("z", "\uff17", 5)], parts.data.prompts[:1])
    line = lines_of(parts, data=odd, eval_data=wide)["gold"]
    assert line.state == "note"
    assert "data.path: hardly any response can match 1 reference; the first: line 2, '3+4=7" in line.text
    assert "eval.path: hardly any response can match 1 reference; the first: line 5, '\uff17'" in line.text


@pytest.mark.parametrize(
    ("name", "answers", "words"),
    [
        ("aime_2024.jsonl", [*range(29)], ["30 answers of 0-999", "this file has 29"]),
        ("AIME25.jsonl", [*range(28), "073", 1000], ["30 answers of 0-999", "line 30 has '1000'"]),
        ("my-aime.jsonl", [*range(29), -1], ["line 30 has '-1'"]),
        ("aime.jsonl", [*range(970, 999), "$073$"], []),
        ("aimed.jsonl", [1000], []),
    ],
)
def test_a_file_named_aime_has_thirty_answers_of_three_digits(name, answers, words):
    found = "; ".join(_odd_references("eval.path", name, [Problem("x", str(a), i + 1) for i, a in enumerate(answers)]))
    assert all(word in found for word in words) and bool(found) == bool(words)


@pytest.mark.parametrize("result", [Result("ok", "41"), Result("infra", ""), Result("timeout", "42")])
def test_a_tool_that_does_not_compute_fails(parts, result):
    line = lines_of(parts, tool=FakeTool(lambda code: result))["tool"]
    assert line.state == "FAIL" and "tool.enabled=false" in line.text


def test_log_probs_of_another_model_fail(parts):
    def shift(record):
        moved = tuple(p - 0.01 if drawn else 0.0 for p, drawn in zip(record.logprobs, record.sampled, strict=True))
        return dataclasses.replace(record, logprobs=moved)

    line = sampled_with(parts, shift)["ratio"]
    assert line.state == "FAIL" and "what is sampled is not what is trained" in line.text


def test_a_mismatch_within_the_models_own_floor_passes_and_shows_both(parts, monkeypatch):
    def shift(record):
        moved = tuple(p - 0.01 if drawn else 0.0 for p, drawn in zip(record.logprobs, record.sampled, strict=True))
        return dataclasses.replace(record, logprobs=moved)

    monkeypatch.setattr("startup.check._floor", lambda *_: 0.006)
    found = sampled_with(parts, shift)["ratio"]
    assert found.state == "ok" and "mean 0.01," in found.text and "other attention: mean 0.006" in found.text
    monkeypatch.setattr("startup.check._floor", lambda *_: 0.004)
    assert sampled_with(parts, shift)["ratio"].state == "FAIL"


@contextmanager
def wrong_rope_base(model):
    frequencies = model.base_model.rotary_emb.inv_freq
    right = frequencies.clone()
    frequencies.mul_(1.1)
    yield
    frequencies.copy_(right)


@contextmanager
def dropped_scale(model):
    layers = [layer.self_attn for layer in model.base_model.layers]
    right = [layer.scaling for layer in layers]
    for layer in layers:
        layer.scaling = 1.0
    yield
    for layer, scaling in zip(layers, right, strict=True):
        layer.scaling = scaling


@contextmanager
def wrong_positions(model):
    forward = model.base_model.forward
    model.base_model.forward = lambda **words: forward(**words | {"position_ids": words["position_ids"] * 2})
    yield
    del model.base_model.forward


@pytest.mark.parametrize("fault", [wrong_rope_base, dropped_scale, wrong_positions])
def test_sampling_with_a_planted_fault_fails(parts, fault):
    def faulty(*words):
        with fault(parts.policy.model):
            return parts.sample(*words)

    found = lines_of(parts, sample=faulty)["ratio"]
    assert found.state == "FAIL" and "what is sampled is not what is trained" in found.text


def test_a_forward_that_does_not_repeat_itself_fails(parts):
    class Noisy:
        device, model = parts.policy.device, parts.policy.model
        calls = 0

        def eval(self):
            parts.policy.eval()

        def token_logprobs(self, batch):
            self.calls += 1
            out = parts.policy.token_logprobs(batch)
            return dataclasses.replace(out, logprobs=out.logprobs + (0.01 if self.calls == 2 else 0.0))

    line = lines_of(parts, policy=Noisy())["ratio"]
    assert line.state == "FAIL" and "does not repeat itself" in line.text


def test_a_line_of_other_ids_than_prompt_turns_and_suffixes_fails(parts):
    def alter(record):
        return dataclasses.replace(record, token_ids=(record.token_ids[0] + 5, *record.token_ids[1:]))

    assert sampled_with(parts, alter)["template"].state == "FAIL"


def test_a_sandbox_failure_in_the_tiny_rollout_fails(parts):
    line = sampled_with(parts, lambda record: dataclasses.replace(record, stop=StopReason.TOOL_INFRA))["rollout"]
    assert line.state == "FAIL"


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_fails(parts):
    class Longer:
        def __getattr__(self, name):
            return getattr(parts.tokenizer, name)

        def __len__(self):
            return 10_000

    lines = lines_of(parts, tokenizer=Longer())
    assert lines["stop ids"].state == "FAIL" and "model.tokenizer_path" in lines["stop ids"].text
    assert "rollout" not in lines  # an id past the embedding would crash


def test_an_end_token_that_the_chat_does_not_know_is_noted(parts, monkeypatch):
    monkeypatch.setattr(parts.policy.model.generation_config, "eos_token_id", [2, 77])
    line = lines_of(parts)["stop ids"]
    assert line.state == "note" and "[77]" in line.text


def test_failures_are_named_together():
    lines = [Finding("gold", "FAIL", "no"), Finding("tool", "ok", "yes"), Finding("ratio", "FAIL", "off")]
    with pytest.raises(CheckError, match=r"^check failed: gold: no; ratio: off"):
        require_pass(lines)


def test_the_command_prints_the_lines_and_its_status(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert program.main(["check", "--config", "configs/tiny_cpu.json"]) == 0
    assert "ok    ratio" in capsys.readouterr().out
    monkeypatch.setattr("startup.toolbox.TOOL_OUTPUT", "43")
    assert program.main(["check", "--config", "configs/tiny_cpu.json"]) == 1
    assert "FAIL  tool" in capsys.readouterr().out


def test_a_config_meant_for_a_gpu_is_noted_where_there_is_none(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tiny, meant = (load_config(ROOT / f"configs/{name}.json") for name in ("tiny_cpu", "smoke_qwen3_0.6b"))
    assert device_of(tiny).type == "cpu" and capsys.readouterr().out == ""
    assert device_of(meant).type == "cpu"
    assert capsys.readouterr().out.startswith("note: no GPU was found, so the CPU is used; model.dtype=bfloat16")
    monkeypatch.setenv("RANK", "1")
    assert device_of(meant).type == "cpu" and capsys.readouterr().out == ""


def test_a_run_that_fails_its_check_stops_before_anything_is_written(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("startup.toolbox.TOOL_OUTPUT", "43")
    words = ["--config", "configs/tiny_cpu.json", "--run-dir", str(tmp_path / "run"), "--set", "train.steps=1"]
    assert program.main(words) == 2
    said = capsys.readouterr()
    assert "error: check failed: tool" in said.err and "ok    ratio" in said.out
    assert not (tmp_path / "run").exists()
