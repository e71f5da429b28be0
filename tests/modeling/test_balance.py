"""The routers' balance loss: DeepSeek-V3's formula by hand, of each row by itself, off unless asked (G14)."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

import main as program
from config import LossConfig
from modeling.packed_model import TokenLogprobModule
from modeling.routing import token_balance, watch
from tests.conftest import make_model
from tests.support.builders import record
from tests.support.launch import ROOT, SMALL, metrics
from update.batch import ResponseTokenBatch
from update.update import batch_loss

LAYERS, EXPERTS, TOP_K = 2, 4, 2
COEF = 0.3


def by_hand(logits: list[list[float]], ids: list[list[int]]) -> float:
    """One row's balance loss in plain floats."""
    tokens, experts, top_k = len(logits), len(logits[0]), len(ids[0])
    total = 0.0
    for expert in range(experts):
        count = sum(expert in chosen for chosen in ids)
        mean = sum(math.exp(row[expert]) / sum(map(math.exp, row)) for row in logits) / tokens
        total += experts / (top_k * tokens) * count * mean
    return total


def test_a_rows_mean_is_the_formula_and_rows_do_not_mix():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, EXPERTS, generator=generator)
    ids = logits.topk(TOP_K, dim=1).indices
    rows = torch.tensor([0] * 4 + [1] * 5)
    values = token_balance(logits, ids, rows)
    for row in (0, 1):
        expected = by_hand(logits[rows == row].tolist(), ids[rows == row].tolist())
        assert values[rows == row].mean().item() == pytest.approx(expected, rel=1e-5)


def test_it_is_one_where_experts_share_alike_and_their_number_where_one_takes_all():
    rows = torch.zeros(EXPERTS, dtype=torch.long)
    even = token_balance(torch.zeros(EXPERTS, EXPERTS), torch.arange(EXPERTS)[:, None], rows)
    assert even.tolist() == [1.0] * EXPERTS
    one = token_balance(torch.tensor([[100.0, 0, 0, 0]] * EXPERTS), rows[:, None], rows)
    assert one.tolist() == [float(EXPERTS)] * EXPERTS


def routed(spans: str, **identity):
    made = record(spans, **identity)
    generator = torch.Generator().manual_seed(len(spans))
    picks = [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range((len(spans) - 1) * LAYERS)]
    return dataclasses.replace(made, routes=bytes(torch.cat(picks).tolist()))


RECORDS = [routed("PPAAOOA"), routed("PPPAAAAAA", sample=1, first_id=40)]


def gradients(groups, coef: float, checkpointing: bool = False) -> dict[str, torch.Tensor]:
    """Of the loss over micro-batches, each a list of records; the first's advantage is 1, the second's -1."""
    model = make_model("gpt_oss").train()
    watch(model)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    module = TokenLogprobModule(model, "auto", 1.0, router_balance=coef > 0)
    for records in groups:
        signs = [1.0 - 2.0 * r.sample_index for r in records]
        batch = ResponseTokenBatch.from_rollout(records, signs, [0.125] * len(records))
        out = module(batch)
        loss, columns = batch_loss(out, batch, out.logprobs.detach(), None, LossConfig(router_balance=coef))
        assert (columns.balance > 0).all() == (coef > 0)
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_g14_unasked_nothing_is_measured_and_asked_it_moves_the_routers():
    off, on = gradients([RECORDS], 0.0), gradients([RECORDS], COEF)
    router = "model.layers.1.mlp.router.weight"
    assert (on[router] - off[router]).norm() > 1e-3 * off[router].norm()


def test_the_gradient_does_not_depend_on_the_split_nor_on_recomputed_layers():
    whole = gradients([RECORDS], COEF)
    for other in (gradients([RECORDS[:1], RECORDS[1:]], COEF), gradients([RECORDS], COEF, checkpointing=True)):
        for name, value in whole.items():
            assert (other[name] - value).norm() <= 1e-6 * value.norm(), name


def test_a_batch_without_recorded_experts_is_refused():
    batch = ResponseTokenBatch.from_rollout([record("PPAA")], [1.0], [1.0])
    with pytest.raises(ValueError, match=r"loss\.router_balance needs the experts"):
        TokenLogprobModule(make_model("gpt_oss"), "auto", 1.0, router_balance=True)(batch)


def run(folder, config: str, *settings: str) -> int:
    sets = [
        word for setting in (*SMALL, "train.steps=1", "train.check=false", *settings) for word in ("--set", setting)
    ]
    return program.main(["--config", f"configs/{config}.json", "--run-dir", str(folder), *sets])


def test_a_run_that_asks_reports_it_and_the_audit_says_that_the_loss_needs_the_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert run(tmp_path, "tiny_gpt_oss_cpu", "loss.router_balance=0.01") == 0
    [row] = metrics(tmp_path)
    assert 0.9 < row["router_balance"] <= EXPERTS and row["ratio_error"] == 0.0
    assert program.main(["audit", str(tmp_path)]) == 0
    assert "loss.router_balance is above 0" in capsys.readouterr().out
    assert json.loads((tmp_path / "config.json").read_text())["loss"]["router_balance"] == 0.01


def test_a_dense_model_has_no_experts_to_balance(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert run(tmp_path / "run", "tiny_cpu", "loss.router_balance=0.01") == 2
    assert "loss.router_balance=0.01: qwen3 has no experts" in capsys.readouterr().err
