"""The objectives against TRL's own loss, where TRL has the same one. TRL is a test-only dependency, never a run's."""

from __future__ import annotations

import types
from collections import defaultdict

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed; requirements/dev.txt names it")
from trl import GRPOConfig, GRPOTrainer

from tests.support.oracle import ADVANTAGES, DRIFTS, LOG_RATIOS, LOGPROBS, MISMATCHES, config, ours

WIDTH = max(map(len, LOGPROBS)) + 2  # places for "tool tokens", masked out


def padded(values) -> torch.Tensor:
    """[B, T]: a tool token stands before the last sampled one of every row that has two."""
    table = torch.zeros(len(values), WIDTH, dtype=torch.float64)
    for i, row in enumerate(values):
        for t, value in enumerate(row):
            table[i, _place(t, len(row))] = value
    return table


def _place(t: int, count: int) -> int:
    return t + (count > 1 and t == count - 1)


def mask() -> tuple[torch.Tensor, torch.Tensor]:
    """TRL's completion_mask and tool_mask."""
    sampled = padded([[1.0] * len(row) for row in LOGPROBS])
    completion = torch.zeros_like(sampled)
    for i, row in enumerate(LOGPROBS):
        completion[i, : _place(len(row) - 1, len(row)) + 1] = 1.0
    assert (completion > sampled).any()
    return completion, sampled


def trls(settings, **changes) -> tuple[float, torch.Tensor]:
    """Loss and gradient of `GRPOTrainer._compute_loss` on the hand-made case."""
    loss = settings.loss
    completion, tool = mask()
    logprobs = padded(LOGPROBS).requires_grad_()
    old = padded(LOGPROBS) - padded(LOG_RATIOS)
    trainer = object.__new__(GRPOTrainer)  # its constructor wants a model and a data set
    single = types.SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x
    )
    made = {
        "args": types.SimpleNamespace(delta=loss.dual_clip, use_bias_correction_kl=False, steps_per_generation=1),
        "beta": loss.kl_coef, "loss_type": loss.policy, "importance_sampling_level": "token", "epsilon_low": 0.2,
        "epsilon_high": 0.28, "max_completion_length": 21, "use_vllm": False, "accelerator": single,
        "vllm_importance_sampling_correction": True, "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0,
        "current_gradient_accumulation_steps": 1, "aux_loss_enabled": False, "_entropy_bonus_enabled": False,
        "model": types.SimpleNamespace(training=True), "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    } | changes  # fmt: skip
    for name, value in made.items():
        setattr(trainer, name, value)
    ids = torch.zeros_like(completion, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": completion,
        "tool_mask": tool, "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64), "old_per_token_logps": old,
        "ref_per_token_logps": padded(LOGPROBS) - padded(DRIFTS), "num_items_in_batch": tool.sum(),
        "importance_sampling_ratio": _ratio(loss.importance, tool),
    }  # fmt: skip
    value = trainer._compute_loss(None, inputs)
    return value.item(), torch.autograd.grad(value, logprobs)[0][tool > 0]


def _ratio(kind: str, tool: torch.Tensor) -> torch.Tensor:
    """TRL computes these inside its generation step, so they are restated: clamp at 2, or masked outside [0.5, 2]."""
    gaps = padded(MISMATCHES) * tool
    ratio = (gaps.sum(-1, keepdim=True) if kind.startswith("sequence") else gaps).exp()
    if kind.endswith("mask"):
        return ratio.masked_fill((ratio < 0.5) | (ratio > 2.0), 0.0)
    return ratio.clamp(max=2.0)


CASES = [
    ("dapo", {}, {}), ("grpo", {}, {}), ("dr_grpo", {}, {}), ("dapo", {"dual_clip": 2.5}, {}),
    ("grpo", {"kl_coef": 0.1}, {}), ("dapo", {"kl_coef": 0.1}, {}),
    ("cispo", {}, {"epsilon_high": 5.0}), ("cispo", {"kl_coef": 0.1, "clip_high": 0.5}, {"epsilon_high": 1.5}),
    ("gspo", {}, {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4,
                  "epsilon_high": 4e-4}),
    *[("dapo", {"importance": kind}, {"use_vllm": True})
      for kind in ("token", "sequence", "token_mask", "sequence_mask")],
    ("grpo", {"importance": "token", "kl_coef": 0.1}, {"use_vllm": True}),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "loss", "theirs"), CASES)
def test_loss_and_gradient_equal_trls(policy, loss, theirs):
    settings = config(policy=policy, **loss)
    value, gradient, _ = ours(settings)
    wanted, wanted_gradient = trls(settings, **theirs)
    assert value == pytest.approx(wanted, rel=1e-12)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-10, atol=1e-14)


def test_trl_with_other_settings_differs():
    value, _, _ = ours(config(policy="dapo"))
    for theirs in ({"loss_type": "grpo"}, {"epsilon_low": 0.28, "epsilon_high": 0.2}, {"beta": 0.1}):
        assert abs(trls(config(policy="dapo"), **theirs)[0] - value) > 1e-4


def test_our_default_loss_is_trls():
    assert GRPOConfig.__dataclass_fields__["loss_type"].default == config().loss.policy == "dapo"
