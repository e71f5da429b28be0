"""The user's reward in worker processes: what it returns is the reward, whatever else it does is an error."""

from __future__ import annotations

import pytest

from sandbox.parent.link import StartError
from sandbox.workers.rewards import BadReward, Outcome, Scorer, outcome

FILE = """
import os

def score(trajectory, problem):
    kind = problem["kind"]
    if kind == "raises":
        raise KeyError("x")
    if kind == "hangs":
        while True:
            pass
    if kind == "exits":
        os._exit(3)
    if kind == "eats memory":
        bytearray(8 << 30)
    if kind == "sees":
        call = trajectory.turns[0].calls[0]
        said = [trajectory.final_text, trajectory.stop, trajectory.sampled_tokens, trajectory.turns[0].text]
        said += [call.name, call.arguments["code"], call.status, call.text, problem["extra"]]
        return 0.5, " ".join(map(str, said))
    return float(kind)

def gold(problem):
    return problem["gold"]

class Other:
    pass

def one(trajectory):
    return 1.0
"""
SEEN = {
    "final_text": "f", "stop": "answered", "sampled_tokens": 3,
    "turns": [{"text": "t", "calls": [{"name": "n", "arguments": {"code": "c"}, "status": "ok", "text": "r"}]}],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    (folder / "mine.py").write_text(FILE)
    return folder


def start(folder, spec="mine.py:score"):
    return Scorer(spec, folder, timeout_s=1.0, memory_mb=128, max_running=2)


@pytest.fixture(scope="module")
def scorer(folder):
    made = start(folder)
    yield made
    made.close()


def test_the_function_sees_the_trajectory_and_the_whole_row(scorer):
    found = scorer.score(SEEN, {"kind": "sees", "extra": [1]}).result(9)
    assert found == Outcome(0.5, "f answered 3 t n c ok r [1]", True)


@pytest.mark.parametrize(
    ("kind", "error"),
    [("raises", "KeyError"), ("hangs", "Timeout"), ("exits", "SystemExit"), ("eats memory", "MemoryError"),
     ("nan", "NotFinite"), ("-inf", "NotFinite")],
)  # fmt: skip
def test_a_function_that_fails_gives_no_reward(scorer, kind, error):
    found = scorer.score(SEEN, {"kind": kind}).result(20)
    assert found.error == error and found.message and found.reward == 0.0


def test_rewards_come_back_in_order_and_a_failure_spoils_no_other(scorer):
    kinds = ["1", "raises", "2", "exits", "3"]
    found = [future.result(20) for future in [scorer.score(SEEN, {"kind": kind}) for kind in kinds]]
    assert [one.reward for one in found] == [1.0, 0.0, 2.0, 0.0, 3.0]


def test_gold_gives_its_text_or_one_line(scorer):
    assert scorer.has_gold and scorer.gold({"gold": "½"}) == "½"
    with pytest.raises(RuntimeError, match="KeyError"):
        scorer.gold({})


def test_what_a_function_may_return():
    assert outcome(2) == (2.0, "correct", True)
    assert outcome((-0.5, "a\nb")) == (-0.5, "a b", False)
    assert outcome((0.5, None, False)) == (0.5, "wrong", False)
    for bad in (None, "1", (1.0, "a", True, 4), (), [1.0], ("x", "y")):
        with pytest.raises(BadReward, match="return a finite float"):
            outcome(bad)


@pytest.mark.parametrize(
    ("spec", "says"),
    [("mine.py:nothing", "no such function or class; the file has score, gold"), ("no.py:score", "is neither in"),
     ("score", "write it as"), ("mine.py:Other", "is no plain function"), ("mine.py:one", "too many positional")],
)  # fmt: skip
def test_a_spec_that_cannot_be_used_is_one_line(folder, spec, says):
    with pytest.raises(StartError, match=says) as error:
        start(folder, spec)
    assert str(error.value).startswith("reward.function") and "\n" not in str(error.value)
