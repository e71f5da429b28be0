"""The loss part of the audit: what a step's losses must have been, from stored trajectories and settings alone.

Where every ratio is 1 (the first update of a rollout; with loss.old_policy "update" every one) a loss is a weighted
mean of advantages and needs no model; cispo's also holds the log-probabilities, for which the recorded ones stand in,
to within the step's mismatch. What needs other log-probabilities, which are not stored, is named by `unstored` and
`has_unit_ratios`, not passed over. The formulas are `audited` in the table of losses: plain numbers, and no code that
the update runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import Any

from update.losses import Audited, loss_named

Row = dict[str, Any]


def shaped_reward(row: Row, config: Row) -> float:
    """The reward that advantages compare: with loss.overlong_buffer, less as the room to a limit shrinks."""
    buffer, rollout = config["loss"]["overlong_buffer"], config["rollout"]
    if not buffer:
        return row["reward"]
    rooms = [rollout["context_length"] - len(row["token_ids"])]
    rooms += [rollout["max_new_tokens"] - (turn["end"] - turn["start"]) for turn in row["turns"]]
    used = buffer - min(rooms)
    return row["reward"] - max(0.0, min(1.0, used / buffer))


def unstored(config: Row) -> str | None:
    """Why no loss of a run can be recomputed, or None."""
    if config["loss"]["kl_coef"] > 0:
        return "loss.kl_coef is above 0, and the reference's log-probabilities are not stored"
    if config["loss"].get("router_balance", 0) > 0:  # a run from before the setting lacks it
        return "loss.router_balance is above 0, and the routers' probabilities are not stored"
    if config["loss"].get("distill_weight", 0) > 0:
        return "loss.distill_weight is above 0, and the teacher's hidden states are not stored"
    if config["loss"]["importance"] != "off":
        return "loss.importance is on, and the training log-probabilities that its weights need are not stored"
    return None


def dealt(rows: list[Row], config: Row) -> list[list[Row]]:
    """The rows that count in each update; none where nothing can be learnt."""
    groups: dict[int, list[Row]] = defaultdict(list)
    everyone: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        everyone[row["prompt_index"]].append(row)
        if not (config["loss"]["overlong_mask"] and row["stop"] in ("turn_tokens", "context_full")):
            groups[row["prompt_index"]].append(row)
    if config["rollout"]["max_refills"]:
        groups = {p: g for p, g in groups.items() if any(r["advantage"] for r in everyone[p])}
    loss = config["loss"]  # a run from before a setting lacks it
    always = any(loss.get(name, 0) > 0 for name in ("kl_coef", "router_balance", "distill_weight"))
    moving = [p for p in groups if always or any(r["advantage"] for r in groups[p])]
    still = [p for p in groups if p not in moving]
    count = min(config["train"]["updates_per_rollout"], len(moving))
    shares = [[*moving[i::count], *still[i::count]] for i in range(count)]
    return [[row for prompt in share for row in groups[prompt]] for share in shares]


def loss_of(rows: list[Row], config: Row) -> tuple[float, float]:
    """The loss of an update whose ratios are all 1, and the sum of its absolute weights (for tolerances)."""
    formula, rollout = loss_named(config["loss"]["policy"]).audited, config["rollout"]
    lengths = [sum(row["sampled"]) for row in rows]
    budget = min(rollout["max_turns"] * rollout["max_new_tokens"], rollout["context_length"])
    total = size = 0.0
    for row, length in zip(rows, lengths, strict=True):
        one = Audited(row["advantage"], length, math.fsum(row["logprobs"]), sum(lengths), len(rows), budget)
        total += formula(one)
        size += abs(formula(dataclasses.replace(one, logprob=length)))  # each log-probability off by 1
    return total, size


def recorded(metrics: Row) -> list[float | None]:
    """The loss of each update; None where it was not finite."""
    return [one["loss"] for one in metrics["by_update"]] if "by_update" in metrics else [metrics["loss"]]


def has_unit_ratios(update: int, config: Row) -> bool:
    """Whether every ratio of an update is 1; where the loss holds log-probabilities, also whether they are unmoved."""
    loss = config["loss"]
    return update == 0 or (loss["old_policy"] == "update" and not loss_named(loss["policy"]).holds_logprobs)
