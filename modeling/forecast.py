"""What a run will hold in memory, from its shape and settings alone; bytes of one process.

Sums of tensors, without the allocator's slack and the libraries' own buffers, so read it as +-30 %. Model states
follow ZeRO-2: weights whole; gradients, fp32 copies and Adam moments in 1 / world_size parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from config import Config
from modeling.logprob import CHUNK_LOGITS

GIGABYTE = 1e9
_LAYER_WIDTHS = 8  # hidden-sized tensors that one layer keeps for its backward, beside the MLP's three


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes; `update` comes and goes with the micro-batches, the rest stays."""

    weights: int
    gradients: int
    optimizer: int
    kv_cache: int
    update: int  # activations and logits of one full micro-batch
    optimizer_on_host: bool
    kv_released: bool  # the cache and the update are never there together

    @property
    def device(self) -> int:
        states = 0 if self.optimizer_on_host else self.optimizer
        phases = (self.kv_cache, self.update)
        return self.weights + self.gradients + states + (max(phases) if self.kv_released else sum(phases))

    def __str__(self) -> str:
        return (
            f"about {self.device / GIGABYTE:.2f} GB on the device (weights {self.weights / GIGABYTE:.2f}, gradients "
            f"{self.gradients / GIGABYTE:.2f}, optimizer {self.optimizer / GIGABYTE:.2f}"
            f"{' on the host' if self.optimizer_on_host else ''}, KV cache {self.kv_cache / GIGABYTE:.2f}, "
            f"update {self.update / GIGABYTE:.2f})"
        )

    @property
    def host(self) -> int:
        return self.optimizer if self.optimizer_on_host else 0


def forecast(config: Config, shape: Any, parameters: int, kv_cache: int, world_size: int) -> Memory:
    """shape: the Hugging Face config; parameters: their number; kv_cache: bytes, as allocated."""
    wide = config.model.dtype == "float32"
    size = 4 if wide else 2
    tokens = config.train.max_tokens_per_micro_batch
    layer = tokens * size * (_LAYER_WIDTHS * shape.hidden_size + 3 * shape.intermediate_size)
    if config.model.gradient_checkpointing:
        activations = layer + shape.num_hidden_layers * tokens * shape.hidden_size * size
    else:
        activations = layer * shape.num_hidden_layers
    logits = 3 * 4 * min(CHUNK_LOGITS, tokens * shape.vocab_size)  # logits, their softmax, and a gradient, fp32
    part = parameters // world_size
    return Memory(
        weights=size * parameters,
        gradients=part * (4 if wide else 2 + 4),  # bf16 adds its fp32 sum over micro-batches
        optimizer=part * 12,  # fp32 weights and two moments
        kv_cache=kv_cache,
        update=activations + logits,
        optimizer_on_host=config.train.offload_optimizer,
        kv_released=config.rollout.release_kv,
    )
