"""Runs tests/cases/sandbox.jsonl against a PythonTool and says for each case what it did wrong.

Also a script, so that a pass can run as another user (sandbox_user.py): it prints one JSON object per case.
Cases that start as a raw tool call belong to the chat parser and are left out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import config  # noqa: E402
import tools  # noqa: E402

CANARY_ENV = "TRAINER_SECRET"
CANARY_VALUE = "canary-7b1f9"
# Which layers give a case what it needs; it is enforced while one of them is on.
PROVIDES = {
    "fs": {"namespaces", "landlock"},
    "net": {"namespaces", "seccomp"},
    "pidns": {"namespaces"},
    "seccomp": {"seccomp"},
    "clean_env": {"environment"},
}
LAYERS = {"namespaces", "landlock", "seccomp", "environment", "limits", "identity"}
SHORT_S = 0.5  # stands for the cases' limit of 2 s, so that a pass takes seconds


def load() -> list[dict]:
    lines = (ROOT / "tests/cases/sandbox.jsonl").read_text(encoding="utf-8").splitlines()
    return [case for case in map(json.loads, lines) if case.get("input") != "raw_tool_call"]


class Surroundings:
    """What the cases try to reach: a secret file, a secret variable, an open port, an abstract socket."""

    def __enter__(self) -> Surroundings:
        self.folder = tempfile.mkdtemp(prefix="canary-")
        os.chmod(self.folder, 0o755)
        path = Path(self.folder, "answers.jsonl")
        path.write_text(CANARY_VALUE)
        inherited = dict(os.environ)
        os.environ.clear()
        os.environ |= {CANARY_ENV: CANARY_VALUE, **inherited}  # first: a case reads the start of an environment alone
        self.listener = socket.create_server(("127.0.0.1", 0))
        name = f"canary-{os.getpid()}"
        self.abstract = socket.socket(socket.AF_UNIX)
        if sys.platform == "linux":
            self.abstract.bind("\0" + name)
            self.abstract.listen()
        self.marks = {
            "FILE": str(path), "DIR": self.folder, "VALUE": CANARY_VALUE, "ENV": CANARY_ENV, "ABSTRACT_NAME": name,
        }  # fmt: skip
        self.port = str(self.listener.getsockname()[1])
        return self

    def fill(self, text: str) -> str:
        text = text.replace("@@LOOPBACK_PORT@@", self.port).replace("@@ABSTRACT_NAME@@", self.marks["ABSTRACT_NAME"])
        return re.sub(r"@@CANARY_(\w+)@@", lambda match: self.marks[match[1]], text)

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        self.abstract.close()
        del os.environ[CANARY_ENV]
        shutil.rmtree(self.folder)


def run(import_filter: str, without: tuple[str, ...] = (), ids: set[str] | None = None) -> dict[str, dict]:
    """Case id -> {"faults": [...], "enforced": bool, "status": ..., "text": ...}."""
    mode = "open" if import_filter == "off" else "default"
    cases = [case for case in load() if mode in case.get("modes", [mode]) and (ids is None or case["id"] in ids)]
    found: dict[str, dict] = {}
    with Surroundings() as around:
        for show in (False, True):
            chosen = [case for case in cases if bool(case.get("settings", {}).get("show_last_value")) == show]
            if chosen:
                settings = config.ToolConfig(import_filter=import_filter, show_last_value=show, max_running=2)
                found |= _run_with(settings, without, chosen, around)
    return found


def _run_with(settings: config.ToolConfig, without: tuple, cases: list[dict], around: Surroundings) -> dict[str, dict]:
    found = {}
    tool = tools.PythonTool(settings, without=without)
    try:
        futures = []
        for case in cases:
            limit = case.get("settings", {}).get("timeout_s")
            futures.append(tool.submit(around.fill(case["code"]), timeout=SHORT_S if limit == 2 else limit))
        free = shutil.disk_usage(tempfile.gettempdir()).free
        for case, future in zip(cases, futures, strict=True):
            result = future.result(timeout=60)
            faults = check(case, result, around)
            if "next" in case:
                after = tool.submit(case["next"]["code"]).result(timeout=60)
                faults += check({"expect": {"status_in": ["ok", "refused"]} | _tests(case["next"])}, after, around)
            used = (free - shutil.disk_usage(tempfile.gettempdir()).free) >> 20
            if used > case["expect"].get("host_disk_growth_mb_max", 1 << 30):
                faults.append(f"{used} MiB of the disk are gone")
            needs = case["expect"].get("needs", [])
            on = LAYERS - set(without)
            found[case["id"]] = {
                "faults": faults, "status": result.status, "text": result.text[:300],
                "enforced": all(PROVIDES[need] & on for need in needs),
            }  # fmt: skip
        if tool("print(6*7)") != "42":
            found["(afterwards)"] = {"faults": ["the tool does not go on"], "enforced": True}
    finally:
        tool.close()
        for path in {path for case in cases for path in case["expect"].get("host_absent", [])}:
            Path(around.fill(path)).unlink(missing_ok=True)  # written where nothing forbids it
    return found


def _tests(after: dict) -> dict:
    return {key: value for key, value in after.items() if key != "code"}


def check(case: dict, result: tools.ToolResult, around: Surroundings) -> list[str]:
    """What the result does that the case forbids, or lacks that it asks for."""
    expect = json.loads(around.fill(json.dumps(case["expect"])))
    text, faults = result.text, []
    statuses = [{"oom": "out_of_memory"}.get(status, status) for status in expect["status_in"]]

    def want(ok: bool, what: str) -> None:
        if not ok:
            faults.append(f"{what}: {result.status} {result.error_type} {text[:200]!r}")

    want(result.status in statuses, f"status not in {statuses}")
    want(all(word not in text for word in expect.get("not_contains", [])), "forbidden words")
    want(len(text) <= expect.get("max_output_chars", 1 << 20), "too long")
    want(result.wall_s <= expect.get("max_wall_s", 60), f"took {result.wall_s:.1f} s")
    want(bool(text.strip()), "empty")
    want(text == text.encode("utf-8", "strict").decode(), "not UTF-8")
    for path in expect.get("host_absent", []):
        want(not os.path.exists(path), f"{path} was written")
    if "max_inherited_fds" in expect and "OPEN" in text:
        want(text.count("'0o") <= expect["max_inherited_fds"], "inherited descriptors")
    if result.status != "refused":
        types = [{"OutOfMemory": "OutOfMemory"}.get(t, t) for t in expect.get("error_type_in", [])]
        types += [expect["error_type"]] if "error_type" in expect else []
        want(not types or result.error_type in types, f"type not in {types}")
        want(all(word in text for word in expect.get("contains", [])), "missing words")
        want(
            not expect.get("contains_any") or any(word in text for word in expect["contains_any"]), "none of the words"
        )
        want(text == expect.get("equals", text), f"not {expect.get('equals')!r}")
    return faults


if __name__ == "__main__":
    for ident, row in run(sys.argv[1], tuple(sys.argv[2:])).items():
        print(json.dumps({"id": ident} | row))
