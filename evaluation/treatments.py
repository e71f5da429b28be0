"""`main.py evaluate`: one checkpoint on the same problems with the tool on, off and broken.

The treatments share problems, weights and noise, so their differences come from the tool. `off` keeps
data.system_prompt unchanged, even where it mentions a tool.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import Config, ConfigError, load_config
from evaluation.grading import Grader
from evaluation.scores import Evaluation, Problem, eval_sampling, results
from rollout.records import Sample
from run import checkpoint
from run.ranks import Ranks


@dataclass(frozen=True, slots=True)
class BrokenResult:
    """The fields of `tools.ToolResult` that the rollout reads."""

    text: str
    status: str = "error"
    wall_s: float = 0.0


class BrokenTool:
    """Replaces `tools.ToolBox`, and is its own session: every call of any tool fails, which measures what the tools'
    results contribute."""

    def open(self, problem: dict[str, Any]) -> BrokenTool:
        return self

    def call(self, name: str, arguments: dict[str, Any], seed: int) -> Future[BrokenResult]:
        what = "Python interpreter" if name == "python" else f"tool {name}"
        future: Future[BrokenResult] = Future()
        future.set_result(BrokenResult(f"Error: the {what} could not be started."))
        return future

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """One treatment of the tool. `sample` samples this rank's share, as in `trainer.Trainer`."""

    config: Config  # from `treated`
    problems: Sequence[Problem]
    prompts: Sequence[list[int]]  # rendered for this treatment
    sample: Sample
    decode: Callable[[Sequence[int]], str]
    grader: Grader


def treated(config: Config, name: str) -> Config:
    """The config of one treatment; `on` and `broken` offer the tool in the prompt, `off` does not."""
    if name != "off":
        if not config.tool.offered:
            raise ConfigError("--tools", name, "the config offers no tool; evaluate with --tools off")
        return config
    return dataclasses.replace(
        config,
        tool=dataclasses.replace(config.tool, enabled=False, functions=(), mcp=()),
        rollout=dataclasses.replace(config.rollout, max_turns=1),
    )


def is_truncated(config: Config) -> bool:
    """Whether evaluations draw from less than the whole softmax, which captured graphs cannot."""
    return bool(config.eval.top_k) or config.eval.top_p < 1


def run_treatments(treatments: Mapping[str, Treatment], step: int, ranks: Ranks) -> dict[str, Any]:
    """Samples the problems that fit under every treatment, so that differences are paired: `scores.results`.

    Collective; every rank gets the same result.
    """
    lines = set.intersection(*({problem.line for problem in t.problems} for t in treatments.values()))
    evaluations = {}
    for name, treatment in treatments.items():
        kept = [i for i, problem in enumerate(treatment.problems) if problem.line in lines]
        prompts, sampling = [treatment.prompts[i] for i in kept], eval_sampling(treatment.config)
        work = ranks.deal(name, len(prompts) * sampling.n_samples_per_prompt)
        problems = [treatment.problems[i] for i in kept]
        treatment.grader.expect(problems)
        rows = [treatment.problems[i].row for i in kept]
        mine = treatment.sample(prompts, step, work, sampling, rows)
        graded = list(zip(mine, treatment.grader.grades(mine), strict=True))
        found = [pair for part in ranks.gather(graded) for pair in part]
        found.sort(key=lambda pair: (pair[0].prompt_index, pair[0].sample_index))
        records, grades = [record for record, _ in found], [grade for _, grade in found]
        evaluations[name] = Evaluation.of(records, grades, problems, treatment.decode)
    first = next(iter(treatments.values()))
    return results(first.config, evaluations, step)


@dataclass(frozen=True, slots=True)
class Candidate:
    """What `main.py evaluate` evaluates."""

    config: Config
    adapters: Path | None  # folder of LoRA adapters on config.model
    step: int  # steps trained
    out: Path  # where to write


def choose_checkpoint(
    config: str | None, overrides: Sequence[str], model: str | None, run: str | None, out: str | None
) -> Candidate:
    """From the arguments of `main.py evaluate`. Adapters sit on the base that they name, unless `overrides` name one.

    The step decides the noise, so a checkpoint scores here as it did during its run. Raises ConfigError, and
    CheckpointError where a run's checkpoint is damaged.
    """
    if config is None and run is None:
        raise ConfigError("--config", config, "name a config, or a run with --run-dir")
    folder = Path(model) if model else None
    if folder and not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        fix = "name one that holds config.json or adapter_config.json, or a hub name with --set model.path="
        raise ConfigError("--checkpoint", model, f"is no folder of a model; {fix}")
    if run and folder is None:
        folder = checkpoint.newest(Path(run))
        if folder is None:
            raise ConfigError("--run-dir", run, "holds no complete checkpoint; train first, or name --checkpoint")
    adapters = folder if folder and (folder / "adapter_config.json").exists() else None
    chosen: list[str] = []
    if adapters:
        chosen = _on_base(adapters)
        own = load_config(config or Path(str(run)) / "config.json", overrides).model.path
        if chosen[:1] == [f"model.path={os.path.abspath(own)}"]:  # named by the adapters from everywhere
            chosen = chosen[1:]
    elif folder:
        chosen = [f"model.path={folder}", "model.tokenizer_path=", "model.random_weights=false"]
    settings = load_config(config or Path(str(run)) / "config.json", [*chosen, *overrides])
    if not settings.eval.path:
        raise ConfigError("eval.path", "", "name the problems, e.g. --set eval.path=data/aime_2024.jsonl")
    checkpoint.require_whole(folder or Path(settings.model.path))
    state = folder / "state.json" if folder else None
    step = json.loads(state.read_text())["step"] if state and state.exists() else 0
    default = Path(run) / f"evaluations/step_{step}_tools.json" if run else Path("runs/evaluation.json")
    return Candidate(settings, adapters, step, Path(out) if out else default)


def _on_base(adapters: Path) -> list[str]:
    """Settings of the base that adapters name (they need not), and of a tokenizer saved beside them."""
    try:
        base = json.loads((adapters / "adapter_config.json").read_text())["base_model_name_or_path"]
    except (ValueError, KeyError) as error:
        raise ConfigError("adapters", str(adapters), "adapter_config.json cannot be read; write it anew") from error
    tokenizer = [f"model.tokenizer_path={adapters}"] if (adapters / "tokenizer_config.json").exists() else []
    return [*([f"model.path={base}"] if base else []), *tokenizer]
