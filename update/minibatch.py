"""Which trajectories an update trains, with which weight: from scored records to micro-batches, for every rank alike.

The denominators of every loss are fixed here, from the records of all ranks, before the first forward; their formulas
are `token_weights` of `losses.LOSSES`.

A trajectory of advantage 0 counts in them although it adds nothing, so that the step size does not jump with the share
of equal groups. What loss.overlong_mask, rollout.max_refills or a broken sandbox takes out counts nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from config import Config, RolloutConfig
from rollout.records import Scored, StopReason
from update.batch import ResponseTokenBatch, collate
from update.groups import by_prompt, equal_share, is_equal
from update.losses import loss_named

CUT = frozenset({StopReason.TURN_TOKENS, StopReason.CONTEXT_FULL})  # ran out of tokens

Update = list[list[ResponseTokenBatch]]  # [world_size][micro-batches], equally many for each rank


def plan_updates(scored: Sequence[Scored], config: Config, world_size: int) -> list[Update]:
    """The updates of one rollout: train.updates_per_rollout, or fewer where fewer groups have something to train.

    scored: all records of the step that are to be trained, every rank's, in (prompt, sample) order
    Whole groups are dealt in turn to the mini-batches, those with a spread first, so that each gets its share of them.
    """
    loss, train = config.loss, config.train
    kept = [s for s in scored if not (loss.overlong_mask and s.record.stop in CUT)]
    groups = list(by_prompt(kept).values())
    every = loss.needs_every_row
    active = [g for g in groups if every or not is_equal(g)]
    idle = [g for g in groups if not (every or not is_equal(g))]
    count = min(train.updates_per_rollout, len(active))
    updates = []
    for first in range(count):
        items = [s for group in active[first::count] + idle[first::count] for s in group]
        items.sort(key=lambda s: (s.record.prompt_index, s.record.sample_index))
        weights = token_weights(items, loss.policy, token_budget(config.rollout))
        updates.append(collate(items, weights, config.micro_batch_tokens, world_size, leave_out_equal=not every))
    return updates


def why_no_update(scored: Sequence[Scored], config: Config) -> str:
    """Why `plan_updates` gave none. scored: all records of the step, those of equal groups that were refilled too."""
    equal_are_trained = config.loss.needs_every_row and not config.rollout.max_refills
    if equal_share(scored) == 1.0 and not equal_are_trained:
        return "all rewards of each group are equal"
    return "every trajectory that could teach ran out of tokens, and loss.overlong_mask leaves such out"


def token_weights(scored: Sequence[Scored], policy: str, budget: int) -> list[float]:
    """The weight of each record's sampled tokens, its denominator included. budget: of `token_budget`."""
    return loss_named(policy).token_weights([s.record.num_sampled for s in scored], budget)


def token_budget(rollout: RolloutConfig) -> int:
    """The most tokens that a trajectory can sample."""
    return min(rollout.max_turns * rollout.max_new_tokens, rollout.context_length)
