"""Decoder layers of Qwen3, Qwen2 and Llama over fused kernels: the forwards of their modules, restated, for CUDA.

`fuse` gives a model's own modules other `forward` methods; modules, parameters and their names stay as they are, so
that DeepSpeed, LoRA and the decode kernels see what they always see. Between the products there are then four
kernels a layer instead of about thirty. Rounding points are the modules' own. The same forwards serve the prefill of a
rollout, which calls the same modules.

Left out: every other family, whose modules run as they are.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

from modeling.attention import Rows
from modeling.train_gate import gated_down, silu_gate
from modeling.train_norm import add_norm, norm
from modeling.train_rotary import norm_rotate


def fuse(model: Any) -> None:
    """Changes a causal LM of a family that `modeling.families.can_fuse` accepts, in place."""
    base = model.base_model
    base.norm.forward = MethodType(_norm_forward, base.norm)
    for layer in base.layers:
        layer.forward = MethodType(_layer_forward, layer)
        layer.self_attn.forward = MethodType(_attention_forward, layer.self_attn)
        layer.mlp.forward = MethodType(_mlp_forward, layer.mlp)


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return norm(hidden_states, self.weight, self.variance_epsilon)[1]


def _layer_forward(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], rows: Rows, **_: Any
) -> Tensor:
    """hidden_states [1, N, hidden]; position_embeddings: cos and sin, each [1, N, D]"""
    before, after = self.input_layernorm, self.post_attention_layernorm
    hidden, normed = norm(hidden_states, before.weight, before.variance_epsilon)
    attended = self.self_attn(normed, position_embeddings, rows)
    hidden, normed = add_norm(hidden, attended, after.weight, after.variance_epsilon)
    return hidden + self.mlp(normed)


def _attention_forward(self: Any, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], rows: Rows) -> Tensor:
    """[1, N, hidden] -> [1, N, hidden]"""
    q, k, v = (
        project(hidden)[0].unflatten(1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
    )  # [N, heads, D]
    norms = (self.q_norm.weight, self.k_norm.weight) if hasattr(self, "q_norm") else None
    eps = self.q_norm.variance_epsilon if norms else 0.0
    cos, sin = position_embeddings
    q, k = norm_rotate(q, k, norms, cos[0], sin[0], eps)
    out = rows.attend(self.layer_idx, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), self.scaling)
    return self.o_proj(out.flatten(1)[None])


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
    if type(down) is nn.Linear and down.bias is None:
        return gated_down(gate, up, down.weight)
    return down(silu_gate(gate, up))  # an adapter's wrapper computes more than its weight says
