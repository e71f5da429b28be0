"""The `eval` and `log` sections of the settings: how a run is watched. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import require


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    path: str = ""  # JSONL with the fields of data; empty: no evaluation
    at_start: bool = False  # before the first step too
    every: int = 0  # steps between evaluations; 0: only after the last step
    samples_per_prompt: int = 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # draw from the fewest tokens that hold this probability; 1: from all
    top_k: int = 0  # draw from the k likeliest tokens; 0: from all

    def __post_init__(self) -> None:
        require(self.every >= 0, "eval.every", self.every, "must be 0 (only at the end) or more")
        require(self.samples_per_prompt >= 1, "eval.samples_per_prompt", self.samples_per_prompt, "at least 1")
        require(self.temperature >= 0, "eval.temperature", self.temperature, "must be 0 (greedy) or more")
        require(0 < self.top_p <= 1, "eval.top_p", self.top_p, "must lie in (0, 1]; 1 draws from all tokens")
        require(self.top_k >= 0, "eval.top_k", self.top_k, "must be 0 (draw from all tokens) or more")
        require(
            self.temperature > 0 or self.samples_per_prompt == 1, "eval.samples_per_prompt", self.samples_per_prompt,
            "greedy samples are all equal; set 1, or eval.temperature above 0",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    run_dir: str = ""  # where the run is written; empty: runs/<name of the config file>
    keep_trajectories: int | None = 100_000  # on disk, the newest whole steps; null: all
    trackers: tuple[str, ...] = ()  # "wandb", "trackio", "tensorboard"; the last is used unnamed where installed
    project: str = "agentic-grpo"  # under which wandb and trackio file the run

    def __post_init__(self) -> None:
        require(
            self.keep_trajectories is None or self.keep_trajectories >= 1, "log.keep_trajectories",
            self.keep_trajectories, "must be at least 1, or null to keep all; the newest step always stays",
        )  # fmt: skip
        for name in self.trackers:
            require(
                name in ("wandb", "trackio", "tensorboard"), "log.trackers", list(self.trackers),
                f"{name!r} is none of 'wandb', 'trackio', 'tensorboard'",
            )  # fmt: skip
