"""Trackers: named ones are refused when absent, and a resumed run goes on under its name."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest

from config import ConfigError, LogConfig
from run import trackers
from run.trackers import Trackio, WeightsAndBiases, check_trackers, numbers, open_trackers

ROW = {"step": 3, "reward": 0.5, "skipped": False, "stops": {"answered": 7}, "name": "x"}


def test_counts_by_name_become_numbers_of_their_own():
    assert numbers(ROW) == {"step": 3.0, "reward": 0.5, "skipped": 0.0, "stops/answered": 7.0}


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_named_tracker_that_is_absent_is_refused_with_the_mend(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=f"{name} is not installed; run `pip install -r requirements/report.txt`"):
        check_trackers(LogConfig(trackers=(name,)))


def test_nothing_is_opened_where_nothing_is_installed_or_named(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    check_trackers(LogConfig())
    assert open_trackers(LogConfig(), tmp_path, {}) == []
    assert not list(tmp_path.iterdir())


class FakeService(types.ModuleType):
    """Stands for wandb or trackio: both give a run with `log` and `finish`."""

    def __init__(self, name: str):
        super().__init__(name)
        self.started: list[dict] = []
        self.logged: list[tuple] = []

    def init(self, **settings):
        self.started.append(settings)
        return self

    def define_metric(self, *names, **settings): ...

    def log(self, values, step=None):
        self.logged.append((values, step))

    def finish(self): ...


@pytest.mark.parametrize(("name", "kind", "step"), [("wandb", WeightsAndBiases, None), ("trackio", Trackio, 3)])
def test_a_resumed_run_goes_on_under_its_name(monkeypatch, tmp_path, name, kind, step):
    service = FakeService(name)
    monkeypatch.setitem(sys.modules, name, service)
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: asked == name)
    for _ in range(2):
        [opened] = open_trackers(LogConfig(trackers=(name,), project="p"), tmp_path, {"train": {"steps": 3}})
        assert isinstance(opened, kind)
        opened.log(ROW)
        opened.close()
    first, second = service.started
    assert first == second
    assert first["project"] == "p" and first["resume"] == "allow" and first["config"] == {"train": {"steps": 3}}
    values = {key: value for key, value in numbers(ROW).items() if key != "step" or step is None}
    assert service.logged == [(values, step)] * 2


def test_tensorboard_gets_each_number_and_a_mark_where_a_resumed_run_starts(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: requirements/report.txt")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = trackers.TensorBoard(tmp_path)
    for step in (1, 2, 3):
        board.log({"step": step, "reward": float(step)})
    board.rewind(1)
    board.log({"step": 2, "reward": 20.0})
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 1.0), (2, 20.0)]
