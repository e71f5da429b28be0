"""Forecasts a run's memory from its shape and settings alone; bytes of one process.

Sums of tensors, without the allocator's slack and the libraries' buffers: accurate to about 30 %. Model states
follow ZeRO-2: weights whole; gradients, fp32 copies and Adam moments in 1 / world_size parts. A teacher's pass comes
between rollout and update, and has its own peak. `micro_batch_tokens` answers train.max_tokens_per_micro_batch
"auto" from the same sums.

Left out: that prompts with teacher.privilege are longer than the policy's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from config import Config, UserError
from modeling.activations import LAYERS_AT_ONCE
from modeling.logprob import CHUNK_LOGITS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GIGABYTE = 1e9
MOST_TOKENS = 32_768  # beyond it a larger micro-batch gains nothing that was measured
FEW_TOKENS = 8192  # below it the reduction of a micro-batch's gradients costs more than recomputing layers
STEP = 1024  # tokens that "auto" counts in
GATHERED = 1_000_000_000  # most parameters that ZeRO-3 has whole at a time, DeepSpeed's stage3_max_live_parameters


class OutOfMemory(UserError, RuntimeError):
    """The GPU's memory is full."""

    of_one_rank = True


@contextmanager
def naming_the_setting(config: Config) -> Iterator[None]:
    """Turns torch's out-of-memory error into one line that names the settings to lower. Raises OutOfMemory."""
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
    """Bytes; `update` is allocated and freed with each micro-batch, the rest stays."""

    weights: int
    gradients: int
    optimizer: int
    kv_cache: int
    update: int  # activations and logits of one full micro-batch
    kept_layers: int  # whose activations are not computed again in the backward pass
    layers: int
    optimizer_on_host: bool
    teacher: TeacherMemory | None = None
    teacher_pass: int = 0  # of one full micro-batch, with the weights that come for it; no gradients are there then

    @property
    def device(self) -> int:
        states = (0 if self.optimizer_on_host else self.optimizer) + (self.teacher.resident if self.teacher else 0)
        return self.weights + states + self.kv_cache + self.to_come

    @property
    def to_come(self) -> int:
        """What a step allocates beside what stays."""
        return max(self.gradients + self.update, self.teacher_pass)

    def __str__(self) -> str:
        teacher = self.teacher and (
            f", teacher's weights {self.teacher.resident / GIGABYTE:.2f} and "
            f"{self.teacher.host / GIGABYTE:.2f} on the host, "
            f"its pass before the update {self.teacher_pass / GIGABYTE:.2f}"
        )
        return (
            f"about {self.device / GIGABYTE:.2f} GB on the device (weights {self.weights / GIGABYTE:.2f}, gradients "
            f"{self.gradients / GIGABYTE:.2f}, optimizer {self.optimizer / GIGABYTE:.2f}"
            f"{' on the host' if self.optimizer_on_host else ''}, KV cache {self.kv_cache / GIGABYTE:.2f}, "
            f"update {self.update / GIGABYTE:.2f} with {self.kept_layers} of {self.layers} layers kept{teacher or ''})"
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
        return (self.optimizer if self.optimizer_on_host else 0) + (self.teacher.host if self.teacher else 0)


@dataclass(frozen=True, slots=True)
class TeacherMemory:
    """Bytes that the teacher of on-policy distillation takes in one process."""

    shape: PretrainedConfig
    size: int  # of an element
    resident: int = 0  # on the device all the time
    host: int = 0
    lent: int = 0  # on the device for the pass alone
    kept: int = 0  # of these, the LM head, which the update reads
    samples: bool = False  # scores the sampled tokens in its pass and leaves nothing for the update to multiply

    def of_pass(self, tokens: int) -> int:
        """Nothing is kept for a backward: one layer at a time, and what enters and leaves it."""
        at_work = tokens * (_layer_bytes(self.shape, self.size) + 2 * self.shape.hidden_size * self.size)
        return self.lent + at_work + (_logits(self.shape, tokens) if self.samples else 0)

    def of_update(self, tokens: int) -> int:
        return 0 if self.samples else self.kept + _logits(self.shape, tokens)


def teacher_memory(
    config: Config, shape: PretrainedConfig, parameters: int, world_size: int, on_gpu: bool
) -> TeacherMemory:
    """For loss.distill_weight above 0; it follows `startup.building.build_teacher` and update/teacher.py.

    shape, parameters: the teacher's; on_gpu: else device and host are one memory
    """
    own, size = config.teacher, 4 if config.model.dtype == "float32" else 2
    weights, head = size * parameters, size * shape.vocab_size * shape.hidden_size
    waits = own.placement == "offload" and on_gpu
    if own.source == "live":
        parts = {"lent": head, "kept": head}
    elif own.source == "base" and config.lora.rank:
        parts = {}
    elif own.source == "ema":  # a mean in fp32, and a copy of it in the model's dtype
        parts = {"host" if waits else "resident": 4 * parameters, "lent": weights, "kept": head}
    elif own.placement == "zero3":
        parts = {"resident": head, "host": weights // world_size, "lent": size * min(parameters, GATHERED)}
    else:
        parts = {"host": weights, "lent": weights, "kept": head} if waits else {"resident": weights}
    return TeacherMemory(shape, size, samples=own.divergence == "sampled", **parts)


def forecast(
    config: Config, shape: PretrainedConfig, parameters: int, kv_cache: int, world_size: int, room: int | None = None,
    trained: int | None = None, teacher: TeacherMemory | None = None,
) -> Memory:  # fmt: skip
    """shape: the Hugging Face config; parameters: their number; kv_cache: bytes, as allocated.

    trained: how many of the parameters are; None: all, as without lora.rank
    room: bytes that a micro-batch may take, where model.gradient_checkpointing is "auto" on a GPU
    """
    wide = config.model.dtype == "float32"
    part = (parameters if trained is None else trained) // world_size
    tokens = config.micro_batch_tokens
    taught = teacher.of_update(tokens) if teacher else 0
    update, kept = _update(config, shape, tokens, None if room is None else room - taught)
    return Memory(
        weights=(4 if wide else 2) * parameters,
        gradients=part * (4 if wide else 2 + 4),  # bf16 adds its fp32 sum over micro-batches
        optimizer=part * 12,  # fp32 weights and two moments
        kv_cache=kv_cache,
        update=update + taught,
        kept_layers=kept,
        layers=shape.num_hidden_layers,
        optimizer_on_host=config.train.offload_optimizer,
        teacher=teacher,
        teacher_pass=teacher.of_pass(tokens) if teacher else 0,
    )


def micro_batch_tokens(
    config: Config, shape: PretrainedConfig, room: int, teacher: TeacherMemory | None = None, gradients: int = 0
) -> int:
    """The most tokens, up to a limit, whose layers can all be kept in `room` bytes; at least one sequence's.

    Fewer layers are kept rather than fewer than FEW_TOKENS tokens taken, and less than that only where nothing else
    fits. The teacher's pass must fit too.

    room: bytes beside the gradients, of which a teacher's pass finds `gradients` bytes more
    """
    longest = config.rollout.context_length

    def fits(tokens: int, kept: int) -> bool:
        taught = teacher.of_update(tokens) if teacher else 0
        if teacher and teacher.of_pass(tokens) > room + gradients:
            return False
        return _activations(config, shape, tokens, kept) + _logits(shape, tokens) + taught <= room

    def largest(kept: int) -> int:
        return max((tokens for tokens in range(STEP, MOST_TOKENS + 1, STEP) if fits(tokens, kept)), default=STEP)

    return max(longest, largest(shape.num_hidden_layers), min(FEW_TOKENS, largest(0)))


def _update(config: Config, shape: PretrainedConfig, tokens: int, room: int | None) -> tuple[int, int]:
    """Bytes of activations and logits, and the number of layers kept."""
    choice, layers = config.model.gradient_checkpointing, shape.num_hidden_layers
    if choice == "auto" and room is not None:
        left = room - _logits(shape, tokens)
        kept = next((k for k in range(layers, 0, -1) if _activations(config, shape, tokens, k) <= left), 0)
    else:
        kept = 0 if choice else layers
    return _activations(config, shape, tokens, kept) + _logits(shape, tokens), kept


def _activations(config: Config, shape: PretrainedConfig, tokens: int, kept: int) -> int:
    """Of `kept` layers in full, of the others what enters them, and of the layers at work in the backward pass."""
    size = 4 if config.model.dtype == "float32" else 2
    layers = shape.num_hidden_layers
    at_work = min(LAYERS_AT_ONCE, layers) if kept < layers else 0
    return tokens * ((kept + at_work) * _layer_bytes(shape, size) + (layers - kept) * shape.hidden_size * size)


def _layer_bytes(shape: PretrainedConfig, size: int) -> int:
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


def _logits(shape: PretrainedConfig, tokens: int) -> int:
    return 3 * 4 * min(CHUNK_LOGITS, tokens * shape.vocab_size)  # logits, their softmax, and a gradient, fp32
