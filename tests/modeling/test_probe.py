"""An attention that would train another model than eager attention is refused at start, with the setting named."""

from __future__ import annotations

import pytest
import torch

import main as program
from config import ConfigError
from modeling import attention
from modeling.attention import sdpa_softmax
from modeling.probe import check_attention
from tests.conftest import make_model
from tests.support.launch import ROOT


@pytest.mark.parametrize("implementation", ["auto", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ours_pass_for_every_family_and_leave_the_model_as_it_was(family, dtype, implementation):
    model = make_model(family, dtype)
    model.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_attention(model, implementation)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(p.requires_grad for p in model.parameters())
    assert model.config._attn_implementation == attention.IMPLEMENTATION


def dropping_sinks(query, key, value, mask, scaling, sinks=None):
    return sdpa_softmax(query, key, value, mask, scaling)


def without_the_gradient_of_sinks(query, key, value, mask, scaling, sinks=None):
    return sdpa_softmax(query, key, value, mask, scaling, None if sinks is None else sinks.detach())


def one_value_for_all_heads_sinks(query, key, value, mask, scaling, sinks=None):
    return sdpa_softmax(query, key, value, mask, scaling, None if sinks is None else sinks * 1.1)


def without_windows(query, key, value, mask, scaling, sinks=None):
    return sdpa_softmax(query, key, value, None, scaling, sinks)


def not_causal(query, key, value, mask, scaling, sinks=None):
    return sdpa_softmax(query, key, value, torch.ones(key.shape[2], key.shape[2], dtype=torch.bool), scaling, sinks)


def wrong_scale(query, key, value, mask, scaling, sinks=None):
    return sdpa_softmax(query, key, value, mask, scaling * 1.05, sinks)


@pytest.mark.parametrize(
    ("softmax", "family", "words"),
    [
        (dropping_sinks, "gpt_oss", "gpt_oss's full_attention layers the output differs"),
        (without_the_gradient_of_sinks, "gpt_oss", "gradient of its sinks is zero: it is dropped"),
        (one_value_for_all_heads_sinks, "gpt_oss", "differs"),
        (without_windows, "gpt_oss", "gpt_oss's sliding_attention layers"),
        (not_causal, "qwen3", "qwen3's full_attention layers"),
        (wrong_scale, "llama", "llama's full_attention layers"),
    ],
)
def test_an_attention_that_computes_something_else_is_refused(monkeypatch, softmax, family, words):
    monkeypatch.setitem(attention.SOFTMAX, "auto", softmax)
    with pytest.raises(ConfigError, match=r"model\.attn_implementation") as caught:
        check_attention(make_model(family), "auto")
    assert words in str(caught.value)
    assert "set eager" in str(caught.value)
    check_attention(make_model(family), "eager")


def test_a_run_whose_attention_drops_sinks_ends_before_its_first_step(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(attention.SOFTMAX, "auto", dropping_sinks)
    words = ["--config", "configs/tiny_gpt_oss_cpu.json", "--run-dir", str(tmp_path / "run")]
    assert program.main([*words, "--set", "train.check=false"]) == 2
    error = capsys.readouterr().err
    assert "model.attn_implementation='auto': trains another model" in error
    assert not (tmp_path / "run").exists()
