"""Settings: errors name field, value and mend; every shipped config parses; every field is read somewhere."""

from __future__ import annotations

import ast
import dataclasses
import json
import tomllib
import typing
from pathlib import Path

import pytest

from config import VERSION, Config, ConfigError, UserError, load_config, parse_config
from configs.schema import listing

ROOT = Path(__file__).parents[1]
SMALLEST = {"model": {"path": "m"}, "data": {"path": "d"}}
TAUGHT = SMALLEST | {"loss": {"distill_weight": 1.0}}
SHIPPED = sorted((ROOT / "configs").glob("*.json"))


def with_section(section: str, **values) -> dict:
    return SMALLEST | {section: SMALLEST.get(section, {}) | values}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_every_shipped_config_parses(path):
    load_config(path)


def test_every_field_is_read_outside_the_config_module():
    not_readers = {"tests", ".venv", "benchmarks", "config.py"}
    sources = [p for p in ROOT.rglob("*.py") if not not_readers & set(p.relative_to(ROOT).parts)]
    read = set()
    for path in sources:
        read |= {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    inside = {n.attr for n in ast.walk(ast.parse((ROOT / "config.py").read_text())) if isinstance(n, ast.Attribute)}
    sections = typing.get_type_hints(Config)
    fields = {f"{s}.{f.name}" for s, cls in sections.items() for f in dataclasses.fields(cls)}
    derived = {"trajectories_per_step"} & inside  # read through RolloutConfig.prompts_per_step
    assert not {name for name in fields if name.split(".")[1] not in read | derived}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"modle": {}}, ["modle", "did you mean model"]),
        (with_section("train", learning_rte=1e-6), ["train.learning_rte", "1e-06", "train.learning_rate"]),
        (with_section("model", learning_rate=1.0), ["model.learning_rate", "train.learning_rate"]),
        (SMALLEST | {"steps": 3}, ["steps=3", "train.steps"]),
        (with_section("rollout", top_p=0.9), ["rollout.top_p=0.9", "whole softmax", "eval.top_p"]),
        (with_section("train", top_k=20), ["train.top_k=20", "whole softmax", "eval.top_k"]),
        (with_section("loss", router_aux_loss_coef=0.001), ["router_aux_loss_coef=0.001", "loss.router_balance"]),
        (with_section("eval", top_p=0.0), ["eval.top_p=0.0", "(0, 1]"]),
        (with_section("eval", top_k=-1), ["eval.top_k=-1", "0 (draw from all tokens)"]),
        (with_section("reward", tool_bonus=1.0), ["reward.tool_bonus=1.0", "[0, 1)"]),
        (with_section("model", dtype="bf16"), ["model.dtype='bf16'", "'bfloat16'"]),
        (with_section("model", dtype=16), ["model.dtype=16", "'bfloat16'"]),
        (with_section("train", steps="3"), ["train.steps='3'", "an integer"]),
        (with_section("train", steps=True), ["train.steps=True", "an integer"]),
        (with_section("train", steps=0), ["train.steps=0", "at least 1"]),
        (with_section("rollout", samples_per_prompt=1), ["rollout.samples_per_prompt=1", "at least 2"]),
        (with_section("rollout", samples_per_prompt=0), ["rollout.samples_per_prompt=0", "at least 1"]),
        (with_section("rollout", trajectories_per_step=9, samples_per_prompt=4), ["=9", "smaller is 8", "larger 12"]),
        (with_section("rollout", temperature=0), ["rollout.temperature=0", "above 0"]),
        (with_section("rollout", max_new_tokens=8192), ["rollout.max_new_tokens=8192", "context_length=8192"]),
        (with_section("rollout", kv_tokens=100), ["rollout.kv_tokens=100", "one full context"]),
        (with_section("train", max_tokens_per_micro_batch=8), ["max_tokens_per_micro_batch=8", "longest trajectory"]),
        (with_section("train", max_tokens_per_micro_batch="aut"), ["'aut'", "must be an integer or 'auto'"]),
        (with_section("model", gradient_checkpointing=1), ["=1", "true or false"]),
        (with_section("train", learning_rate=float("nan")), ["train.learning_rate", "finite"]),
        (with_section("loss", policy="ppo"), ["loss.policy='ppo'", "'dr_grpo'"]),
        (with_section("loss", clip_low=1.5), ["loss.clip_low=1.5", "(0, 1]", "or null"]),
        (with_section("loss", dual_clip=0.5), ["loss.dual_clip=0.5", "above 1"]),
        (with_section("loss", dual_clip=3.0, policy="cispo"), ["loss.dual_clip=3.0", "cispo", "null"]),
        (with_section("loss", importance_high=0.9), ["loss.importance_high=0.9", "at least 1"]),
        (with_section("loss", importance_low=1.5), ["loss.importance_low=1.5", "weights of 1"]),
        (with_section("loss", router_balance=-1.0), ["loss.router_balance=-1.0", "0 (off)"]),
        (with_section("loss", kl_coef=-1.0), ["loss.kl_coef=-1.0", "0 (off)"]),
        (with_section("rollout", max_refills=-1), ["rollout.max_refills=-1", "0 (off)"]),
        (with_section("train", updates_per_rollout=9), ["updates_per_rollout=9", "8 groups"]),
        (with_section("train", zero_stage=0), ["train.zero_stage=0", "[1, 2]", "fp32"]),
        (with_section("train", max_bad_steps=0), ["train.max_bad_steps=0", "at least 1"]),
        (with_section("lora", rank=-1), ["lora.rank=-1", "0 (off)"]),
        (with_section("loss", distill_weight=1.5), ["loss.distill_weight=1.5", "[0, 1]"]),
        (with_section("loss", distill_weight=0.5), ["teacher.path=''", "distill_weight=0.5", "hub name"]),
        (with_section("teacher", divergence="kl"), ["teacher.divergence='kl'", "'reverse_kl'", "'sampled'"]),
        (with_section("teacher", beta=1.0), ["teacher.beta=1.0", "reverse_kl"]),
        (with_section("teacher", temperature=0.0), ["teacher.temperature=0.0", "above 0"]),
        (with_section("teacher", top_k=-1), ["teacher.top_k=-1", "whole vocabulary"]),
        (with_section("teacher", top_k=4, divergence="sampled"), ["teacher.top_k=4", "one token"]),
        (with_section("teacher", source="live"), ["teacher.privilege=''", "teaches nothing"]),
        (with_section("teacher", source="base", path="x"), ["teacher.path='x'", "'base'", "the policy itself"]),
        (with_section("teacher", source="ema", placement="zero3"), ["teacher.placement='zero3'", "whole"]),
        (with_section("teacher", source="ema", ema_decay=1.0), ["teacher.ema_decay=1.0", "(0, 1)"]),
        (
            TAUGHT | {"teacher": {"path": "t", "divergence": "sampled", "temperature": 2.0}},
            ["teacher.temperature=2.0", "at 1.0", "null"],
        ),
        (TAUGHT | {"teacher": {"source": "ema"}, "lora": {"rank": 4}}, ["teacher.source='ema'", "lora.rank"]),
        (TAUGHT | {"teacher": {"path": "t"}, "rollout": {"max_refills": 1}}, ["rollout.max_refills=1", "rewards"]),
        (TAUGHT | {"teacher": {"source": "live", "privilege": "{hint}"}}, ["data.hint_field=''", "{hint}"]),
        (with_section("data", prompt_field=""), ["data.prompt_field=''", "name a field"]),
        (with_section("data", answer_field=""), ["data.answer_field=''", "name a field"]),
        (with_section("tool", preload="numpy"), ["tool.preload='numpy'", "list of strings"]),
        (with_section("rollout", release_kv=False), ["rollout.release_kv=False", "removed", "kv_memory_fraction"]),
        (with_section("loss", kl_estimator="k1"), ["loss.kl_estimator='k1'", "removed", "k2 or k3"]),
        (with_section("log", trackers=["mlflow"]), ["log.trackers='mlflow'", "'wandb'", "'tensorboard'"]),
        ({"model": 3}, ["model=3", "JSON object"]),
        ({}, ["model.path", "name a model folder"]),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_the_mend(raw, words):
    with pytest.raises(ConfigError) as error:
        parse_config(raw)
    message = str(error.value)
    assert "\n" not in message
    assert not [word for word in words if word not in message], message


