"""The run's settings: JSON sections into frozen dataclasses, dotted overrides, and every check that needs no model.

Invariants: a `Config` that exists is consistent; nothing rewrites it; every field is read somewhere outside this file
and `settings/` (`tests/test_config.py` asserts that). Checks that need the tokenizer, the weights or the world size
live where those are first known, but still before the GPU is touched. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from configs.schema import ConfigError, UserError, apply_override, parse_sections, read_json, require
from settings.loss import LoraConfig, LossConfig
from settings.model import ModelConfig
from settings.teacher import TeacherConfig, check_distillation
from settings.watch import EvalConfig, LogConfig

__all__ = ["Config", "ConfigError", "ModelConfig", "UserError", "load_config", "parse_config", "with_defaults"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    path: str = ""  # JSONL, one problem a line
    prompt_field: str = "prompt"  # text of the user turn
    answer_field: str = "answer"  # reference answer, a non-empty string or a number
    hint_field: str = ""  # text for teacher.privilege; empty: problems have none
    system_prompt: str = ""  # empty: the template's own system turn
    shuffle: bool = True  # the order is a function of (train.seed, epoch) alone
    over_long_prompts: Literal["refuse", "drop"] = "refuse"

    def __post_init__(self) -> None:
        require(bool(self.path), "data.path", self.path, "name a JSONL file with one problem a line")
        for name in ("prompt_field", "answer_field"):
            require(bool(getattr(self, name)), f"data.{name}", "", "name a field of data.path's lines")
        require(
            self.prompt_field != self.answer_field, "data.answer_field", self.answer_field,
            "must differ from data.prompt_field",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    trajectories_per_step: int = 64
    samples_per_prompt: int = 8
    max_turns: int = 16  # assistant turns; each but the last may call the tool
    max_new_tokens: int = 2048  # per turn
    context_length: int = 8192  # prompt, turns and tool results together
    temperature: float = 1.0
    decode_rows: int = 16  # rows that decode at once; the largest CUDA graph
    page_size: int = 16  # tokens per KV page
    kv_memory_fraction: float = 0.5  # of the GPU memory that is free after the engine is built; CUDA only
    release_kv: bool = False  # on CUDA: the update gets the KV cache's memory; taken back, as zeros, for each rollout
    kv_tokens: int | None = None  # tokens of KV cache; None: by kv_memory_fraction (CUDA), full contexts (CPU)
    prefill_tokens: int = 2048  # most prompt and tool tokens read in one step
    # With graphs: a row's new tokens, if these or fewer, are read in the steps in which the others decode; more are
    # read by one forward of their own, for which all wait.
    forced_tokens: int = 512
    cuda_graphs: bool = True  # on CUDA: decode inside captured graphs
    deterministic: bool = False  # deliver tool results in submission order, so that timing cannot reorder anything
    # Groups of equal rewards are dropped, and up to so many further rounds sample other problems in their place; 0:
    # none is, and they stay in the denominators of the loss.
    max_refills: int = 0

    def __post_init__(self) -> None:
        for name in (
            "trajectories_per_step", "max_turns", "max_new_tokens", "context_length", "decode_rows", "page_size",
            "prefill_tokens",
        ):  # fmt: skip
            value = getattr(self, name)
            require(value >= 1, f"rollout.{name}", value, "must be at least 1")
        require(self.max_refills >= 0, "rollout.max_refills", self.max_refills, "must be 0 (off) or more rounds")
        require(self.forced_tokens >= 0, "rollout.forced_tokens", self.forced_tokens, "must be 0 (never) or more")
        require(self.samples_per_prompt >= 1, "rollout.samples_per_prompt", self.samples_per_prompt, "at least 1")
        rest = self.trajectories_per_step % self.samples_per_prompt
        require(
            rest == 0, "rollout.trajectories_per_step", self.trajectories_per_step,
            f"must be a multiple of rollout.samples_per_prompt={self.samples_per_prompt}; "
            f"the next smaller is {self.trajectories_per_step - rest}, "
            f"the next larger {self.trajectories_per_step - rest + self.samples_per_prompt}",
        )  # fmt: skip
        require(
            self.temperature > 0, "rollout.temperature", self.temperature,
            "training samples from softmax(logits / temperature); set it above 0, usually 1",
        )  # fmt: skip
        require(
            self.max_new_tokens < self.context_length, "rollout.max_new_tokens", self.max_new_tokens,
            f"leaves no room for a prompt in rollout.context_length={self.context_length}; lower it",
        )  # fmt: skip
        require(
            0 < self.kv_memory_fraction < 1, "rollout.kv_memory_fraction", self.kv_memory_fraction,
            "is a share of free GPU memory, between 0 and 1",
        )  # fmt: skip
        require(
            self.kv_tokens is None or self.kv_tokens >= self.context_length, "rollout.kv_tokens", self.kv_tokens,
            f"must hold one full context, rollout.context_length={self.context_length}",
        )  # fmt: skip

    @property
    def prompts_per_step(self) -> int:
        return self.trajectories_per_step // self.samples_per_prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolConfig:
    enabled: bool = True
    timeout_seconds: float = 10.0  # wall, from the moment the program is handed to its child
    memory_mb: int = 1024  # above what the interpreter and its preloaded libraries take
    max_output_chars: int = 4000  # shown to the model: head and tail, the cut named between them
    max_running: int | None = None  # programs at once; None: this rank's share of cores - 2, at least 2
    show_last_value: bool = False  # show a bare last expression, as a notebook does
    import_filter: Literal["on", "off"] = "on"  # allowlist of imports; off is for hosts with a full boundary
    require: Literal["boundary", "best_effort"] = "best_effort"  # boundary: refuse to train without all kernel layers
    preload: tuple[str, ...] = ("numpy", "sympy")  # imported once, before children are forked

    def __post_init__(self) -> None:
        require(self.timeout_seconds > 0, "tool.timeout_seconds", self.timeout_seconds, "must be above 0 seconds")
        require(self.memory_mb >= 16, "tool.memory_mb", self.memory_mb, "a program needs at least 16 MiB")
        require(
            self.max_output_chars >= 100, "tool.max_output_chars", self.max_output_chars,
            "must leave room for head, tail and the note between them; set at least 100",
        )  # fmt: skip
        require(
            self.max_running is None or self.max_running >= 1, "tool.max_running", self.max_running,
            "must be at least 1, or null for cores - 2",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    scale: Literal["none", "std"] = "none"  # group advantage: reward - mean, or that over the group's std
    tool_bonus: float = 0.0  # added to the reward of a wrong trajectory that ran a call without an error

    def __post_init__(self) -> None:
        require(
            0 <= self.tool_bonus < 1, "reward.tool_bonus", self.tool_bonus,
            "must lie in [0, 1), so that a wrong trajectory stays below 0",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    steps: int = 100
    seed: int = 0
    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear"] = "constant"  # linear: to zero at train.steps
    warmup_steps: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    weight_decay: float = 0.0  # never on norms, biases and embeddings
    max_grad_norm: float = 1.0
    updates_per_rollout: int = 1  # optimizer steps, each on its own share of the step's groups
    max_bad_steps: int = 3  # steps in a row with a loss or gradient that is not finite, before the run stops
    # Of packed rows; auto: as many as keep their activations in the GPU's free memory, from a forecast at the start.
    max_tokens_per_micro_batch: int | Literal["auto"] = "auto"
    zero_stage: int = 2  # 2: gradients and optimizer dealt to the ranks; 1: the optimizer alone
    offload_optimizer: bool = False  # Adam moments and fp32 weights in host memory
    save_every: int = 0  # steps between checkpoints; 0: only after the last step
    keep_checkpoints: int = 0  # newest checkpoints to keep, beside the best by evaluation; 0: all
    max_minutes: float | None = None  # wall time after which the run saves and ends with status 0; null: no limit
    num_threads: int | None = None  # torch CPU threads per process; None: torch's own choice
    check: bool = True  # before the first step, run what `main.py check` runs

    def __post_init__(self) -> None:
        require(self.steps >= 1, "train.steps", self.steps, "must be at least 1")
        require(self.learning_rate > 0, "train.learning_rate", self.learning_rate, "must be above 0")
        require(
            0 <= self.warmup_steps < self.steps, "train.warmup_steps", self.warmup_steps,
            f"must be 0 or more and less than train.steps={self.steps}; lower it too",
        )  # fmt: skip
        for name in ("adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"train.{name}", value, "must lie in [0, 1)")
        require(self.weight_decay >= 0, "train.weight_decay", self.weight_decay, "must not be negative")
        require(self.max_grad_norm > 0, "train.max_grad_norm", self.max_grad_norm, "must be above 0")
        tokens = self.max_tokens_per_micro_batch
        require(
            tokens == "auto" or tokens >= 1, "train.max_tokens_per_micro_batch", tokens, "must be at least 1 token"
        )  # fmt: skip
        require(
            self.zero_stage in (1, 2), "train.zero_stage", self.zero_stage,
            "must be 1 or 2; at 0 DeepSpeed cannot add up bf16 gradients in fp32 (on one rank all are the same)",
        )  # fmt: skip
        require(self.updates_per_rollout >= 1, "train.updates_per_rollout", self.updates_per_rollout, "at least 1")
        require(self.max_bad_steps >= 1, "train.max_bad_steps", self.max_bad_steps, "must be at least 1")
        require(self.keep_checkpoints >= 0, "train.keep_checkpoints", self.keep_checkpoints, "must be 0 (all) or more")
        require(
            self.max_minutes is None or self.max_minutes > 0, "train.max_minutes", self.max_minutes,
            "must be above 0, or null for no limit",
        )  # fmt: skip
        require(self.save_every >= 0, "train.save_every", self.save_every, "must be 0 (only at the end) or more")
        require(
            self.num_threads is None or self.num_threads >= 1, "train.num_threads", self.num_threads,
            "must be at least 1, or null",
        )  # fmt: skip


AUTO_TOKENS = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tool: ToolConfig = field(default_factory=ToolConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require(
            self.micro_batch_tokens >= self.rollout.context_length,
            "train.max_tokens_per_micro_batch", self.train.max_tokens_per_micro_batch,
            f"must hold the longest trajectory, rollout.context_length={self.rollout.context_length}",
        )  # fmt: skip
        require(
            self.train.updates_per_rollout <= self.rollout.prompts_per_step,
            "train.updates_per_rollout", self.train.updates_per_rollout,
            f"a step has {self.rollout.prompts_per_step} groups, and each update needs one of its own; lower it",
        )  # fmt: skip
        require(
            self.rollout.max_turns == 1 or self.tool.enabled, "rollout.max_turns", self.rollout.max_turns,
            "without a tool every trajectory has one turn; set 1, or tool.enabled true",
        )  # fmt: skip
        samples, pure = self.rollout.samples_per_prompt, self.loss.distill_weight == 1
        require(
            samples >= 2 or pure, "rollout.samples_per_prompt", samples,
            "a group advantage compares samples of one prompt; set at least 2, or loss.distill_weight=1",
        )  # fmt: skip
        if self.loss.distill_weight > 0:
            check_distillation(self)

    @property
    def teacher_model(self) -> ModelConfig:
        """Of a teacher with weights of its own: built as the policy is, from another place."""
        return (
            self.model if self.teacher.source != "model" else dataclasses.replace(self.model, path=self.teacher.path)
        )

    @property
    def micro_batch_tokens(self) -> int:
        """train.max_tokens_per_micro_batch; on CPU "auto" is a constant, so that a resumed run splits alike."""
        tokens = self.train.max_tokens_per_micro_batch
        return max(AUTO_TOKENS, self.rollout.context_length) if tokens == "auto" else tokens

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


_WHOLE_SOFTMAX = "training samples the whole softmax, since that is the distribution the update differentiates"
# Keys people bring from other trainers, with the reason why they are not settings here.
_FOREIGN = {
    "top_p": f"{_WHOLE_SOFTMAX}; eval.top_p is for evaluation",
    "top_k": f"{_WHOLE_SOFTMAX}; eval.top_k is for evaluation",
    "router_aux_loss_coef": "the auxiliary loss of whole batches depends on their split; set loss.router_balance",
    "batch_size": "set rollout.trajectories_per_step and train.max_tokens_per_micro_batch",
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a JSON file and applies `section.field=value` overrides (JSON values; a bare word is a string).

    Raises ConfigError with field, value and mend; nothing is written and no model is built.
    """
    raw = read_json(path)
    for text in overrides:
        apply_override(raw, text)
    return parse_config(raw)


def parse_config(raw: dict[str, Any]) -> Config:
    """A dictionary of sections into a checked `Config`. Raises ConfigError."""
    return parse_sections(Config, raw, _FOREIGN)


def with_defaults(resolved: dict[str, Any]) -> dict[str, Any]:
    """The resolved settings of a run; those that came after it at their defaults, which do what was done before."""
    sections = typing.get_type_hints(Config)
    known = {name: {f.name: f.default for f in dataclasses.fields(cls)} for name, cls in sections.items()}
    defaults = json.loads(json.dumps(known))
    return resolved | {name: defaults[name] | resolved.get(name, {}) for name in defaults}
