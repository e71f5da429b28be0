"""Scores of the policy on problems it does not train on, each with its interval, and the gain from the tool.

An `Evaluation` is one set of problems, each sampled n times under one treatment of the tool: `on`; `off` (no tool in
the prompt, one turn); `broken` (the tool is offered and answers every call with an error). Evaluations of the same
problems are compared problem by problem. The share of cut and of box-less trajectories stands beside every score,
since a limit or a prompt that hides right answers would otherwise look like a weak policy. A trajectory in which the
sandbox failed counts as wrong and in `infra`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from config import Config
from evaluation.estimators import bootstrap, majority, min_difference, pass_at_k, standard_error
from reward import Grade, Reason, equal, final_answer, grade_trajectory
from rollout.records import RolloutRecord, SamplingConfig, StopReason
from run.files import RESUME, write_whole

# Evaluation draws from other noise than training, also for the same prompt index and step.
SEED_OFFSET = 1 << 32
_CUT = (StopReason.TURN_LIMIT, StopReason.TURN_TOKENS, StopReason.CONTEXT_FULL)
_BOXLESS = (Reason.NO_BOX, Reason.UNCLOSED_BOX, Reason.EMPTY_BOX, Reason.BOX_IN_THINKING)


class Problem(Protocol):
    """The fields of `data.Problem` that an evaluation needs."""

    @property
    def prompt(self) -> str: ...
    @property
    def answer(self) -> str: ...
    @property
    def line(self) -> int: ...


def eval_sampling(config: Config) -> SamplingConfig:
    """How evaluations sample: the rollout's limits, the eval section's draws."""
    own = config.eval
    return SamplingConfig.of(
        config, temperature=own.temperature, n_samples_per_prompt=own.samples_per_prompt,
        seed=config.train.seed + SEED_OFFSET, top_k=own.top_k, top_p=own.top_p,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Evaluation:
    """P problems with n samples each; lists run over problems, then samples."""

    problems: Sequence[Problem]
    grades: list[list[Grade]]
    answers: list[list[str | None]]  # the cleaned last box of the final turn
    records: list[list[RolloutRecord]]

    @classmethod
    def of(
        cls, records: Sequence[RolloutRecord], problems: Sequence[Problem], decode: Callable[[Sequence[int]], str]
    ) -> Evaluation:
        """records: every sample of every problem; `prompt_index` counts the problems."""
        groups: list[list[RolloutRecord]] = [[] for _ in problems]
        for record in records:
            groups[record.prompt_index].append(record)
        texts = [[decode(r.token_ids[r.final_turn.start : r.final_turn.end]) for r in group] for group in groups]
        grades = [
            [grade_trajectory(text, r.stop, problem.answer) for text, r in zip(said, group, strict=True)]
            for said, group, problem in zip(texts, groups, problems, strict=True)
        ]
        return cls(problems, grades, [[final_answer(text) for text in said] for said in texts], groups)

    @property
    def correct(self) -> NDArray[np.bool_]:
        """[P, n]"""
        return np.array([[grade.correct for grade in row] for row in self.grades])

    def per_problem(self) -> NDArray[np.float64]:
        """pass@1 .. pass@n and maj@n of each problem; pass@1 is avg@n  # [P, n + 1]"""
        votes = np.array([_classes(row) for row in self.answers])
        return np.column_stack([pass_at_k(self.correct), majority(votes, self.correct)])


def _classes(answers: Sequence[str | None]) -> list[int]:
    """The class of each answer: the index of the first equal answer; -1 for none."""
    firsts: list[int] = []
    classes = []
    for place, answer in enumerate(answers):
        if answer is None:
            classes.append(-1)
            continue
        known = next((first for first in firsts if equal(answer, answers[first] or "")), place)
        if known == place:
            firsts.append(place)
        classes.append(known)
    return classes


def summarize(evaluation: Evaluation, seed: int) -> dict[str, Any]:
    """Scores with intervals, and what went wrong beside them; JSON.

    min_difference: the minimum detectable difference between two independent evaluations of this size
    """
    values = evaluation.per_problem()
    count, samples = evaluation.correct.shape
    *passes, vote = bootstrap(values, seed)
    error = standard_error(values[:, 0])
    records = [record for row in evaluation.records for record in row]
    grades = [grade for row in evaluation.grades for grade in row]
    calls = [call for record in records for turn in record.turns for call in turn.calls]
    return {
        "problems": count,
        "k": samples,
        "avg": asdict(passes[0]) | {"stderr": error, "min_difference": min_difference(2**0.5 * error, count, samples)},
        "pass": {str(k): asdict(interval) for k, interval in enumerate(passes, start=1)},
        "maj": asdict(vote),
        "cut": sum(record.stop in _CUT for record in records) / len(records),
        "boxless": sum(grade.reason in _BOXLESS for grade in grades) / len(records),
        "infra": sum(record.stop is StopReason.TOOL_INFRA for record in records) / len(records),
        "calls": len(calls) / len(records),
        "call_errors": sum(call.status != "ok" for call in calls) / max(len(calls), 1),
        "sampled_tokens": sum(record.num_sampled for record in records) / len(records),
        "stops": dict(Counter(record.stop.value for record in records)),
        "reasons": dict(Counter(grade.reason.value for grade in grades)),
    }


def metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The flat figures of a training run's metrics line."""
    flat = {name: summary[name] for name in ("problems", "k")}
    top = {"avg": summary["avg"], "pass": summary["pass"][str(summary["k"])], "maj": summary["maj"]}
    for name, interval in top.items():
        flat |= {f"{name}_at_k": interval["value"], f"{name}_low": interval["low"], f"{name}_high": interval["high"]}
    flat |= {"avg_stderr": summary["avg"]["stderr"], "min_difference": summary["avg"]["min_difference"]}
    return flat | {name: summary[name] for name in ("cut", "boxless", "infra")}


def compare(one: Evaluation, other: Evaluation, seed: int) -> dict[str, Any]:
    """one - other, problem by problem. Both hold the same problems in the same order.

    significant: the interval of the mean difference leaves out 0
    """
    difference = one.per_problem() - other.per_problem()
    count, samples = one.correct.shape
    intervals = bootstrap(difference[:, [0, -2, -1]], seed, shares=False)
    smallest = min_difference(standard_error(difference[:, 0]), count, samples)
    named = dict(zip(("avg", f"pass@{samples}", "maj"), intervals, strict=True))
    rows = {name: asdict(i) | {"significant": i.low > 0 or i.high < 0} for name, i in named.items()}
    return rows | {"min_difference": smallest}


def problem_rows(evaluations: Mapping[str, Evaluation]) -> list[dict[str, Any]]:
    """One row for each problem: the right samples and the answers under each treatment."""
    first = next(iter(evaluations.values()))
    rows: list[dict[str, Any]] = []
    for index, problem in enumerate(first.problems):
        row: dict[str, Any] = {"line": problem.line, "prompt": problem.prompt, "answer": problem.answer}
        for name, evaluation in evaluations.items():
            answers = Counter(answer or "(none)" for answer in evaluation.answers[index])
            row[name] = {
                "right": int(evaluation.correct[index].sum()),
                "of": len(evaluation.grades[index]),
                "answers": dict(answers.most_common()),
                "reasons": dict(Counter(grade.reason.value for grade in evaluation.grades[index])),
            }
        rows.append(row)
    return rows


def results(config: Config, evaluations: Mapping[str, Evaluation], step: int) -> dict[str, Any]:
    """The whole result of an evaluation, as JSON; the settings that its scores depend on come first."""
    names = list(evaluations)
    pairs = [(names[0], other) for other in names[1:]]
    seed = config.train.seed
    return {
        "settings": asdict(eval_sampling(config))
        | {"model": config.model.path, "path": config.eval.path, "step": step},
        "scores": {name: summarize(evaluation, seed) for name, evaluation in evaluations.items()},
        "differences": {f"{a} - {b}": compare(evaluations[a], evaluations[b], seed) for a, b in pairs},
        "problems": problem_rows(evaluations),
    }


def write_results(path: Path, found: Mapping[str, Any], fix: str = RESUME) -> None:
    """Complete or absent. fix: the advice where the disk is full."""
    write_whole(path, json.dumps(found, indent=1) + "\n", fix)


def table_lines(found: Mapping[str, Any]) -> list[str]:
    settings, scores = found["settings"], found["scores"]
    first = next(iter(scores.values()))
    n = first["k"]
    lines = [
        f"{settings['path']}: {first['problems']} problems, k = {n}, temperature {settings['temperature']:g}, "
        f"top_p {settings['top_p']:g}, top_k {settings['top_k']}, {settings['max_new_tokens']} tokens a turn, "
        f"{settings['max_turns']} turns, context {settings['context_length']}; 95 % intervals over problems"
    ]
    lines.append(f"{'tools':8}{f'avg@{n}':>22}{f'pass@{n}':>22}{f'maj@{n}':>22}{'cut':>8}{'no box':>8}{'calls':>7}")
    for name, s in scores.items():
        cells = "".join(f"{_cell(i):>22}" for i in (s["avg"], s["pass"][str(n)], s["maj"]))
        lines.append(f"{name:8}{cells}{s['cut']:>8.1%}{s['boxless']:>8.1%}{s['calls']:>7.2f}")
        if s["infra"]:
            lines.append(f"         the sandbox failed in {s['infra']:.1%} of these trajectories; they count as wrong")
    for name, s in scores.items() if n > 1 else ():
        steps = [*(2**i for i in range(n.bit_length()) if 2**i < n), n]
        lines.append(f"{name}: pass@k " + ", ".join(f"{k}: {s['pass'][str(k)]['value']:.3f}" for k in steps))
    for name, difference in found["differences"].items():
        avg = difference["avg"]
        verdict = "differs" if avg["significant"] else "no difference shown"
        lines.append(
            f"{name}: avg {_cell(avg, sign='+')}, {verdict}; "
            f"minimum detectable difference {difference['min_difference']:.3f}"
        )
    smallest = first["avg"]["min_difference"]
    return [*lines, f"minimum detectable difference between two such evaluations: {smallest:.3f}"]


def _cell(interval: Mapping[str, float], sign: str = "") -> str:
    return f"{interval['value']:{sign}.3f} [{interval['low']:{sign}.3f}, {interval['high']:{sign}.3f}]"
