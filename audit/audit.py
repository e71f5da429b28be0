"""`main.py audit RUN`: recomputes what a run recorded from its stored trajectories alone, and re-runs its tool calls.

Deliberately separate code: it restates the rules of reward.py and update/ in the plainest way, so that a fault in one
place shows as a disagreement. It shares only the file readers and the table of losses, of which it uses the plain
formulas. Per step: every reward from the tokens, every advantage from the rewards, every loss that needs no model
(audit/losses.py) from advantages and token counts, whether a step was rightly skipped. Per call: status and text from
a fresh run with its seed. What cannot be recomputed is named.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from audit import losses
from run.files import json_lines
from run.stretches import Stretch, stretches
from run.trajectories import TrajectoryError, read_step, spans, stored_steps
from update.losses import loss_named

Row = dict[str, Any]


# Rows of a step -> (reward, reason, correct) of each, or None where reward.function fails: `again` below.
Again = Callable[[list[Row]], list[tuple[float, str, bool] | None]]


def audit(
    run_dir: Path, decode: Callable[[list[int]], str], tool: Any | None, stretch: Stretch | None = None,
    again: Again | None = None,
) -> tuple[dict[str, int], list[str], list[str]]:  # fmt: skip
    """Counts of what was compared, one line for each disagreement, one line for each figure not recomputed and why.

    decode: token ids of a final turn to its text as a chat's `answer` gives it, thinking and calls marked
    tool: `tools.ToolBox`, or None to leave tool calls out
    stretch: the steps to look at; None: all
    again: calls the run's reward.function again; None: the box rule, restated here
    Each step is recomputed with the settings that it was trained with, or counted where its trajectories are not kept.
    Raises DamageError, and TrajectoryError where no step's are.
    """
    counts: dict[str, int] = defaultdict(int)
    problems: list[str] = []
    missing: dict[str, int] = defaultdict(int)  # why -> losses
    kept, gone = set(stored_steps(run_dir)), []
    if not kept:
        raise TrajectoryError(f"{run_dir}: the trajectories of all steps are gone; nothing can be recomputed")
    history = [stretch] if stretch else stretches(run_dir)
    for _, metrics in json_lines(run_dir / "metrics.jsonl"):
        config = next((one.config for one in history if metrics["step"] in one.steps), None)
        if config is None:
            continue
        if metrics["step"] not in kept:  # dropped by log.keep_trajectories, or removed because it was damaged
            gone.append(metrics["step"])
            continue
        stored = read_step(run_dir, metrics["step"])
        rows = [row for row in stored if row["reward"] is not None]  # else sandbox or reward failed: no loss
        counts["steps"] += 1
        counts["rewards by calling reward.function again" if again else "rewards"] += len(rows)
        problems += [f"step {metrics['step']}: {p}" for p in _reward_problems(config, rows, decode, again)]
        problems += [f"step {metrics['step']}: {p}" for p in _step_problems(config, metrics, rows)]
        for problem, why in _loss_results(config, metrics, rows):
            counts["losses"] += why is None
            if why:
                missing[why] += 1
            if problem:
                problems.append(f"step {metrics['step']}: {problem}")
        if tool is not None:
            for call, problem in _calls_again(rows, tool):
                counts["calls" if call["name"] == "python" else "calls of your own tools, made again,"] += 1
                if problem:
                    problems.append(f"step {metrics['step']}: {problem}")
    unseen = [f"{count} losses not recomputed: {why}" for why, count in missing.items()]
    if gone:
        counts["steps without trajectories"] = len(gone)
        unseen.append(f"nothing recomputed of steps {spans(gone)}: their trajectories are not kept")
    return dict(counts), problems, unseen


def summary(counts: dict[str, int], problems: list[str]) -> str:
    """counts, problems: of `audit`, or added up over several of its."""
    rest = dict(counts)
    steps, gone = rest.pop("steps", 0), rest.pop("steps without trajectories", 0)
    seen = [f"{steps} of {steps + gone} steps" if gone else f"{steps} steps"]
    seen += [f"{count} {name}" for name, count in rest.items()]
    return f"{', '.join(seen)} recomputed; {len(problems)} differ"


def _reward_problems(
    config: Row, rows: list[Row], decode: Callable[[list[int]], str], again: Again | None
) -> Iterator[str]:
    if again:
        for row, found in zip(rows, again(rows), strict=True):
            stored = (row["reward"], row["reason"], row["correct"])
            if found != stored:
                said = "fails now" if found is None else f"gives {found} again"
                yield f"{_name(row)} has {stored}, reward.function {said}"
        return
    for row in rows:
        expected = _reward(row, _is_right(row, decode), config["reward"]["tool_bonus"])
        if row["reward"] != expected:
            yield f"{_name(row)} has reward {row['reward']}, recomputed {expected}"


def _step_problems(config: Row, metrics: Row, rows: list[Row]) -> Iterator[str]:
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["prompt_index"]].append(row)
    for members in groups.values():
        for row, expected in zip(members, _advantages(members, config), strict=True):
            if not math.isclose(row["advantage"], expected, rel_tol=1e-9, abs_tol=1e-12):
                yield f"{_name(row)} has advantage {row['advantage']}, recomputed {expected}"
    mean = sum(row["reward"] for row in rows) / max(len(rows), 1)
    if not math.isclose(metrics["reward"], mean, abs_tol=1e-9):
        yield f"reward is {metrics['reward']}, recomputed {mean}"


def _reward(row: Row, right: bool, tool_bonus: float) -> float:
    """+1 or -1; a wrong trajectory gets the bonus where a call ran without an error."""
    ran = [call for turn in row["turns"] for call in turn["calls"] if call["status"] == "ok"]
    return 1.0 if right else -1.0 + (tool_bonus if ran else 0.0)


def _loss_results(config: Row, metrics: Row, rows: list[Row]) -> Iterator[tuple[str | None, str | None]]:
    """(disagreement or None, reason why it was not recomputed or None) for each update of a step."""
    updates = losses.dealt(rows, config)
    if metrics["skipped"]:
        if updates:
            yield "was skipped, but has groups with a spread", None
        return
    recorded = losses.recorded(metrics)
    if len(recorded) != len(updates):
        yield f"made {len(recorded)} updates, recomputed {len(updates)}", None
        return
    for index, (loss, members) in enumerate(zip(recorded, updates, strict=True)):
        why = losses.unstored(config)
        if loss is None:
            why = "it was not finite; see bad_steps/"
        elif not losses.has_unit_ratios(index, config):
            why = "later updates of a rollout need the log-probabilities of moved weights, which are not stored"
        if why or loss is None:
            yield None, why
            continue
        expected, size = losses.loss_of(members, config)
        slack = size * metrics["mismatch_max"] if loss_named(config["loss"]["policy"]).holds_logprobs else 0.0
        differs = not math.isclose(loss, expected, rel_tol=1e-4, abs_tol=1e-6 + slack)
        yield (f"loss is {loss}, recomputed {expected}" if differs else None), None


def _advantages(members: list[Row], config: Row) -> list[float]:
    if len(members) == 1:
        return [0.0]  # nothing to compare with
    rewards = [losses.shaped_reward(row, config) for row in members]
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    divisor = deviation if config["reward"]["scale"] == "std" and deviation > 0 else 1.0
    return [(r - mean) / divisor for r in rewards]


def _is_right(row: Row, decode: Callable[[list[int]], str]) -> bool:
    """The box rule, restated: the last box of the final message holds the reference; nothing was cut or called."""
    if row["stop"] != "answered":
        return False
    turn = row["turns"][-1]
    text = decode(row["token_ids"][turn["start"] : turn["end"]]).split("</think>")[-1].split("<think>")[0]
    if "<tool_call>" in text:
        return False
    boxes = list(re.finditer(r"\\boxed\s*\{", text))
    if not boxes:
        return False
    depth, start = 1, boxes[-1].end()
    for place, (char, before) in enumerate(zip(text[start:], text[start - 1 :], strict=False)):
        if before != "\\":
            depth += (char == "{") - (char == "}")
        if depth == 0:
            said, wanted = _plain(text[start : start + place]), _plain(row["answer"])
            return bool(said) and (said == wanted or _value(said) == _value(wanted) is not None)
    return False


def _plain(text: str) -> str:
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\$", "").replace("$", "")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\[,!;:]|~", "", text)
    while found := re.fullmatch(r"\s*\\(?:text|mathrm|textbf|mathbf|boxed)\s*\{(.*)\}\s*", text, re.S):
        text = found[1]
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.strip().removesuffix(".").strip())
    while text.startswith("{") and text.endswith("}") and "}" not in text[1:-1] and "{" not in text[1:-1]:
        text = text[1:-1].strip()
    return re.sub(r"(?<=[^\w])\s+|\s+(?=[^\w])", "", text)


def _value(text: str) -> Fraction | None:
    number = r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+"  # no exponent: 1e9999999 would take for ever
    found = re.fullmatch(rf"([+-]?)\\frac(?:\{{({number})\}}|([0-9]))(?:\{{({number})\}}|([0-9]))", text)
    if found:
        text = f"{found[1]}{found[2] or found[3]}/{found[4] or found[5]}"
    found = re.fullmatch(rf"([+-]?(?:{number}))(?:/([+-]?(?:{number})))?", text)
    if not found or len(text) > 4000:
        return None
    bottom = Fraction(Decimal(found[2] or "1"))
    return Fraction(Decimal(found[1])) / bottom if bottom else None


def calling(score: Callable[[Row, Row], Future[Any]], decode: Callable[[list[int]], str]) -> Again:
    """Calls the run's reward.function on stored rows. score: `sandbox.workers.rewards.Scorer.score`"""

    def again(rows: list[Row]) -> list[tuple[float, str, bool] | None]:
        futures = [score(_trajectory(row, decode), row["problem"]) for row in rows]
        found = [future.result() for future in futures]
        return [None if one.error else (one.reward, one.reason, one.correct) for one in found]

    return again


