"""LoRA: adapters alone train, the rollout samples through them unmerged, and what is written reads back."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from config import ConfigError, LoraConfig, ModelConfig
from main import main
from modeling import lora
from modeling.attention import IMPLEMENTATION
from modeling.loading import build_model
from modeling.packed_model import TokenLogprobModule
from tests.conftest import make_model
from tests.support.launch import ROOT, metrics, run
from tests.support.policies import CPU, make_policy, micro_batches, step
from tests.support.routes import batch_of, sampled
from update.update import update

HAS_PEFT = importlib.util.find_spec("peft") is not None
needs_peft = pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed; requirements/dev.txt names it")
LORA = {"rank": 4, "alpha": 8}


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lora.rank=4: needs the package peft; pip install -r requirements/lora"):
        lora.check_available(LoraConfig(rank=4))
    lora.check_available(LoraConfig(rank=0))


def test_a_run_that_needs_it_is_refused_before_anything_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(lora, "check_available", lambda settings: check_without_peft(settings, monkeypatch))
    assert run(tmp_path / "run", "lora.rank=4") == 2
    assert "needs the package peft" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def check_without_peft(settings, monkeypatch, check=lora.check_available):
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        check(settings)


def trained_policy(steps: int = 2):
    policy = make_policy(lora=LORA, loss={"kl_coef": 0.1})
    for _ in range(steps):
        update(policy, [micro_batches(step(), 30)], policy.config.loss, 1e-2)
    return policy


@needs_peft
def test_adapters_change_nothing_before_the_first_step():
    plain, adapted = make_policy(), make_policy(lora=LORA)
    for batch in micro_batches(step()):
        assert torch.equal(plain.frozen_logprobs(batch), adapted.frozen_logprobs(batch))


@needs_peft
def test_adapters_alone_train_and_sit_on_every_linear_layer_but_the_head():
    policy, start = trained_policy(), dict(make_policy().model.named_parameters())
    moved = {n for n, p in policy.model.named_parameters() if p.requires_grad}
    assert all("lora_" in n for n in moved)
    frozen = {n.replace(".base_layer", ""): p for n, p in policy.model.named_parameters() if n not in moved}
    assert frozen.keys() == start.keys()
    assert all(torch.equal(p, start[n]) for n, p in frozen.items())
    linear = [m for m in policy.model.modules() if hasattr(m, "lora_B")]
    assert len(linear) == 7 * policy.model.config.num_hidden_layers
    assert all((m.lora_B["default"].weight != 0).any() for m in linear)


@needs_peft
def test_adapters_start_alike_with_the_seed():
    first, second, other = make_policy(lora=LORA), make_policy(lora=LORA), make_policy(lora=LORA, train={"seed": 1})
    states = [torch.cat([p.flatten() for n, p in m.model.named_parameters() if "lora_A" in n])
              for m in (first, second, other)]  # fmt: skip
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


@needs_peft
def test_the_reference_is_the_policy_without_adapters():
    policy, plain = trained_policy(), make_policy()
    batches = micro_batches(step(), 30)
    reference = policy.reference_logprobs(batches)
    assert all(torch.equal(a, plain.frozen_logprobs(b)) for a, b in zip(reference, batches, strict=True))
    assert not torch.equal(policy.frozen_logprobs(batches[0]), reference[0])
    assert all(p.requires_grad for n, p in policy.model.named_parameters() if "lora_" in n)


@needs_peft
def test_what_is_written_reads_back_through_peft_and_through_a_resume(tmp_path):
    import peft

    policy, batches = trained_policy(), micro_batches(step(), 30)
    policy.save_pretrained(tmp_path)
    policy.save(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(
        ROOT / "models/tiny_qwen3", dtype=torch.float32, attn_implementation=IMPLEMENTATION
    )
    written = dict(peft.PeftModel.from_pretrained(base, tmp_path).base_model.model.named_parameters())
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(written[name], parameter), name
    resumed = make_policy(lora=LORA, loss={"kl_coef": 0.1})
    resumed.load(tmp_path)
    for p in (policy, resumed):
        update(p, [batches], p.config.loss, 1e-2)
    for mine, other in zip(resumed.model.parameters(), policy.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@needs_peft
def test_a_run_samples_as_it_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert run(tmp_path, "lora.rank=4", "train.steps=3", "train.learning_rate=0.01", "loss.kl_coef=0.01") == 0
    for row in metrics(tmp_path):
        assert row["mismatch_max"] <= 1e-5
        assert row["ratio_error"] == 0.0
    assert metrics(tmp_path)[-1]["kl"] > 0.0
    folder = tmp_path / "checkpoints/step_3"
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    assert not (folder / "model.safetensors").exists()
    assert run(tmp_path, "lora.rank=8", resume=True) == 2
    assert "lora.rank=8: was 4" in (message := capsys.readouterr().err) and "model.path=" not in message
    assert run(tmp_path, "lora.rank=4", "lora.alpha=64", resume=True) == 2  # the same adapters would be another policy
    assert "lora.alpha=64: was 32" in capsys.readouterr().err
    assert main(["replay", str(tmp_path), "--step", "3", "--sample", "5"]) == 0  # through the adapters of step 2
    assert "bit-exact" in capsys.readouterr().out
    assert run(tmp_path / "another", f"model.path={folder}") == 2
    assert "holds LoRA adapters and no model; score them with main.py evaluate" in capsys.readouterr().err


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    policy = trained_policy(steps=1)
    policy.save_pretrained(folder)
    return policy.model, folder


@needs_peft
def test_adapters_read_onto_their_base_are_those_that_were_trained(adapters):
    trained, folder = adapters
    base = ModelConfig(path=str(ROOT / "models/tiny_qwen3"), dtype="float32")
    read = build_model(base, 0, CPU, folder)
    assert isinstance(read.model.layers[0].mlp.up_proj, peft_layer()), "unmerged"
    there = dict(read.named_parameters())
    assert there.keys() == dict(trained.named_parameters()).keys()
    assert all(torch.equal(there[name], parameter) for name, parameter in trained.named_parameters())


def peft_layer():
    from peft.tuners.lora import Linear

    return Linear


@needs_peft
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "lack adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"half a fi"), "do not go onto"),
        (lambda folder: settings_in(folder, r=8), "were made for another model"),
        (
            lambda folder: settings_in(folder, target_modules=["q_a_proj"]),
            "do not go onto .*tiny_qwen3: Target modules",
        ),
        (lambda folder: settings_in(folder, peft_type="LOHA"), "are .*LOHA and not LoRA"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_in_one_line(adapters, tmp_path, damage, words):
    folder = tmp_path / "damaged"
    shutil.copytree(adapters[1], folder)
    damage(folder)
    with pytest.raises(ConfigError, match=rf"adapters='.*damaged': .*{words}") as raised:
        lora.check_readable(folder)
        build_model(ModelConfig(path=str(ROOT / "models/tiny_qwen3")), 0, CPU, folder)
    assert "\n" not in str(raised.value)


def settings_in(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_adapters_ask_for_the_package_that_reads_them(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"are read by the package peft; pip install -r requirements/lora"):
        lora.check_readable(tmp_path)


@needs_peft
def test_a_mixtures_experts_stay_frozen_and_its_rollout_samples_through_the_adapters():
    """G17: adapters sit on the attention's projections; peft knows neither the router's nor the experts' matrices."""
    model = make_model("gpt_oss")
    lora.add_adapters(model, LoraConfig(rank=4), seed=0)
    adapted = {n.split(".lora_")[0].rsplit(".", 1)[-1] for n, p in model.named_parameters() if p.requires_grad}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    before = sampled(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(3))
    record = sampled(model)
    assert record.token_ids != before.token_ids
    trained = TokenLogprobModule(model, "auto", 1.0)(batch_of(record))
    count = record.num_sampled
    assert torch.equal(trained.logprobs[:count], torch.tensor(record.logprobs[-count:]))
    trained.logprobs.sum().backward()
    assert all(p.grad is None for n, p in model.named_parameters() if "lora_" not in n)
    assert all(p.grad.any() for n, p in model.named_parameters() if "lora_" in n)
