"""The run's settings: JSON sections into frozen dataclasses, dotted overrides, and every check that needs no model.

Each setting is declared once, with default, one line and range; `python main.py settings` prints them. Rules between
settings stand in `rules` of their section, or of `Config` where they cross sections. configs/schema.py reads the JSON.

Invariants: a `Config` that exists is consistent; nothing rewrites it; every field is read somewhere outside this file
(`tests/test_config.py` asserts that). Checks that need the tokenizer, the weights or the world size live where those
are first known, but still before the GPU is touched. Standard library only: a bad setting is refused before anything
heavy is imported.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from configs import paths
from configs.effect import named_settings, require_effect, value_of
from configs.schema import (
    Bounds,
    ConfigError,
    Removed,
    Section,
    UserError,
    apply_override,
    located_spec,
    parse_sections,
    read_json,
    require,
    setting,
    without_removed,
)  # fmt: skip

__all__ = ["Config", "ConfigError", "UserError", "load_config", "parse_config", "with_defaults"]

VERSION = "0.1.0"  # of the program, as in pyproject.toml; each run's config.json holds it


# Where policy losses of sampled tokens count; all of it but loss.policy's denominator is idle elsewhere.
SAMPLED = 'loss.distill_weight < 1 or teacher.divergence == "sampled"'


# fmt: off
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(Section):
    """Which model, how it computes, and how its chat template is filled."""

    path: str = setting(
        "", "Folder or hub name with config, weights, tokenizer and chat template.",
        required="name a model folder, e.g. models/tiny_qwen3")
    tokenizer_path: str = setting("", "Folder or hub name of the tokenizer; empty: model.path.")
    chat_template: str = setting(
        "", "File with a Jinja chat template, e.g. models/templates/hermes.jinja; empty: the tokenizer's own.")
    dtype: Literal["float32", "bfloat16"] = setting("bfloat16", "Dtype of the weights; float32 is meant for a CPU.")
    attn_implementation: Literal["auto", "eager"] = setting(
        "auto", "auto: SDPA on CPU, torch's varlen kernel on CUDA; eager: plain softmax, equal in rollout and update.")
    gradient_checkpointing: bool | Literal["auto"] = setting(
        "auto", "true: recompute every layer in the backward pass; false: none; auto: those that do not fit the GPU.")
    router_replay: bool = setting(False, "Mixtures of experts: the update routes to the experts that sampling chose.")
    random_weights: bool = setting(False, "Random weights from train.seed in the shape of config.json.")
    enable_thinking: bool = setting(
        True, "Hybrid templates; false: every assistant header ends in an empty think block.")
    reasoning_effort: Literal["low", "medium", "high"] | None = setting(
        None, "Effort named in GPT-OSS's system prompt.", null="medium")
    current_date: str | None = setting(
        None, "Date in the prompt, YYYY-MM-DD, of GPT-OSS and of templates that ask for one.",
        null="GPT-OSS: its release date; others: the run's first day")

    def rules(self) -> None:
        day = self.current_date
        self.demand(day is None or _is_date(day), "current_date", "write YYYY-MM-DD, a day that exists, or null")


def _is_date(text: str) -> bool:
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) is None:  # ISO 8601 has more forms
        return False
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Section):
    """The training problems."""

    path: str = setting("", "JSONL file, one problem a line.", required="name a JSONL file with one problem a line")
    prompt_field: str = setting("prompt", "Key of the user turn's text.", required="name a field of data.path's lines")
    answer_field: str = setting(
        "answer", "Key of the reference answer, a non-empty string or a number.",
        required="name a field of data.path's lines")
    hint_field: str = setting("", "Key of the text for {hint} in teacher.privilege; empty: no hints.",
        needs="loss.distill_weight > 0 and teacher.privilege has {hint}")
    system_prompt: str = setting("", "System turn of every prompt; empty: the template's own.")
    shuffle: bool = setting(True, "Shuffle the problems each epoch, by train.seed and epoch alone.")
    over_long_prompts: Literal["refuse", "drop"] = setting(
        "refuse", "What to do with prompts that do not fit rollout.context_length.")

    def rules(self) -> None:
        self.demand(self.prompt_field != self.answer_field, "answer_field", "must differ from data.prompt_field")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig(Section):
    """How many trajectories a step samples, how long they may be, and with what memory."""

    trajectories_per_step: int = setting(64, "Trajectories of one step, over all ranks.", at_least=1)
    samples_per_prompt: int = setting(8, "Trajectories of one prompt: the group of GRPO.", at_least=1)
    max_turns: int = setting(16, "Assistant turns; each but the last may call the tool.", at_least=1)
    max_new_tokens: int = setting(2048, "Most tokens sampled in one turn.", at_least=1)
    context_length: int = setting(8192, "Most tokens of prompt, turns and tool results together.", at_least=1)
    temperature: float = setting(
        1.0, "Sampling temperature of training.", above=0,
        fix="training samples from softmax(logits / temperature); set it above 0, usually 1")
    decode_rows: int = setting(16, "Sequences that decode at once: the width of the largest CUDA graph.", at_least=1)
    page_size: int = setting(16, "Tokens of one KV page.", at_least=1)
    kv_memory_fraction: float = setting(
        0.5, "CUDA: share of the GPU memory left free by the engine that becomes KV cache.", above=0, below=1,
        fix="it is a share of free GPU memory", needs="CUDA and rollout.kv_tokens == null")
    kv_tokens: int | None = setting(
        None, "Tokens of KV cache on each rank.", null="by kv_memory_fraction on CUDA, full contexts on CPU")
    prefill_tokens: int = setting(2048, "Most prompt and tool-result tokens read in one step.", at_least=1)
    forced_tokens: int = setting(
        512, "CUDA graphs: chunks up to this length are prefilled inside decode steps; longer ones stall decoding.",
        at_least=0, zero="never", needs="CUDA and rollout.cuda_graphs")
    cuda_graphs: bool = setting(True, "CUDA: decode inside captured graphs.", needs="CUDA")
    deterministic: bool = setting(False, "Deliver tool results in the order of their calls, whatever their timing.")
    max_refills: int = setting(
        0, "Max extra rounds replacing groups of equal rewards; 0 keeps them in the loss's denominators.",
        at_least=0, zero="off")

    def rules(self) -> None:
        rest = self.trajectories_per_step % self.samples_per_prompt
        self.demand(
            rest == 0, "trajectories_per_step",
            f"must be a multiple of rollout.samples_per_prompt={self.samples_per_prompt}; "
            f"the next smaller is {self.trajectories_per_step - rest}, "
            f"the next larger {self.trajectories_per_step - rest + self.samples_per_prompt}",
        )
        self.demand(
            self.max_new_tokens < self.context_length, "max_new_tokens",
            f"leaves no room for a prompt in rollout.context_length={self.context_length}; lower it",
        )
        self.demand(
            self.kv_tokens is None or self.kv_tokens >= self.context_length, "kv_tokens",
            f"must hold one full context, rollout.context_length={self.context_length}",
        )

    @property
    def prompts_per_step(self) -> int:
        return self.trajectories_per_step // self.samples_per_prompt


ANY_TOOL = "tool.enabled or tool.functions or tool.mcp"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolConfig(Section):
    """The Python tool with its sandbox, your own tools, those of MCP servers, and the limits of all."""

    enabled: bool = setting(True, "Offer the Python tool to the policy.")
    functions: tuple[str, ...] = setting(
        (), "Your own tools: FILE.py:NAME of functions and classes, beside the config or in the working directory.")
    mcp: tuple[str, ...] = setting((), "Commands of MCP servers whose tools are offered; one server of each a rank.")
    timeout_seconds: float = setting(
        10.0, "Wall time of one call, once its process has it.", above=0, needs=ANY_TOOL)
    max_calls_per_turn: int = setting(
        16, "Calls of one turn that run; the rest is answered unrun.", at_least=1, needs=ANY_TOOL)
    max_seconds: float = setting(
        300.0, "Seconds of calls in one trajectory after which further calls are answered unrun.", above=0,
        needs=ANY_TOOL)
    memory_mb: int = setting(
        1024, "MiB of a call above interpreter and preloaded modules.", at_least=16, needs=ANY_TOOL)
    max_output_chars: int = setting(
        4000, "Characters shown to the model: head and tail, with the cut named between them.", at_least=100,
        fix="head, tail and the note between them need room", needs=ANY_TOOL)
    max_running: int | None = setting(
        None, "Calls at once on each rank.", at_least=1, null="the rank's share of cores - 2, at least 2",
        needs=ANY_TOOL)
    show_last_value: bool = setting(False, "Show the value of a bare last expression, as a notebook does.",
        needs="tool.enabled")
    import_filter: Literal["on", "off"] = setting(
        "on", "Allow listed imports alone; off is for hosts whose sandbox has every kernel layer.",
        needs="tool.enabled")
    require: Literal["boundary", "best_effort"] = setting(
        "best_effort", "boundary: refuse to train without all kernel layers of the sandbox.", needs="tool.enabled")
    accept_changed_code: bool = setting(
        False, "Resume although your files (tool.functions, reward.function) have changed.",
        needs="tool.functions or reward.function")
    preload: tuple[str, ...] = setting(("numpy", "sympy"), "Modules imported once, before children are forked.",
        needs="tool.enabled")

    @property
    def offered(self) -> bool:
        """Whether the policy is offered any tool."""
        return self.enabled or self.has_own

    @property
    def has_own(self) -> bool:
        """Whether any of them is the user's."""
        return bool(self.functions or self.mcp)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig(Section):
    """Where rewards come from, and how they become advantages."""

    function: str = setting(
        "", "FILE.py:NAME of score(trajectory, problem), beside the config or in the working directory; empty: the "
        "box rule.")
    timeout_seconds: float = setting(
        30.0, "Wall time of one call of reward.function.", above=0, needs="reward.function")
    scale: Literal["none", "std"] = setting(
        "none", "Group advantage; none: reward - mean; std: that over the group's standard deviation.",
        needs="loss.distill_weight < 1")
    tool_bonus: float = setting(
        0.0, "Added to the reward of a wrong trajectory that ran a call without an error.", at_least=0, below=1,
        fix="a wrong trajectory must stay below 0", needs=f"{ANY_TOOL} and loss.distill_weight < 1")

    def rules(self) -> None:
        self.demand(
            self.tool_bonus == 0 or not self.function, "tool_bonus",
            "reward.function sees the calls and gives the whole reward; set 0 and add the bonus there",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig(Section):
    """Formulas and sources: docs/objectives.md; code: update/losses.py, denominators in update/minibatch.py."""

    policy: Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"] = setting("dapo", "The objective and its denominator.")
    clip_low: float | None = setting(
        None, "Ratios are clipped below 1 - this.", above=0, at_most=1, null="0.2; gspo 3e-4, cispo 1",
        needs=SAMPLED)
    clip_high: float | None = setting(
        None, "Ratios are clipped above 1 + this.", above=0, null="0.28; gspo 4e-4, cispo 4",
        needs=SAMPLED)
    dual_clip: float | None = setting(
        None, "Bound of the ratio where the advantage is negative.", above=1, null="none",
        fix="it bounds ratios from above", needs=SAMPLED)
    old_policy: Literal["rollout", "update"] = setting(
        "rollout", "The ratio's denominator: the policy before all updates of a step, or before each.",
        needs=SAMPLED)
    importance: Literal["off", "token", "sequence", "token_mask", "sequence_mask"] = setting(
        "off", "Importance weights from sampling to training log-probs: truncated, or masked.",
        needs=SAMPLED)
    importance_low: float = setting(
        0.5, "Masks alone: smaller weights become 0.", at_least=0, at_most=1, fix="above 1 it would mask weights of 1",
        needs="loss.importance has mask")
    importance_high: float = setting(2.0, "Larger weights become this, or 0 with a mask.", at_least=1,
        needs='loss.importance != "off"')
    kl_coef: float = setting(0.0, "Weight of the KL to the policy before training.", at_least=0, zero="off")
    kl_estimator: Literal["k2", "k3"] = setting("k3", "Estimator of that KL (Schulman 2020).",
        needs="loss.kl_coef > 0")
    kl_reference: Literal["cpu", "gpu"] = setting("cpu", "Where the reference's weights wait between steps.",
        needs="loss.kl_coef > 0 and lora.rank == 0 and CUDA")
    router_balance: float = setting(
        0.0, "Mixtures of experts: weight of the routers' balance loss, per trajectory.", at_least=0, zero="off")
    overlong_mask: bool = setting(False, "Do not train trajectories that ran out of tokens.")
    overlong_buffer: int = setting(
        0, "Tokens before a limit over which the advantage is lowered, by up to 1.", at_least=0, zero="off",
        needs="loss.distill_weight < 1")
    distill_weight: float = setting(
        0.0, "Share of the teacher's divergence in the loss; 1: nothing else.", at_least=0, at_most=1, zero="off")

    def rules(self) -> None:
        self.demand(
            self.dual_clip is None or self.policy != "cispo", "dual_clip",
            "cispo clips its weights by loss.clip_high alone; set null",
        )
        self.demand(
            self.importance_high > self.importance_low, "importance_high",
            "must be above loss.importance_low, or weights of 1 would be cut",
        )

    @property
    def needs_every_row(self) -> bool:
        """Whether trajectories of advantage 0 have something to train."""
        return self.kl_coef > 0 or self.router_balance > 0 or self.distill_weight > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig(Section):
    """Read where loss.distill_weight is above 0. Formulas: modeling/divergence.py."""

    source: Literal["model", "base", "live", "ema"] = setting(
        "model", "model: that of teacher.path; or the policy: before training (base), now (live), averaged (ema).",
        needs="loss.distill_weight > 0")
    path: str = setting("", "Folder or hub name of source model; its tokenizer must be the policy's.",
        needs="loss.distill_weight > 0")
    ema_decay: float = setting(0.99, "Source ema: decay of the running mean per step.", above=0, below=1,
        needs='loss.distill_weight > 0 and teacher.source == "ema"')
    privilege: str = setting("", "Appended to the user turn that the teacher reads; may hold {answer} and {hint}.",
        needs="loss.distill_weight > 0")
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "sampled"] = setting(
        "reverse_kl", "sampled: reverse KL by policy gradient on sampled tokens; the others: over whole vocabularies.",
        needs="loss.distill_weight > 0")
    beta: float = setting(
        0.5, "Divergence jsd: weight of the teacher in the mixture.", above=0, below=1,
        fix="at the ends use forward_kl or reverse_kl",
        needs='loss.distill_weight > 0 and teacher.divergence == "jsd"')
    temperature: float | None = setting(
        None, "Temperature of both softmaxes, without a factor T^2.", above=0, null="rollout.temperature",
        needs="loss.distill_weight > 0")
    top_k: int = setting(
        0, "Compare the teacher's likeliest tokens, all others as one.", at_least=0, zero="the whole vocabulary",
        needs="loss.distill_weight > 0")
    placement: Literal["offload", "gpu", "zero3"] = setting(
        "offload", "Home of the teacher's weights: host memory, the GPU, or ZeRO-3 over the ranks' host memory.",
        needs="loss.distill_weight > 0")

    def rules(self) -> None:
        source = self.source
        self.demand(
            source == "model" or not self.path, "path",
            f"teacher.source={source!r} is the policy itself; leave it empty, or set teacher.source='model'",
        )
        self.demand(
            source != "live" or bool(self.privilege), "privilege",
            "a live teacher that reads the policy's own prompt teaches nothing; name what it reads besides",
        )
        self.demand(
            self.top_k == 0 or self.divergence != "sampled", "top_k",
            "sampled looks at one token; set 0, or another teacher.divergence",
        )
        self.demand(
            self.placement != "zero3" or source in ("model", "base"), "placement",
            f"teacher.source={source!r} needs its weights whole; set offload or gpu",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig(Section):
    """Adapters on all linear layers but the head, trained in place of the weights and sampled unmerged; needs peft.

    Of a mixture of experts that is the attention alone: router and experts are no linear layers and stay frozen.
    """

    rank: int = setting(0, "Rank of the adapters; 0: all weights train.", at_least=0, zero="off")
    alpha: int = setting(32, "The adapters' output is scaled by alpha / rank.", above=0, needs="lora.rank > 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(Section):
    """Steps, optimizer, memory and checkpoints."""

    steps: int = setting(100, "Steps of the run.", at_least=1)
    seed: int = setting(0, "Seed of data order, sampling noise and random weights.")
    learning_rate: float = setting(1e-6, "Learning rate after warm-up.", above=0)
    schedule: Literal["constant", "linear"] = setting("constant", "After warm-up; linear: to zero at train.steps.")
    warmup_steps: int = setting(0, "Steps of linear warm-up.", at_least=0)
    adam_beta1: float = setting(0.9, "AdamW's beta1.", at_least=0, below=1)
    adam_beta2: float = setting(0.999, "AdamW's beta2.", at_least=0, below=1)
    weight_decay: float = setting(0.0, "Weight decay; never on norms, biases and embeddings.", at_least=0)
    max_grad_norm: float = setting(1.0, "Gradients are clipped to this global norm.", above=0)
    updates_per_rollout: int = setting(1, "Optimizer steps per rollout, each on its own groups.", at_least=1)
    max_bad_steps: int = setting(3, "Steps in a row that are not finite before the run stops.", at_least=1)
    max_tokens_per_micro_batch: int | Literal["auto"] = setting(
        "auto", "Tokens of one packed micro-batch; auto: as many as the memory forecast fits on the GPU.", at_least=1)
    zero_stage: int = setting(
        2, "ZeRO stage; 2: gradients and optimizer sharded over ranks; 1: the optimizer alone.",
        at_least=1, at_most=2, fix="at 0 DeepSpeed cannot add up bf16 gradients in fp32 (on one rank all are equal)")
    offload_optimizer: bool = setting(False, "Keep Adam's moments and fp32 weights in host memory.")
    save_every: int = setting(0, "Steps between checkpoints.", at_least=0, zero="only at the end")
    keep_checkpoints: int = setting(
        0, "Newest checkpoints to keep, and the best by evaluation.", at_least=0, zero="all")
    max_minutes: float | None = setting(
        None, "Minutes after which the run saves and ends with status 0.", above=0, null="no limit")
    num_threads: int | None = setting(None, "torch's CPU threads per process.", at_least=1, null="torch's own choice")
    check: bool = setting(True, "Run `main.py check` before the first step.")

    def rules(self) -> None:
        self.demand(
            self.warmup_steps < self.steps, "warmup_steps", f"must be less than train.steps={self.steps}; lower it too"
        )


AUTO_TOKENS = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig(Section):
    """Evaluation on held-out problems."""

    path: str = setting("", "JSONL file with the fields of data; empty: no evaluation.")
    at_start: bool = setting(False, "Evaluate before the first step too.", needs="eval.path")
    every: int = setting(0, "Steps between evaluations.", at_least=0, zero="only at the end", needs="eval.path")
    samples_per_prompt: int = setting(1, "Samples of each problem.", at_least=1, needs="eval.path")
    temperature: float = setting(1.0, "Sampling temperature of evaluation.", at_least=0, zero="greedy",
        needs="eval.path")
    top_p: float = setting(
        1.0,
        "Draw from the fewest tokens that hold this probability.",
        above=0,
        at_most=1,
        fix="1 draws from all tokens", needs="eval.path and eval.temperature > 0")
    top_k: int = setting(0, "Draw from the k likeliest tokens.", at_least=0, zero="draw from all tokens",
        needs="eval.path and eval.temperature > 0")

    def rules(self) -> None:
        self.demand(
            self.temperature > 0 or self.samples_per_prompt == 1, "samples_per_prompt",
            "greedy samples are all equal; set 1, or eval.temperature above 0",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig(Section):
    """What a run writes and where it is shown."""

    run_dir: str = setting("", "Folder of the run; empty: runs/<name of the config file>.")
    keep_trajectories: int | None = setting(
        100_000, "Newest trajectories to keep on disk, by whole steps; the newest step always stays.",
        at_least=1, null="all")
    trackers: tuple[Literal["wandb", "trackio", "tensorboard"], ...] = setting(
        (), "Trackers to log to; tensorboard is used unnamed where it is installed.")
    project: str = setting("agentic-grpo", "Project under which wandb and trackio file the run.",
        needs="log.trackers has wandb|trackio")
# fmt: on


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All sections. Rules that cross sections are checked here."""

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
            self.rollout.max_turns == 1 or self.tool.offered, "rollout.max_turns", self.rollout.max_turns,
            "without a tool every trajectory has one turn; set 1, tool.enabled true, or tool.functions",
        )  # fmt: skip
        samples, pure = self.rollout.samples_per_prompt, self.loss.distill_weight == 1
        require(
            samples >= 2 or pure, "rollout.samples_per_prompt", samples,
            "a group advantage compares samples of one prompt; set at least 2, or loss.distill_weight=1",
        )  # fmt: skip
        if self.loss.distill_weight > 0:
            _check_distillation(self)

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
        """As a run's `config.json` holds it: every setting, and the version of the program."""
        return json.dumps({"version": VERSION} | dataclasses.asdict(self), indent=2) + "\n"


def _check_distillation(config: Config) -> None:
    """Rules of loss.distill_weight above 0. Raises ConfigError."""
    teacher, weight, rollout = config.teacher, config.loss.distill_weight, config.rollout
    teacher.demand(
        teacher.source != "model" or bool(teacher.path), "path",
        f"loss.distill_weight={weight} needs a teacher; name its folder or hub name",
    )  # fmt: skip
    teacher.demand(
        teacher.divergence != "sampled" or teacher.temperature in (None, rollout.temperature), "temperature",
        f"sampled holds where tokens were drawn, at {rollout.temperature}; set null",
    )  # fmt: skip
    teacher.demand(
        teacher.source != "ema" or config.lora.rank == 0, "source",
        "not with adapters (lora.rank above 0); set base or live",
    )  # fmt: skip
    rollout.demand(
        weight < 1 or rollout.max_refills == 0, "max_refills",
        "drops groups by their rewards, which loss.distill_weight=1 does not look at; set 0",
    )  # fmt: skip
    config.data.demand(
        "{hint}" not in teacher.privilege or bool(config.data.hint_field), "hint_field",
        "teacher.privilege holds {hint}; name the field of data.path that has it",
    )  # fmt: skip


_WHOLE_SOFTMAX = "training samples the whole softmax, since that is the distribution the update differentiates"
# Keys people bring from other trainers, with the reason why they are not settings here.
_FOREIGN = {
    "top_p": f"{_WHOLE_SOFTMAX}; eval.top_p is for evaluation",
    "top_k": f"{_WHOLE_SOFTMAX}; eval.top_k is for evaluation",
    "router_aux_loss_coef": "the auxiliary loss of whole batches depends on their split; set loss.router_balance",
    "batch_size": "set rollout.trajectories_per_step and train.max_tokens_per_micro_batch",
}
_RESOLVED = {"model", "data", "rollout", "tool", "reward", "loss", "train"}  # together in resolved settings alone
# What earlier versions had.
_REMOVED = (
    Removed(
        "rollout.release_kv", False, "the KV cache stays during updates; lower rollout.kv_memory_fraction for room"
    ),
    Removed("loss.kl_estimator", "k3", "as a loss its mean gradient is zero; set k2 or k3", value="k1"),
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a JSON file and applies `section.field=value` overrides (JSON values; a bare word is a string).

    The file may be the resolved `config.json` of a run, also an older one. Raises ConfigError with field, value
    and fix; nothing is written and no model is built.
    """
    config, named = _load(path, overrides)
    require_effect(config, named, cuda=None)
    return config


def require_cuda_where_needed(path: str | Path, overrides: Sequence[str]) -> None:
    """Refuses what these settings name for a GPU alone; call it where none was found. Raises ConfigError."""
    require_effect(*_load(path, overrides), cuda=False)


def _load(path: str | Path, overrides: Sequence[str]) -> tuple[Config, dict[str, Bounds]]:
    """The config, and what the file and the overrides name other than the defaults. A run's resolved file names
    nothing, and the file nothing of a part that an override turns off."""
    raw, given = read_json(path), dict[str, Any]()
    paths.look_beside(path)
    resolved = raw.keys() >= _RESOLVED
    if resolved:
        raw = with_defaults(raw)
    for text in overrides:
        apply_override(raw, text)
        apply_override(given, text)
    _locate(raw, Path(path).parent)
    _locate(given, Path(path).parent)
    config, chosen = parse_config(raw), named_settings(given, Config)
    off = [name for name in chosen if value_of(config, name) is False]
    named = {} if resolved else named_settings(raw, Config)
    return config, {name: b for name, b in named.items() if not any(switch in b.needs for switch in off)} | chosen


def _locate(raw: dict[str, Any], beside: Path) -> None:
    """Gives the user's files their whole paths, in place; wrong types are for `parse_config` to refuse."""
    tool, reward = raw.get("tool"), raw.get("reward")
    if isinstance(reward, dict) and isinstance(reward.get("function"), str):
        reward["function"] = located_spec(reward["function"], beside)
    if isinstance(tool, dict) and isinstance(tool.get("functions"), list):
        tool["functions"] = [located_spec(one, beside) if isinstance(one, str) else one for one in tool["functions"]]


def parse_config(raw: dict[str, Any]) -> Config:
    """A dictionary of sections into a checked `Config`. Raises ConfigError."""
    sections = {name: values for name, values in paths.located(raw).items() if name != "version"}
    return parse_sections(Config, sections, _FOREIGN, _REMOVED)


def with_defaults(resolved: dict[str, Any]) -> dict[str, Any]:
    """A run's resolved settings as this version has them: settings that are new stand at their defaults, which do
    what was done before, and removed ones that stood at theirs are gone."""
    sections = typing.get_type_hints(Config)
    known = {name: {f.name: f.default for f in dataclasses.fields(cls)} for name, cls in sections.items()}
    defaults = json.loads(json.dumps(known))
    resolved = without_removed(resolved, _REMOVED)
    return resolved | {name: defaults[name] | resolved.get(name, {}) for name in defaults}
