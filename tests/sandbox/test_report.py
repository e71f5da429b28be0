"""The line that says what is enforced."""

import pytest

from sandbox.parent import report

FULL = {"namespaces": True, "landlock": 7, "seccomp": True, "limits": True, "cgroup": True, "uid": 64000,
        "missing": {}, "breaches": []}  # fmt: skip


def test_all_layers_make_a_boundary():
    boundary, line = report.verdict(FULL)
    assert boundary
    assert line == (
        "sandbox: files=namespace+landlock(7) network=namespace+seccomp+landlock processes=pidns+seccomp "
        "memory=rlimit+cgroup identity=uid 64000 env=clean -> BOUNDARY"
    )


@pytest.mark.parametrize(
    ("change", "boundary"),
    [
        ({"landlock": 0, "missing": {"landlock": "absent"}}, True),
        ({"namespaces": False, "missing": {"namespaces": "EPERM"}}, True),
        ({"namespaces": False, "landlock": 2}, False),  # truncation is not covered before version 3
        ({"namespaces": False, "landlock": 0}, False),
        ({"seccomp": False, "missing": {"seccomp": "absent"}}, False),
        ({"limits": False}, False),
        ({"uid": 0}, False),
        ({"missing": {"environment": "left off"}}, False),
        ({"breaches": ["read /etc/passwd"]}, False),
    ],
)
def test_what_is_missing_decides_and_is_named(change, boundary):
    held, line = report.verdict(FULL | change)
    assert held == boundary
    assert ("BOUNDARY" in line) == boundary and ("BEST EFFORT" in line) != boundary
    for name in change.get("missing", {}):
        assert f"no {name} (" in line
    for breach in change.get("breaches", []):
        assert breach in line
