"""The control group round a zygote, where one can be made."""

import os
import subprocess
import sys

import pytest

from sandbox.layers import cgroup, probe


@pytest.fixture
def folders():
    made = cgroup.create(f"{os.getpid()}-test", 1 << 30, 50)
    if not made:
        pytest.skip("no control group can be made here")
    yield made
    cgroup.remove(made, 2.0)


def test_a_process_that_joins_is_in_the_group_and_the_group_goes_when_it_is_empty(folders):
    assert probe.in_scratch_process(lambda: [str(cgroup.join(folders))]) == ["True"]
    cgroup.remove(folders, 2.0)
    assert not any(map(os.path.isdir, folders))


def test_the_groups_of_a_dead_broker_are_swept_and_those_of_a_live_one_kept(folders):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    orphan = cgroup.create(f"{gone.pid}-0", 1 << 30, 50)
    other = cgroup.create(f"{os.getppid()}-test", 1 << 30, 50)
    assert not any(map(os.path.isdir, orphan)) and all(map(os.path.isdir, other))
    cgroup.remove(other)


def test_where_no_group_can_be_made_there_is_none(monkeypatch):
    monkeypatch.setattr(cgroup, "_V2", "/nonexistent")
    monkeypatch.setattr(cgroup, "_V1_MEMORY", "/nonexistent")
    assert cgroup.create("x-0", 1, 1) == []
    assert cgroup.join([]) is False
