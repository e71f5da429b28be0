"""Policies on CPU, their batches and gradients."""

from __future__ import annotations

from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_grad

from config import Config, parse_config
from policy import Policy, init_distributed
from tests.support.builders import record, scored
from update.batch import collate
from update.minibatch import token_weights

ROOT = Path(__file__).parents[2]


CPU = torch.device("cpu")


def config(**sections) -> Config:
    base = {
        "model": {"path": str(ROOT / "models/tiny_qwen3"), "dtype": "float32", "gradient_checkpointing": False},
        "data": {"path": "unused"},
        "rollout": {"context_length": 64, "max_new_tokens": 32},
        "train": {"max_grad_norm": 1e9, "learning_rate": 1e-3},
    }
    return parse_config({name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


def make_policy(**sections) -> Policy:
    init_distributed(CPU)
    return Policy(config(**sections), CPU)


def step():
    """Eight records of unequal lengths with tool spans, one of advantage 0."""
    spans = ["PPAAOOA", "PPPPPAAAAAAAAAAAA", "PA", "PPPAAAOOOAAAOOAA", "PPPA", "PAAAAAAA", "PPPPPPPPPPA", "PPAAAA"]
    advantages = [1.0, -1.0, 0.5, -0.5, 0.25, 0.75, 0.0, -1.0]
    records = [record(s, prompt=i // 2, sample=i % 2, first_id=10 + 3 * i) for i, s in enumerate(spans)]
    return scored(records, advantages)


def micro_batches(items, max_tokens: int = 10_000):
    """One rank's, for the token mean."""
    return collate(items, token_weights(items, "dapo", 1), max_tokens, 1, leave_out_equal=True)[0]


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: safe_get_full_grad(p).clone() for name, p in policy.model.named_parameters()}


def assert_equal_gradients(got, expected, bound=1e-6):
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (got[name] - gradient).norm() <= bound * gradient.norm(), name