def _trajectory(row: Row, decode: Callable[[list[int]], str]) -> Row:
    """What the function was shown."""
    turns = []
    for turn in row["turns"]:
        text = decode(row["token_ids"][turn["start"] : turn["end"]])
        turns.append({"text": text, "calls": [_call(call) for call in turn["calls"]]})
    final = str(turns[-1]["text"]).split("</think>")[-1].split("<think>")[0]
    return {"final_text": final, "stop": row["stop"], "turns": turns, "sampled_tokens": sum(row["sampled"])}


def _call(call: Row) -> Row:
    return {key: call[key] for key in ("name", "arguments", "status", "text")}


def _calls_again(rows: list[Row], tool: Any) -> Iterator[tuple[Row, str | None]]:
    """Every call that ran, made again in a session of its trajectory, and how its result differs."""
    made = []
    sessions = [tool.open(row.get("problem") or {}) for row in rows]
    for row, session in zip(rows, sessions, strict=True):
        for call in (call for turn in row["turns"] for call in turn["calls"]):
            if call["status"] not in ("bad_call", "over_limit"):
                made.append((call, session.call(call["name"], call["arguments"], call["seed"])))
    for call, future in made:
        result, problem = future.result(), None
        if (result.status, result.text) != (call["status"], call["text"]):
            said = call["arguments"].get("code") if call["name"] == "python" else call["arguments"]
            what = f"{said[:60]!r}" if isinstance(said, str) else f"{call['name']} {str(said)[:60]}"
            problem = (
                f"call {what} gave {call['status']} {call['text'][:60]!r}, again {result.status} {result.text[:60]!r}"
            )
        yield call, problem
    for session in sessions:
        session.close()


def _name(row: Row) -> str:
    return f"prompt {row['prompt_index']}, sample {row['sample_index']}"