def write(tmp_path: Path, raw: dict) -> Path:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(raw))
    return path


def test_overrides_are_json_values_or_bare_words(tmp_path):
    path = write(tmp_path, SMALLEST)
    config = load_config(path, ["train.steps=3", "model.dtype=float32", "tool.preload=[]", "train.num_threads=null"])
    assert (config.train.steps, config.model.dtype, config.tool.preload) == (3, "float32", ())


@pytest.mark.parametrize("text", ["train.steps", "steps=3", "=3", "train.=3"])
def test_a_malformed_override_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"section\.field=value"):
        load_config(write(tmp_path, SMALLEST), [text])


def test_a_config_that_is_not_json_is_refused_with_its_line(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{\n"model": {,}}')
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        load_config(path)


def test_a_missing_config_file_is_refused():
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config("no_such.json")


def test_the_resolved_config_reads_back_equal(tmp_path):
    config = parse_config(with_section("train", steps=7))
    path = tmp_path / "resolved.json"
    path.write_text(config.to_json())
    assert load_config(path) == config


def test_an_integer_may_stand_for_a_number():
    assert parse_config(with_section("tool", timeout_seconds=2)).tool.timeout_seconds == 2.0


def test_pure_distillation_needs_no_group_to_compare():
    raw = TAUGHT | {"teacher": {"path": "t"}, "rollout": {"samples_per_prompt": 1}}
    assert parse_config(raw).rollout.prompts_per_step == 64


def test_a_runs_resolved_settings_may_hold_a_removed_one_at_its_old_default(tmp_path):
    config = parse_config(with_section("rollout", max_turns=3))
    resolved = json.loads(config.to_json())
    del resolved["version"], resolved["train"]["zero_stage"]  # both are newer than this run
    resolved["rollout"]["release_kv"] = False
    assert load_config(write(tmp_path, resolved)) == config
    assert load_config(write(tmp_path, resolved), ["train.steps=5"]).train.steps == 5


@pytest.mark.parametrize(
    ("section", "key", "value"), [("rollout", "release_kv", True), ("loss", "kl_estimator", "k1")]
)
def test_elsewhere_the_line_names_what_replaced_it(tmp_path, section, key, value):
    resolved = json.loads(parse_config(SMALLEST).to_json())
    resolved[section][key] = value
    with pytest.raises(ConfigError, match=rf"{section}\.{key}={value!r}: was removed; "):
        load_config(write(tmp_path, resolved))


def test_every_setting_is_listed_with_default_range_and_what_it_does():
    sections = typing.get_type_hints(Config)
    names = [f"{section}.{field.name}" for section, cls in sections.items() for field in dataclasses.fields(cls)]
    lines = listing(Config)
    assert [line.split()[0] for line in lines] == names
    assert all(
        field.metadata["bounds"].doc.endswith(".") for cls in sections.values() for field in dataclasses.fields(cls)
    )
    [line] = [line for line in listing(Config, "rollout") if "max_refills" in line]
    assert line.split()[1] == "0" and line.endswith("(integer, 0 (off) or more)")
    [line] = [line for line in listing(Config, "train") if "max_minutes" in line]
    assert line.split()[1] == "null" and line.endswith("(number, above 0, or null (no limit))")
    with pytest.raises(UserError, match="rolout: no such section; known: model, data"):
        listing(Config, "rolout")


def test_the_defaults_lie_in_their_ranges_and_a_range_holds_without_json():
    parse_config(SMALLEST)
    with pytest.raises(ConfigError, match=r"train\.steps=0: must be at least 1"):
        dataclasses.replace(parse_config(SMALLEST).train, steps=0)


def test_the_version_is_that_of_the_project_and_stands_in_a_runs_settings():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert VERSION == project["version"] == json.loads(parse_config(SMALLEST).to_json())["version"]
