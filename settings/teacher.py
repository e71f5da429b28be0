"""The `teacher` section of the settings, and what it asks of the others. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from configs.schema import require


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """Read where loss.distill_weight is above 0. Formulas: modeling/divergence.py."""

    # model: the one of teacher.path. Else the policy itself, given teacher.privilege: base as it was before training,
    # live as it is, ema the running mean of its weights.
    source: Literal["model", "base", "live", "ema"] = "model"
    path: str = ""  # folder or hub name; its tokenizer must be the policy's
    ema_decay: float = 0.99  # a step, of source ema
    # Appended to the user turn that the teacher reads; {answer} and {hint} are those of the problem. Empty: nothing.
    privilege: str = ""
    # sampled: reverse KL by policy gradient on the sampled tokens; the others compare whole vocabularies
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "sampled"] = "reverse_kl"
    beta: float = 0.5  # of jsd: weight of the teacher in the mixture
    temperature: float | None = None  # of both softmaxes, without a factor T^2; null: rollout.temperature
    top_k: int = 0  # the teacher's likeliest tokens, all others counted as one; 0: the whole vocabulary
    # Where a teacher's own weights wait between their one pass a step: host memory, the GPU, or dealt by ZeRO-3 to the
    # host memory of all ranks and gathered layer by layer.
    placement: Literal["offload", "gpu", "zero3"] = "offload"

    def __post_init__(self) -> None:
        source, temperature = self.source, self.temperature
        require(
            source == "model" or not self.path, "teacher.path", self.path,
            f"teacher.source={source!r} is the policy itself; leave it empty, or set teacher.source='model'",
        )  # fmt: skip
        require(
            source != "live" or bool(self.privilege), "teacher.privilege", self.privilege,
            "a live teacher that reads the policy's own prompt teaches nothing; say what it is told",
        )  # fmt: skip
        require(0 < self.ema_decay < 1, "teacher.ema_decay", self.ema_decay, "must lie between 0 and 1")
        require(
            0 < self.beta < 1, "teacher.beta", self.beta,
            "must lie between 0 and 1; at the ends use forward_kl or reverse_kl",
        )  # fmt: skip
        require(
            temperature is None or temperature > 0, "teacher.temperature", temperature,
            "must be above 0, or null for rollout.temperature",
        )  # fmt: skip
        require(self.top_k >= 0, "teacher.top_k", self.top_k, "must be 0 (the whole vocabulary) or more")
        require(
            self.top_k == 0 or self.divergence != "sampled", "teacher.top_k", self.top_k,
            "sampled looks at one token; set 0, or another teacher.divergence",
        )  # fmt: skip
        require(
            self.placement != "zero3" or source in ("model", "base"), "teacher.placement", self.placement,
            f"teacher.source={source!r} needs its weights whole; set offload or gpu",
        )  # fmt: skip


def check_distillation(config: Any) -> None:
    """What a `config.Config` with loss.distill_weight above 0 must have. Raises ConfigError."""
    teacher, weight, rollout = config.teacher, config.loss.distill_weight, config.rollout
    require(
        teacher.source != "model" or bool(teacher.path), "teacher.path", teacher.path,
        f"loss.distill_weight={weight} needs a teacher; name its folder or hub name",
    )  # fmt: skip
    require(
        teacher.divergence != "sampled" or teacher.temperature in (None, rollout.temperature), "teacher.temperature",
        teacher.temperature, f"sampled holds where tokens were drawn, at {rollout.temperature}; set null",
    )  # fmt: skip
    require(
        teacher.source != "ema" or config.lora.rank == 0, "teacher.source", teacher.source,
        "not with adapters (lora.rank above 0); set base or live",
    )  # fmt: skip
    require(
        weight < 1 or rollout.max_refills == 0, "rollout.max_refills", rollout.max_refills,
        "drops groups by their rewards, which loss.distill_weight=1 does not look at; set 0",
    )  # fmt: skip
    require(
        "{hint}" not in teacher.privilege or bool(config.data.hint_field), "data.hint_field", config.data.hint_field,
        "teacher.privilege holds {hint}; name the field of data.path that has it",
    )  # fmt: skip
