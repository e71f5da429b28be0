"""What a run will hold in memory, from its shape and settings alone; bytes of one process.

Sums of tensors, without the allocator's slack and the libraries' own buffers, so read it as +-30 %. Model states
follow ZeRO-2: weights whole; gradients, fp32 copies and Adam moments in 1 / world_size parts. `micro_batch_tokens`
answers train.max_tokens_per_micro_batch "auto" from the same sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from config import Config, UserError
from modeling.logprob import CHUNK_LOGITS
from modeling.recompute import LAYERS_AT_ONCE

GIGABYTE = 1e9
MOST_TOKENS = 32_768  # beyond it a larger micro-batch gains nothing that was measured
FEW_TOKENS = 8192  # below it the reduction of a micro-batch's gradients costs more than recomputing layers
STEP = 1024  # tokens that "auto" counts in


class OutOfMemory(UserError, RuntimeError):
    """The GPU is full."""

    of_one_rank = True


@contextmanager
def naming_the_setting(config: Config) -> Iterator[None]:
    """Turns torch's error of a full GPU into one line that names the settings to lower. Raises OutOfMemory."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        allocated, reserved = torch.cuda.memory_allocated() / GIGABYTE, torch.cuda.memory_reserved() / GIGABYTE
        most = torch.cuda.max_memory_allocated() / GIGABYTE
        raise OutOfMemory(
            f"out of GPU memory ({allocated:.1f} GB allocated now, {most:.1f} at most, {reserved:.1f} reserved; "
            f"{str(error).split('.')[0]}): lower train.max_tokens_per_micro_batch={config.micro_batch_tokens} or "
            f"rollout.kv_memory_fraction={config.rollout.kv_memory_fraction}, set model.gradient_checkpointing=true, "
            "or train.offload_optimizer=true"
        ) from error


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes; `update` comes and goes with the micro-batches, the rest stays."""

    weights: int
    gradients: int
    optimizer: int
    kv_cache: int
    update: int  # activations and logits of one full micro-batch
    kept_layers: int  # whose activations are not computed again in the backward pass
    layers: int
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
            f"update {self.update / GIGABYTE:.2f} with {self.kept_layers} of {self.layers} layers kept)"
        )

    def against_peak(self) -> str:
        """The forecast beside what the first step took."""
        peak, reserved = torch.cuda.max_memory_allocated() / GIGABYTE, torch.cuda.max_memory_reserved() / GIGABYTE
        return (
            f"memory: {peak:.2f} GB allocated at most in the first step ({reserved:.2f} reserved), "
            f"{self.device / GIGABYTE:.2f} forecast"
        )

    @property
    def host(self) -> int:
        return self.optimizer if self.optimizer_on_host else 0


def forecast(
    config: Config, shape: Any, parameters: int, kv_cache: int, world_size: int, room: int | None = None,
    trained: int | None = None,
) -> Memory:  # fmt: skip
    """shape: the Hugging Face config; parameters: their number; kv_cache: bytes, as allocated.

    trained: how many of the parameters are; None: all, as without lora.rank
    room: bytes that a micro-batch may take, where model.gradient_checkpointing is "auto" on a GPU
    """
    wide = config.model.dtype == "float32"
    part = (parameters if trained is None else trained) // world_size
    update, kept = _update(config, shape, config.micro_batch_tokens, room)
    return Memory(
        weights=(4 if wide else 2) * parameters,
        gradients=part * (4 if wide else 2 + 4),  # bf16 adds its fp32 sum over micro-batches
        optimizer=part * 12,  # fp32 weights and two moments
        kv_cache=kv_cache,
        update=update,
        kept_layers=kept,
        layers=shape.num_hidden_layers,
        optimizer_on_host=config.train.offload_optimizer,
        kv_released=config.rollout.release_kv,
    )


def micro_batch_tokens(config: Config, shape: Any, room: int) -> int:
    """The most tokens, up to a limit, whose layers can all be kept in `room` bytes; but no fewer than one row needs.

    Fewer layers are kept rather than fewer than FEW_TOKENS tokens taken, and less than that only where nothing else
    fits.
    """
    longest = config.rollout.context_length
    kept_in_all = _largest(config, shape, room, shape.num_hidden_layers)
    kept_in_none = _largest(config, shape, room, 0)
    return max(longest, kept_in_all, min(FEW_TOKENS, kept_in_none))


def _largest(config: Config, shape: Any, room: int, kept: int) -> int:
    counts = range(STEP, MOST_TOKENS + 1, STEP)
    return max((t for t in counts if _activations(config, shape, t, kept) + _logits(shape, t) <= room), default=STEP)


def _update(config: Config, shape: Any, tokens: int, room: int | None) -> tuple[int, int]:
    """Bytes of activations and logits, and the number of layers kept."""
    choice, layers = config.model.gradient_checkpointing, shape.num_hidden_layers
    if choice == "auto" and room is not None:
        wanted = (_activations(config, shape, tokens, k) + _logits(shape, tokens) for k in range(layers, 0, -1))
        kept = layers - sum(bytes_ > room for bytes_ in wanted)
    else:
        kept = 0 if choice else layers
    return _activations(config, shape, tokens, kept) + _logits(shape, tokens), kept


def _activations(config: Config, shape: Any, tokens: int, kept: int) -> int:
    """Of `kept` layers in full, of the others what enters them, and of the layers at work in the backward pass."""
    size = 4 if config.model.dtype == "float32" else 2
    layers = shape.num_hidden_layers
    at_work = min(LAYERS_AT_ONCE, layers) if kept < layers else 0
    return tokens * ((kept + at_work) * _layer_bytes(shape, size) + (layers - kept) * shape.hidden_size * size)


def _layer_bytes(shape: Any, size: int) -> int:
    """Bytes a token that one layer keeps: the residual and its norm twice, q and k before and after the rotation, v,
    what attention gives, and the MLP's gate and up (and their product, where the kernels do not compute it again).

    Of a mixture, for each expert of the token: its input and output twice, gate and up, and what comes of them.
    """
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    head_size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    mlp = 3 * shape.intermediate_size
    if getattr(shape, "num_local_experts", 0):
        mlp = shape.num_experts_per_tok * (4 * shape.hidden_size + 9 * shape.intermediate_size)
    return size * (4 * shape.hidden_size + (3 * heads + 3 * groups) * head_size + mlp)


def _logits(shape: Any, tokens: int) -> int:
    return 3 * 4 * min(CHUNK_LOGITS, tokens * shape.vocab_size)  # logits, their softmax, and a gradient, fp32
