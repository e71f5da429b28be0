"""LoRA: adapters alone train, the rollout samples through them unmerged, and what is written reads back."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from config import ConfigError, LoraConfig
from main import main
from modeling import lora
from modeling.attention import IMPLEMENTATION
from modeling.packed_model import TokenLogprobModule
from tests.conftest import make_model
from tests.test_main import ROOT, metrics, run
from tests.test_policy import make_policy, micro_batches, step
from tests.test_routing import batch_of, sampled
from update import update

HAS_PEFT = importlib.util.find_spec("peft") is not None
needs_peft = pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed; requirements-dev.txt names it")
LORA = {"rank": 4, "alpha": 8}


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lora.rank=4: needs the package peft; pip install -r requirements-lora"):
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
    assert main(["evaluate", "--run-dir", str(tmp_path), "--set", "eval.path=models/tiny_qwen3/problems.jsonl"]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "holds LoRA adapters and no model; merge them" in message
    assert run(tmp_path, "lora.rank=8", resume=True) == 2
    assert "lora.rank=8: was 4" in (message := capsys.readouterr().err) and "model.path=" not in message


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
