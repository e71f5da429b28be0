"""The weights of a Hugging Face causal LM as the decode kernels want them: the live parameters, never copies.

`decode_weights` reads a model of a family whose layers are exactly what `decode.stack` restates (Qwen3,
Qwen2, Llama: RMSNorm, rotary grouped-query attention, gated silu MLP; GPT-OSS: sinks, sliding windows, experts) and
refuses every other with the reason, so that the caller can let the model's own modules run instead. The kernels reach
q, k, v and gate, up from one base address by their distances, so they read ZeRO's flat buffer as one matrix and need
no adjacency. Addresses stay across optimizer steps; `check_addresses` proves it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from modeling.families import FAMILIES, STATIC_ROPES


class UnsupportedModel(ValueError):
    """The decode kernels do not restate this model; the message says which part. Its own modules can still run."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA's addition to a product x Wᵀ: scale * (x Aᵀ) Bᵀ."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scale: float


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """A dense MLP; matrices [out, in]."""

    gate: Tensor  # [intermediate, hidden]
    up: Tensor  # [intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """GPT-OSS's mixture of E experts; their matrices are [in, out], gate and up columns alternate."""

    router: Tensor  # [E, hidden]
    router_bias: Tensor  # [E]
    gate_up: Tensor  # [E, hidden, 2 * intermediate]
    gate_up_bias: Tensor  # [E, 2 * intermediate]
    down: Tensor  # [E, intermediate, hidden]
    down_bias: Tensor  # [E, hidden]
    top_k: int  # experts of a token
    alpha: float  # gain of the sigmoid
    limit: float  # clamp of gate (above) and up (both sides)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; matrices [out, in]. Biases, head norms and sinks are None where the family has none."""

    input_norm: Tensor  # [hidden]
    q: Tensor  # [H * D, hidden]
    k: Tensor  # [G * D, hidden]
    v: Tensor  # [G * D, hidden]
    biases: tuple[Tensor, Tensor, Tensor] | None  # of q, k, v
    head_norms: tuple[Tensor, Tensor] | None  # of q, k  # [D]
    sinks: Tensor | None  # [H]
    o: Tensor  # [hidden, H * D]
    o_bias: Tensor | None  # [hidden]
    post_norm: Tensor  # [hidden]
    mlp: GatedWeights | ExpertWeights
    windowed: bool  # sees the last `DecodeWeights.window` tokens alone
    adapters: dict[str, tuple[Adapter, ...]]  # by product: of q, k, v ("qkv"), "o", gate and up ("gate_up"), "down"


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
    window: int  # tokens that a windowed layer sees; 0 where there is none
    late_norms: bool  # RMSNorm rounds once, after its weight, instead of before it as well

    def tensors(self) -> list[Tensor]:
        parts: list[Tensor | None] = [self.embedding, self.norm, self.head]
        for layer in self.layers:
            parts += [layer.input_norm, layer.q, layer.k, layer.v, layer.sinks, layer.o, layer.o_bias, layer.post_norm]
            parts += [*(layer.biases or ()), *(layer.head_norms or ())]
            of_mlp = [getattr(layer.mlp, field.name) for field in fields(layer.mlp)]
            parts += [part for part in of_mlp if isinstance(part, Tensor)]
            parts += [part for group in layer.adapters.values() for one in group for part in (one.a, one.b)]
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
        window=config.sliding_window if any(layer.windowed for layer in layers) else 0,
        late_norms=FAMILIES[config.model_type].late_norms,
    )  # fmt: skip
    size = weights.head_size
    if size < 16 or size & (size - 1):
        raise UnsupportedModel(f"head size {size} is not a power of two of at least 16")
    dtypes = {tensor.dtype for tensor in weights.tensors()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        raise UnsupportedModel(f"weights are {sorted(map(str, dtypes))}; all float32 or all bfloat16 is needed")
    return weights


def _check_config(config: Any) -> None:
    captured = {name: family for name, family in FAMILIES.items() if family.captured}
    if config.model_type not in captured:
        raise UnsupportedModel(f"model type {config.model_type!r} is none of {', '.join(captured)}")
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"activation {config.hidden_act!r} is not silu")
    rope = config.rope_parameters["rope_type"]
    if rope not in STATIC_ROPES:
        raise UnsupportedModel(f"rotary type {rope!r} is none of {', '.join(STATIC_ROPES)}")
    kinds = captured[config.model_type].layers
    others = set(getattr(config, "layer_types", None) or ()) - kinds
    if others:
        raise UnsupportedModel(f"attention layers are {sorted(others)}, none of {', '.join(sorted(kinds))}")


