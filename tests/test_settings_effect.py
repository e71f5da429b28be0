"""No silent setting: what has no effect under the others is refused in one line, by the rule that it declares."""

from __future__ import annotations

import dataclasses
import json
import typing

import pytest

from config import ANY_TOOL, Config, ConfigError, load_config, parse_config
from configs.effect import named_settings, require_effect, unmet
from tests.support.launch import ROOT

TINY = ROOT / "configs/tiny_cpu.json"
SETTINGS = {
    f"{section}.{field.name}": field
    for section, cls in typing.get_type_hints(Config).items()
    for field in dataclasses.fields(cls)
}
RULES = {name: field.metadata["bounds"].needs for name, field in SETTINGS.items() if field.metadata["bounds"].needs}
# Sections under which one condition of a rule does not hold; other conditions of the rule may hold or not.
UNMET = {
    "loss.distill_weight > 0": {},
    "loss.distill_weight < 1": {"loss": {"distill_weight": 1}, "teacher": {"path": "t"}},
    'loss.distill_weight < 1 or teacher.divergence == "sampled"': {
        "loss": {"distill_weight": 1},
        "teacher": {"path": "t"},
    },
    "teacher.privilege has {hint}": {"loss": {"distill_weight": 0.5}, "teacher": {"path": "t"}},
    "rollout.kv_tokens == null": {"rollout": {"kv_tokens": 8192}},
    "rollout.cuda_graphs": {"rollout": {"cuda_graphs": False}},
    "tool.enabled": {"tool": {"enabled": False}, "rollout": {"max_turns": 1}},
    ANY_TOOL: {"tool": {"enabled": False}, "rollout": {"max_turns": 1}},
    "tool.functions or reward.function": {},
    "reward.function": {},
    "loss.importance has mask": {},
    'loss.importance != "off"': {},
    "loss.kl_coef > 0": {},
    "lora.rank == 0": {"loss": {"kl_coef": 0.1}, "lora": {"rank": 4}},
    "lora.rank > 0": {},
    'teacher.source == "ema"': {"loss": {"distill_weight": 0.5}, "teacher": {"path": "t"}},
    'teacher.divergence == "jsd"': {"loss": {"distill_weight": 0.5}, "teacher": {"path": "t"}},
    "eval.path": {},
    "eval.temperature > 0": {"eval": {"path": "e", "temperature": 0}},
    "log.trackers has wandb|trackio": {"log": {"trackers": ["tensorboard"]}},
    "CUDA": {"loss": {"kl_coef": 0.1}},
}
CASES = [(name, condition) for name, needs in RULES.items() for condition in needs.split(" and ")]


def other_value(name: str):
    """Some value beside the default; whether it suits other rules does not matter here."""
    default, hint = SETTINGS[name].default, str(SETTINGS[name].type)
    if "Literal" in hint:
        return next(
            word
            for word in ("update", "grpo", "token", "k2", "gpu", "live", "jsd", "std", "boundary", "off")
            if f"'{word}'" in hint or f'"{word}"' in hint
        )
    if isinstance(default, bool):
        return not default
    if isinstance(default, tuple):
        return ["numpy"]
    if isinstance(default, str):
        return "other"
    return 2 if "int" in hint and not isinstance(default, float) else 0.625


@pytest.mark.parametrize(("name", "condition"), CASES)
def test_each_rule_refuses_its_setting_where_it_has_no_effect(name, condition):
    base = parse_config({"model": {"path": "m"}, "data": {"path": "d"}} | UNMET[condition])
    section, _, key = name.partition(".")
    named = named_settings({section: {key: other_value(name)}}, Config)
    assert list(named) == [name]
    with pytest.raises(ConfigError, match=f"^{name}=.*has no effect") as raised:
        require_effect(base, named, cuda=condition != "CUDA")
    assert "\n" not in str(raised.value) and named[name].needs in str(raised.value)


def test_every_rule_reads():
    config = parse_config({"model": {"path": "m"}, "data": {"path": "d"}})
    for needs in RULES.values():
        unmet(needs, config, cuda=None)
    assert len(RULES) > 30


@pytest.mark.parametrize("setting", [
    "teacher.path=x", "teacher.top_k=5", "lora.alpha=64", "loss.importance_high=3", "loss.kl_estimator=k2",
    "eval.every=5", "data.hint_field=hint", "reward.tool_bonus=0.1 tool.enabled=false rollout.max_turns=1",
])  # fmt: skip
def test_a_setting_without_effect_is_refused_in_one_line(setting):
    name, _, _ = setting.partition("=")
    with pytest.raises(ConfigError, match=f"^{name}=.* has no effect, since .*; it needs .*; set that, or"):
        load_config(TINY, setting.split())


def test_a_default_and_a_setting_with_an_effect_pass():
    load_config(TINY, ["teacher.top_k=0", "lora.alpha=32", "loss.kl_coef=0.1", "loss.kl_estimator=k2"])


def test_what_is_turned_off_takes_the_files_settings_of_it_along():
    assert load_config(TINY, ["tool.enabled=false", "rollout.max_turns=1"]).tool.timeout_seconds == 2


def test_a_runs_resolved_file_names_nothing(tmp_path):
    values = json.loads(load_config(TINY).to_json())
    values["teacher"]["path"], values["lora"]["alpha"] = "x", 7
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_config(tmp_path / "config.json").lora.alpha == 7
    with pytest.raises(ConfigError, match=r"eval\.every=3: has no effect"):
        load_config(tmp_path / "config.json", ["eval.every=3"])
