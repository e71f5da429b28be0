"""Every family that README names trains through main.py, and plain transformers loads what it saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from tests.support.launch import metrics, run

pytestmark = pytest.mark.usefixtures("in_the_repository")

SHAPE = {  # heads of 16, the least that the decode kernels take
    "vocab_size": 315, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "eos_token_id": 2,
}  # fmt: skip
ODD = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 1}
SHAPES = {
    "qwen3, tied": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "qwen3, untied": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False),
    "qwen2, tied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2, untied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "llama, tied, 9 heads and 3 key heads of 64": lambda: LlamaConfig(**SHAPE | ODD, tie_word_embeddings=True),
    "llama, untied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False),
}  # GPT-OSS with its own chat: tests/modeling/test_gpt_oss.py
SMALLEST = [
    "rollout.trajectories_per_step=8", "rollout.samples_per_prompt=4", "rollout.max_new_tokens=16",
    "train.steps=2", "train.save_every=0", "train.check=false", "train.learning_rate=1e-3",
    "model.tokenizer_path=models/tiny_qwen3",
    "loss.distill_weight=1", "teacher.source=ema", "teacher.privilege=' {answer}'",  # random weights earn no reward
]  # fmt: skip


def folder_of(tmp_path: Path, shape) -> Path:
    """A model of this shape with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", SHAPES)
def test_every_family_trains_and_its_copy_loads_in_plain_transformers(tmp_path, name):
    folder, run_dir = folder_of(tmp_path, SHAPES[name]()), tmp_path / "run"
    assert run(run_dir, *SMALLEST, f"model.path={folder}") == 0
    for row in metrics(run_dir):
        assert row["mismatch_max"] <= 1e-5 and row["ratio_error"] == 0.0 and row["grad_norm"] > 0
    before, after = load(folder), load(run_dir / "checkpoints/step_2")
    assert type(before) is type(after)
    pairs = zip(before.named_parameters(), after.parameters(), strict=True)
    changed = [name for (name, old), new in pairs if not torch.equal(old, new)]
    assert any("proj" in name for name in changed)
    saved = json.loads((run_dir / "checkpoints/step_2/config.json").read_text())
    assert saved["tie_word_embeddings"] is ("untied" not in name)
