"""The one line that says at start what is enforced, from what the zygote found by trying."""

from __future__ import annotations

from typing import Any

# What can be left off, to test what it does.
LAYERS = ("namespaces", "landlock", "seccomp", "identity", "limits", "environment", "cgroup")


def verdict(hello: dict[str, Any]) -> tuple[bool, str]:
    """(whether a kernel boundary holds, the report line).

    A boundary needs: files held by the mount namespace or Landlock (version 3 or later, which covers truncation),
    network by the network namespace or the filter, processes and system calls by the filter, memory by limits, an
    unprivileged identity, a clean environment; and no breach when everything was tried together.
    """
    spaces, lock, calls = hello["namespaces"], hello["landlock"], hello["seccomp"]
    memory = [*["rlimit"] * hello["limits"], *["cgroup"] * hello.get("cgroup", False)]
    rows = {
        "files": [*["namespace"] * spaces, *[f"landlock({lock})"] * bool(lock)],
        "network": [*["namespace"] * spaces, *["seccomp"] * calls, *["landlock"] * (lock >= 4)],
        "processes": [*["pidns"] * spaces, *["seccomp"] * calls],
        "memory": memory,
        "identity": [f"uid {hello['uid']}"],
        "env": ["clean"] * ("environment" not in hello["missing"]),
    }
    lacks = [f"no {name} ({reason})" for name, reason in hello["missing"].items()]
    lacks += [f"BREACH: {breach}" for breach in hello["breaches"]]
    held = (spaces or lock >= 3) and calls and hello["limits"] and hello["uid"] != 0 and bool(rows["env"])
    boundary = held and not hello["breaches"]
    words = " ".join(f"{name}={'+'.join(parts) or 'NONE'}" for name, parts in rows.items())
    if boundary:
        return True, f"sandbox: {words} -> BOUNDARY" + (f" (without: {'; '.join(lacks)})" if lacks else "")
    return False, f"sandbox: {words} -> BEST EFFORT ({'; '.join(lacks) or 'runs as root'})"
