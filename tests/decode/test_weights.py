"""Which models the decode kernels take, and that they read live weights."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen2Config, Qwen3Config

from config import LoraConfig
from decode.weights import UnsupportedModel, check_addresses, decode_weights
from modeling import lora

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")

SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip


def build(config, dtype=torch.float32):
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


@pytest.mark.parametrize("config", [Qwen3Config, Qwen2Config, LlamaConfig, GptOssConfig])
def test_the_weights_are_the_parameters_themselves(config):
    model = build(config(**SHAPE, tie_word_embeddings=False))
    weights = decode_weights(model)
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    assert set(weights.addresses()) == parameters, "all of them, and nothing copied"
    layer = weights.layers[0]
    assert (layer.biases is not None) == (config in (Qwen2Config, GptOssConfig))
    assert (layer.head_norms is not None) == (config is Qwen3Config)
    assert (layer.sinks is not None) == (layer.o_bias is not None) == layer.windowed == (config is GptOssConfig)
    assert not weights.layers[1].windowed


def test_a_tied_head_is_the_embedding():
    weights = decode_weights(build(Qwen3Config(**SHAPE, tie_word_embeddings=True)))
    assert weights.head.data_ptr() == weights.embedding.data_ptr()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaConfig(**SHAPE, mlp_bias=True), "gate_proj has a bias"),
        (LlamaConfig(**SHAPE, attention_bias=True), "o_proj has a bias"),
        (Qwen3Config(**{**SHAPE, "head_dim": 24}), "head size 24"),
        (Qwen3Config(**SHAPE, hidden_act="gelu"), "activation 'gelu'"),
        (Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1), "sliding_attention"),
        (
            Qwen3Config(**SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "rotary type 'dynamic'",
        ),
    ],
)
def test_anything_the_kernels_do_not_restate_is_refused_with_the_reason(config, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        decode_weights(build(config))


def test_a_wrapped_projection_is_refused():
    model = build(Qwen3Config(**SHAPE))
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.up_proj is a Sequential"):
        decode_weights(model)


def test_mixed_and_half_dtypes_are_refused():
    model = build(Qwen3Config(**SHAPE))
    model.model.norm.to(torch.bfloat16)
    with pytest.raises(UnsupportedModel, match="all float32 or all bfloat16"):
        decode_weights(model)


def test_weights_updated_in_place_pass_the_address_check_and_replaced_ones_do_not():
    model = build(Qwen3Config(**SHAPE))
    addresses = decode_weights(model).addresses()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.add_(1.0)
    check_addresses(model, addresses)
    model.model.layers[0].mlp.down_proj.weight.data = model.model.layers[0].mlp.down_proj.weight.data.clone()
    with pytest.raises(RuntimeError, match="moved in memory"):
        check_addresses(model, addresses)


@needs_peft
def test_adapters_are_read_as_they_are_and_refused_where_they_do_not_act_as_one_plain_lora():
    model = build(Qwen3Config(**SHAPE))
    lora.add_adapters(model, LoraConfig(rank=4, alpha=8), seed=0)
    weights = decode_weights(model)
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    assert set(weights.addresses()) == parameters, "adapters among them"
    adapter = weights.layers[1].adapters["gate_up"][1]
    assert adapter.b.data_ptr() == model.model.layers[1].mlp.up_proj.lora_B["default"].weight.data_ptr()
    assert adapter.scale == 2.0
    with lora.without_adapters(model), pytest.raises(UnsupportedModel, match="switched on and unmerged"):
        decode_weights(model)
    model.model.layers[1].self_attn.v_proj = model.model.layers[1].self_attn.v_proj.base_layer
    with pytest.raises(UnsupportedModel, match=r"layers\.1's qkv matrices have adapters of different ranks"):
        decode_weights(model)
