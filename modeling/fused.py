"""The weights of a Hugging Face causal LM as the decode kernels want them: the live parameters, never copies.

`decode_weights` reads a model of a family whose layers are exactly what `modeling.decode_stack` restates (Qwen3,
Qwen2, Llama: RMSNorm, rotary grouped-query attention, gated silu MLP) and refuses every other with the reason, so that
the caller can let the model's own modules run instead. The kernels reach q, k, v and gate, up from one base address by
their distances, so they read ZeRO's flat buffer as one matrix and need no adjacency. Addresses stay across optimizer
steps; `check_addresses` proves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FAMILIES = ("qwen3", "qwen2", "llama")
# Rotary tables that depend on the position alone; "dynamic" and "longrope" change with the length of the batch.
STATIC_ROPES = ("default", "linear", "llama3", "yarn")


class UnsupportedModel(ValueError):
    """The decode kernels do not restate this model; the message says which part. Its own modules can still run."""


def can_fuse(config: Any, device: torch.device) -> bool:
    """Whether `modeling.train_layers` computes what this model's modules compute; config: the Hugging Face one."""
    return (
        device.type == "cuda"
        and config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in STATIC_ROPES
    )


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; matrices [out, in]. Biases and head norms are None where the family has none."""

    input_norm: Tensor  # [hidden]
    q: Tensor  # [H * D, hidden]
    k: Tensor  # [G * D, hidden]
    v: Tensor  # [G * D, hidden]
    biases: tuple[Tensor, Tensor, Tensor] | None  # of q, k, v
    head_norms: tuple[Tensor, Tensor] | None  # of q, k  # [D]
    o: Tensor  # [hidden, H * D]
    post_norm: Tensor  # [hidden]
    gate: Tensor  # [intermediate, hidden]
    up: Tensor  # [intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class DecodeWeights:
    layers: tuple[LayerWeights, ...]
    embedding: Tensor  # [V, hidden]
    norm: Tensor  # [hidden]
    head: Tensor  # [V, hidden]; the embedding itself when tied
    heads: int  # H
    kv_heads: int  # G
    head_size: int  # D
    scale: float  # of the attention scores
    eps: float

    def tensors(self) -> list[Tensor]:
        parts: list[Tensor | None] = [self.embedding, self.norm, self.head]
        for layer in self.layers:
            parts += [layer.input_norm, layer.q, layer.k, layer.v, layer.o, layer.post_norm, layer.gate, layer.up]
            parts += [layer.down, *(layer.biases or ()), *(layer.head_norms or ())]
        return [part for part in parts if part is not None]

    def addresses(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self.tensors())


def decode_weights(model: Any) -> DecodeWeights:
    """The live weights of a supported model; raises UnsupportedModel with the reason for any other."""
    config = model.config
    _check_config(config)
    base = model.model
    layers = tuple(_layer(layer, index) for index, layer in enumerate(base.layers))
    attention = base.layers[0].self_attn
    head = model.get_output_embeddings()
    _plain_linear(head, "lm_head", bias=False)
    weights = DecodeWeights(
        layers=layers, embedding=base.embed_tokens.weight.detach(), norm=base.norm.weight.detach(),
        head=head.weight.detach(), heads=config.num_attention_heads, kv_heads=config.num_key_value_heads,
        head_size=attention.head_dim, scale=attention.scaling, eps=config.rms_norm_eps,
    )  # fmt: skip
    size = weights.head_size
    if size < 16 or size & (size - 1):
        raise UnsupportedModel(f"head size {size} is not a power of two of at least 16")
    dtypes = {tensor.dtype for tensor in weights.tensors()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        raise UnsupportedModel(f"weights are {sorted(map(str, dtypes))}; all float32 or all bfloat16 is needed")
    return weights


def _check_config(config: Any) -> None:
    if config.model_type not in FAMILIES:
        raise UnsupportedModel(f"model type {config.model_type!r} is none of {', '.join(FAMILIES)}")
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"activation {config.hidden_act!r} is not silu")
    rope = config.rope_parameters["rope_type"]
    if rope not in STATIC_ROPES:
        raise UnsupportedModel(f"rotary type {rope!r} is none of {', '.join(STATIC_ROPES)}")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedModel(f"attention layers are {sorted(kinds)}, not all full_attention")


def _layer(layer: Any, index: int) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    has_bias = attention.q_proj.bias is not None
    for name, module in zip(("q_proj", "k_proj", "v_proj"), qkv, strict=True):
        _plain_linear(module, f"layers.{index}.self_attn.{name}", bias=has_bias)
    for name, module in (("o_proj", attention.o_proj), ("gate_proj", mlp.gate_proj), ("up_proj", mlp.up_proj),
                         ("down_proj", mlp.down_proj)):  # fmt: skip
        _plain_linear(module, f"layers.{index}.{name}", bias=False)
    q_norm = getattr(attention, "q_norm", None)
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.detach(),
        q=qkv[0].weight.detach(), k=qkv[1].weight.detach(), v=qkv[2].weight.detach(),
        biases=tuple(module.bias.detach() for module in qkv) if has_bias else None,
        head_norms=None if q_norm is None else (q_norm.weight.detach(), attention.k_norm.weight.detach()),
        o=attention.o_proj.weight.detach(), post_norm=layer.post_attention_layernorm.weight.detach(),
        gate=mlp.gate_proj.weight.detach(), up=mlp.up_proj.weight.detach(), down=mlp.down_proj.weight.detach(),
    )  # fmt: skip


def _plain_linear(module: Any, name: str, *, bias: bool) -> None:
    """Refuse anything but a bare Linear: an adapter's wrapper computes more than its weight says."""
    if type(module) is not nn.Linear:
        raise UnsupportedModel(f"{name} is a {type(module).__name__}, not a plain Linear")
    if (module.bias is not None) != bias:
        raise UnsupportedModel(f"{name} {'lacks' if bias else 'has'} a bias")
    if not module.weight.is_contiguous():
        raise UnsupportedModel(f"{name}.weight is not contiguous")


def check_addresses(model: Any, expected: tuple[int, ...]) -> None:
    """Captured graphs read the addresses they were captured with: refuse to replay over moved parameters."""
    if decode_weights(model).addresses() != expected:
        raise RuntimeError(
            "the model's parameters moved in memory after the decode graphs were captured; build the decoder again "
            "after whatever replaced them (loading a checkpoint must copy in place)"
        )
