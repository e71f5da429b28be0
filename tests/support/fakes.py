"""Stand-ins for the chat and the policy of a trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from config import Config
from data import TrainingData
from evaluation.grading import BoxGrader
from rollout.engine import RolloutStats
from startup.building import Parts
from startup.toolbox import OwnTools
from tests.support.policies import CPU


class FakeChat:
    """The last id of a turn is its boxed answer."""

    def answer(self, ids):
        return f"\\boxed{{{ids[-1]}}}"


class FakePolicy:
    device = CPU

    def eval(self):
        pass


def fake_parts(config: Config, data: TrainingData, sample: Any, **stats: int) -> Parts:
    """What a `Trainer` needs to sample and score; stats: figures of each rollout."""
    return Parts(
        config=config, shape=None, tokenizer=SimpleNamespace(save_pretrained=None), chat=FakeChat(), data=data,
        eval_data=None, own=OwnTools(), tool=None, policy=FakePolicy(), teacher=None,
        engine=SimpleNamespace(stats=RolloutStats(**stats)), sample=sample, memory=None,
        grader=BoxGrader(FakeChat().answer), scorer=None, rank=0, world_size=1,
    )  # fmt: skip
