"""Layers are believed only when the forbidden thing was tried and refused."""

import os
import socket
import sys

import pytest

from sandbox.layers import isolation, kernel, landlock, limits, probe

pytestmark = pytest.mark.skipif(not kernel.SUPPORTED, reason="needs Linux on x86_64 or aarch64")


def _plan(tmp_path) -> isolation.Plan:
    (tmp_path / "scratch").mkdir(exist_ok=True)
    readable = [os.path.dirname(os.__file__), os.path.join(sys.prefix, "lib")]
    return isolation.Plan(readable, str(tmp_path / "scratch"), 64 << 20, 100)


def test_a_layer_left_off_is_named_with_its_reason(tmp_path):
    plan = _plan(tmp_path)
    probe.find(plan, {"namespaces", "landlock", "seccomp", "identity"})
    assert plan.missing == dict.fromkeys(("namespaces", "landlock", "seccomp"), "left off")
    assert (plan.namespaces, plan.landlock, plan.seccomp) == (False, 0, False)


def test_a_layer_that_does_not_refuse_is_not_believed(tmp_path, monkeypatch):
    plan = _plan(tmp_path)
    monkeypatch.setattr(probe.seccomp.SystemCallFilter, "install", lambda self, pid: None)
    monkeypatch.setattr(landlock, "restrict", lambda ruleset: None)
    probe.find(plan, {"namespaces", "identity"})
    assert not plan.seccomp and "started a process" in plan.missing["seccomp"]
    assert not plan.landlock and "read " in plan.missing["landlock"]


def test_a_breach_of_the_whole_is_found_when_a_layer_is_believed_wrongly(tmp_path):
    plan = _plan(tmp_path)
    plan.limits = False
    plan.seccomp = True
    box = isolation.Isolation(plan)
    box.settle(1 << 40)
    box._filter = None
    breaches = probe.whole(box, [])
    assert "started a process" in breaches and "made a socket" in breaches


def test_what_a_scratch_process_says_comes_back_and_its_death_is_noticed():
    def refused() -> list[str]:
        raise OSError(1, "no")

    assert probe.in_scratch_process(lambda: ["a", "b"]) == ["a", "b"]
    assert probe.in_scratch_process(list) == []
    assert probe.in_scratch_process(refused) == ["[Errno 1] no"]
    assert probe.in_scratch_process(lambda: os._exit(3)) == ["the probing process died"]


@pytest.mark.skipif(not landlock.abi(), reason="the kernel has no Landlock")
def test_landlock_allows_the_named_folders_and_nothing_else(tmp_path):
    for name in ("read", "change", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")

    def attempt() -> list[str]:
        fd = landlock.ruleset([str(tmp_path / "read")], [str(tmp_path / "change"), "/dev/null"], landlock.abi())
        kernel.no_new_privileges()
        landlock.restrict(fd)
        actions = {
            "read read": lambda: open(tmp_path / "read/file").close(),
            "write read": lambda: open(tmp_path / "read/file", "w").close(),
            "make in read": lambda: os.mkdir(tmp_path / "read/new"),
            "write change": lambda: open(tmp_path / "change/file", "w").close(),
            "make in change": lambda: os.mkdir(tmp_path / "change/new"),
            "null": lambda: open("/dev/null", "w").close(),
            "read other": lambda: open(tmp_path / "other/file").close(),
            "list other": lambda: os.listdir(tmp_path / "other"),
            "run": lambda: os.execv("/bin/true", ["true"]),
        }
        return [name for name, action in actions.items() if probe._works(action)]

    assert probe.in_scratch_process(attempt) == ["read read", "write change", "make in change", "null"]


def test_limits_hold_and_keep_what_the_host_has_set_lower():
    import resource

    def attempt() -> list[str]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        limits.apply(1 << 33, 10**6)
        small = [resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)]
        address = resource.getrlimit(resource.RLIMIT_AS)
        limits.allow_headroom()
        return [
            repr(small),
            repr(address[1] - address[0]),
            repr(resource.getrlimit(resource.RLIMIT_AS)[0] == address[1]),
        ]

    assert probe.in_scratch_process(attempt) == ["[(32, 32), (0, 0)]", str(limits.HEADROOM_BYTES), "True"]


def test_disk_use_is_measured(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_bytes(bytes(100_000))
    assert 100_000 <= limits.disk_bytes(str(tmp_path)) < 200_000


def test_the_probe_reaches_a_listening_port_when_nothing_holds_it():
    outside = probe.Outside([])
    assert outside.breaches_of_network() and outside.breaches_of_files() and outside.breaches_of_processes()
    outside.close()
    assert isinstance(outside.listener, socket.socket)
