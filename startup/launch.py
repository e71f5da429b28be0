"""The variables by which a launcher tells a process its place among the ranks. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from configs.schema import require


def check_launch(variables: MutableMapping[str, str]) -> None:
    """Refuses the variables of a launcher where they are half set. One process needs no LOCAL_RANK: it gets 0.

    Raises ConfigError. Without RANK this is one process, whatever else is set (`require_rank` where it is not).
    """
    size = _whole(variables, "WORLD_SIZE", 1)
    if "RANK" not in variables:
        return
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
    if "LOCAL_RANK" not in variables and size != 1:
        missing.append("LOCAL_RANK")
    rank, fix = variables["RANK"], "set what is missing, or unset RANK for one process"
    require(not missing, "RANK", rank, f"is set without {', '.join(missing)}; {fix}")
    assert size is not None
    require(_whole(variables, "RANK", 0) in range(size), "RANK", rank, f"must be below WORLD_SIZE={size}")
    port = variables["MASTER_PORT"]
    require(_whole(variables, "MASTER_PORT", 0) in range(1 << 16), "MASTER_PORT", port, "must be a port below 65536")
    variables.setdefault("LOCAL_RANK", "0")
    _whole(variables, "LOCAL_RANK", 0)


def require_rank(variables: Mapping[str, str]) -> None:
    """Refuses a process that is one of several and does not know which. Raises ConfigError."""
    size = variables.get("WORLD_SIZE", "1")
    require("RANK" in variables or size == "1", "WORLD_SIZE", size, "is set without RANK; start a script or torchrun")


def _whole(variables: Mapping[str, str], name: str, least: int) -> int | None:
    text = variables.get(name)
    if text is None:
        return None
    ok = text.isascii() and text.isdecimal() and int(text) >= least
    require(ok, name, text, f"must be a whole number of at least {least}; a launcher sets it")
    return int(text)
