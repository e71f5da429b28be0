"""The memory forecast against tensors that really exist."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from config import load_config
from modeling.forecast import forecast

ROOT = Path(__file__).parent.parent
CONFIG = load_config(ROOT / "configs/qwen3_8b_8gpu.json")
SHAPE = AutoConfig.from_pretrained(ROOT / "models/shapes/Qwen3-8B")
PARAMETERS = 8_190_735_360


def changed(**sections):
    return dataclasses.replace(
        CONFIG, **{name: dataclasses.replace(getattr(CONFIG, name), **values) for name, values in sections.items()}
    )


def test_model_states_are_those_of_zero_2_in_bf16():
    one, eight = (forecast(CONFIG, SHAPE, PARAMETERS, 0, ranks) for ranks in (1, 8))
    assert one.weights == eight.weights == 2 * PARAMETERS
    assert (one.gradients, one.optimizer) == (6 * PARAMETERS, 12 * PARAMETERS)
    assert eight.gradients == pytest.approx(one.gradients / 8, rel=1e-6)
    assert eight.optimizer == pytest.approx(one.optimizer / 8, rel=1e-6)
    assert one.device == one.weights + one.gradients + one.optimizer + one.update


def test_offload_moves_the_optimizer_to_the_host():
    kept, moved = (forecast(changed(train={"offload_optimizer": o}), SHAPE, PARAMETERS, 0, 1) for o in (False, True))
    assert kept.device - moved.device == moved.host == 12 * PARAMETERS
    assert kept.host == 0


def test_a_released_cache_and_the_update_share_their_memory():
    kept, released = (
        forecast(changed(rollout={"release_kv": r}), SHAPE, PARAMETERS, 10**13, 1) for r in (False, True)
    )
    assert kept.device - released.device == kept.update < 10**13


def test_checkpointing_and_smaller_micro_batches_save_activations():
    plain = forecast(changed(model={"gradient_checkpointing": False}), SHAPE, PARAMETERS, 0, 1).update
    saved = forecast(CONFIG, SHAPE, PARAMETERS, 0, 1).update
    more = forecast(changed(train={"max_tokens_per_micro_batch": 16384}), SHAPE, PARAMETERS, 0, 1).update
    assert saved < more < plain


def test_activations_of_a_layer_are_about_what_autograd_keeps():
    """Measured: bytes that autograd saves in a forward without checkpointing, on the tiny model."""
    folder = ROOT / "models/tiny_qwen3"
    config = load_config(ROOT / "configs/tiny_cpu.json")
    tokens = 512
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_tokens_per_micro_batch=tokens))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    seen: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model.base_model(torch.randint(0, 300, (1, tokens)), use_cache=False)
    assert kept is not None
    logits = 3 * 4 * tokens * model.config.vocab_size
    estimate = forecast(config, model.config, model.num_parameters(), 0, 1).update - logits
    assert estimate == pytest.approx(sum(seen.values()), rel=0.5)