def _layer(layer: Any, index: int) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    has_experts = hasattr(mlp, "experts")
    products = {"qkv": (attention.q_proj, attention.k_proj, attention.v_proj), "o": (attention.o_proj,)}
    if not has_experts:
        products |= {"gate_up": (mlp.gate_proj, mlp.up_proj), "down": (mlp.down_proj,)}
    adapters = {kind: _adapters(modules, f"layers.{index}'s {kind}") for kind, modules in products.items()}
    q, k, v = (_base(module) for module in products["qkv"])
    o, has_bias = _base(attention.o_proj), _base(attention.q_proj).bias is not None
    for name, module in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
        _plain_linear(module, f"layers.{index}.self_attn.{name}", bias=has_bias)
    sinks, o_bias = getattr(attention, "sinks", None), o.bias
    _plain_linear(o, f"layers.{index}.o_proj", bias=has_experts and o_bias is not None)
    q_norm = getattr(attention, "q_norm", None)
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.detach(),
        q=q.weight.detach(), k=k.weight.detach(), v=v.weight.detach(),
        biases=(q.bias.detach(), k.bias.detach(), v.bias.detach()) if has_bias else None,
        head_norms=None if q_norm is None else (q_norm.weight.detach(), attention.k_norm.weight.detach()),
        sinks=None if sinks is None else sinks.detach(),
        o=o.weight.detach(), o_bias=None if o_bias is None else o_bias.detach(),
        post_norm=layer.post_attention_layernorm.weight.detach(),
        mlp=_experts(mlp) if has_experts else _gated(mlp, index),
        windowed=getattr(attention, "sliding_window", None) is not None,
        adapters={kind: group for kind, group in adapters.items() if group},
    )  # fmt: skip


def _gated(mlp: Any, index: int) -> GatedWeights:
    matrices = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        module = _base(getattr(mlp, name))
        _plain_linear(module, f"layers.{index}.{name}", bias=False)
        matrices.append(module.weight.detach())
    return GatedWeights(*matrices)


def _experts(mlp: Any) -> ExpertWeights:
    router, experts = mlp.router, mlp.experts
    return ExpertWeights(
        router=router.weight.detach(), router_bias=router.bias.detach(),
        gate_up=experts.gate_up_proj.detach(), gate_up_bias=experts.gate_up_proj_bias.detach(),
        down=experts.down_proj.detach(), down_bias=experts.down_proj_bias.detach(),
        top_k=router.top_k, alpha=experts.alpha, limit=experts.limit,
    )  # fmt: skip


def _base(module: Any) -> Any:
    """The layer inside a LoRA wrapper of peft's, or the layer."""
    return module.base_layer if hasattr(module, "lora_A") else module


def _adapters(modules: tuple[Any, ...], name: str) -> tuple[Adapter, ...]:
    """Of the matrices of one product: all have one of the same rank, or none has."""
    found = []
    for module in modules:
        if not hasattr(module, "lora_A"):
            continue
        names, variants = module.active_adapters, module.lora_variant
        dropped = any(not isinstance(dropout, nn.Identity) for dropout in module.lora_dropout.values())
        if len(names) != 1 or module.merged or module.disable_adapters or variants or dropped:
            raise UnsupportedModel(f"{name} has adapters that are not one plain LoRA each, switched on and unmerged")
        a, b = module.lora_A[names[0]].weight.detach(), module.lora_B[names[0]].weight.detach()
        found.append(Adapter(a, b, module.scaling[names[0]]))
    if found and (len(found) < len(modules) or len({(adapter.a.shape, adapter.scale) for adapter in found}) > 1):
        raise UnsupportedModel(f"{name} matrices have adapters of different ranks or scales")
    return tuple(found)


def _plain_linear(module: Any, name: str, *, bias: bool) -> None:
    """Refuse anything but a bare Linear: a wrapper computes more than its weight says."""
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


def distance(base: Tensor, other: Tensor) -> int:
    """Elements from base to other, two tensors anywhere in the device's one address space."""
    bytes_apart = other.data_ptr() - base.data_ptr()
    if bytes_apart % base.element_size():
        raise ValueError("two weights of one layer are not a whole number of elements apart")
    return bytes_apart // base.element_size()
