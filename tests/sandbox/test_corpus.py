"""Every program of tests/cases/sandbox.jsonl, in every mode; and each layer's own cases fail without it.

The gate runs the full box as root and as an ordinary user, and one degraded profile; the others are marked slow.
A case whose layer is off counts as "not enforced": it neither passes nor fails.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import sandbox_corpus

SUPPORT = Path(__file__).resolve().parents[1] / "support"
FULL = ()
SECCOMP_AND_LANDLOCK = ("namespaces",)
NOTHING = ("namespaces", "landlock", "seccomp")
is_root = os.geteuid() == 0
needs_root = pytest.mark.skipif(not is_root, reason="only root can become another user")


def _pass(
    import_filter: str, without: tuple = (), other_user: bool = False, ids: set | None = None
) -> dict[str, dict]:
    if not other_user:
        return sandbox_corpus.run(import_filter, without, ids)
    script, user = str(SUPPORT / "sandbox_corpus.py"), str(SUPPORT / "sandbox_user.py")
    command = [sys.executable, "-B", user, sys.executable, "-B", script, import_filter, *without]
    run = subprocess.run(command, cwd="/", stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    return {row.pop("id"): row for row in rows}


def _judge(found: dict[str, dict], unenforced: set[str] = frozenset()) -> None:
    faults = {ident: row["faults"] for ident, row in found.items() if row["enforced"] and row["faults"]}
    assert not faults
    assert len(found) >= 83
    assert {ident for ident, row in found.items() if not row["enforced"]} == unenforced


@pytest.mark.parametrize("import_filter", ["on", "off"])
def test_all_cases_hold_in_the_full_box(import_filter):
    _judge(_pass(import_filter))


@needs_root
def test_all_cases_hold_for_an_ordinary_user():
    _judge(_pass("off", other_user=True))


def test_without_namespaces_seccomp_and_landlock_hold_all_but_what_needs_them():
    _judge(_pass("off", SECCOMP_AND_LANDLOCK), {"proc-parents"})


@pytest.mark.slow
@pytest.mark.parametrize("other_user", [False, pytest.param(True, marks=needs_root)])
@pytest.mark.parametrize(
    ("import_filter", "without", "unenforced"),
    [
        ("on", FULL, set()),
        ("off", ("landlock",), set()),
        ("off", ("seccomp",), {"kernel-escape-calls"}),
        ("on", SECCOMP_AND_LANDLOCK, {"proc-parents"}),
        ("off", SECCOMP_AND_LANDLOCK, {"proc-parents"}),
        ("off", ("namespaces", "landlock"), {"proc-parents", "fs-read-answers", "fs-write-outside"}),
        ("off", NOTHING, {"proc-parents", "fs-read-answers", "fs-write-outside", "net-listen", "kernel-escape-calls"}),
        ("on", NOTHING, {"proc-parents", "fs-read-answers", "fs-write-outside", "net-listen", "kernel-escape-calls"}),
    ],
)
def test_each_degraded_profile_holds_what_it_can(import_filter, without, unenforced, other_user):
    _judge(_pass(import_filter, without, other_user), unenforced)


@pytest.mark.parametrize(
    ("without", "ident"),
    [
        (("namespaces", "landlock"), "fs-read-answers"),
        (("seccomp",), "kernel-escape-calls"),
        (("environment",), "env-read"),
        pytest.param((*NOTHING, "environment", "identity"), "proc-parents", marks=needs_root),
    ],
)
def test_a_case_fails_when_the_layer_it_needs_is_taken_away(without, ident):
    assert _pass("off", (), ids={ident})[ident]["faults"] == []
    without_it = _pass("off", without, ids={ident})[ident]
    assert not without_it["enforced"] and without_it["faults"]
