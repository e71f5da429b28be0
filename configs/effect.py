"""No silent setting: where a setting has an effect, as each declares by `needs`, and the refusal elsewhere.

The rule applies to what a config file and `--set` name with another value than the default, never to a run's resolved
file. Left out: what only the model decides (experts, GPT-OSS's prompt); that is refused where the model is read.
Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Mapping
from typing import Any

from configs.schema import Bounds, require

_CONDITION = re.compile(r"(\w+)\.(\w+)(?: (==|!=|>|<|has) (.+))?")
CUDA = "CUDA"


def unmet(needs: str, config: Any, cuda: bool | None) -> str:
    """The first condition of `needs` that does not hold, as `section.field=value`; empty where all hold.

    needs: conditions joined by " and ", each of alternatives joined by " or ": `section.field` (is set), the same with
    ==, !=, > or < and a JSON value or with `has` and a text that it must hold (several: `x|y`), or CUDA. cuda: None:
    not known yet, and passes
    """
    for condition in filter(None, needs.split(" and ")):
        failed = [_failed(alternative, config, cuda) for alternative in condition.split(" or ")]
        if all(failed):
            return " and ".join(failed)
    return ""


def _failed(condition: str, config: Any, cuda: bool | None) -> str:
    """Why one condition does not hold; empty where it does."""
    if condition == CUDA:
        return "no GPU was found" if cuda is False else ""
    found = _CONDITION.fullmatch(condition)
    assert found is not None, condition
    section, key, operation, wanted = found.groups()
    value = value_of(config, f"{section}.{key}")
    return "" if _holds(value, operation, wanted) else f"{section}.{key}={value!r}"


def value_of(config: Any, name: str) -> Any:
    """name: section.field"""
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def _holds(value: Any, operation: str | None, wanted: str) -> bool:
    if operation is None:
        return bool(value)
    if operation == "has":
        return any(word in value for word in wanted.split("|"))
    other = json.loads(wanted)
    if operation in ("==", "!="):
        return (value == other) is (operation == "==")
    return value > other if operation == ">" else value < other


def named_settings(raw: dict[str, Any], root: type) -> dict[str, Bounds]:
    """The settings that `raw` gives another value than their default."""
    sections = typing.get_type_hints(root)
    return {
        f"{section}.{field.name}": field.metadata["bounds"]
        for section, cls in sections.items()
        for field in dataclasses.fields(cls)
        if isinstance(raw.get(section), dict) and field.name in raw[section]
        and json.dumps(raw[section][field.name]) != json.dumps(field.default)
    }  # fmt: skip


def require_effect(config: Any, named: Mapping[str, Bounds], cuda: bool | None) -> None:
    """Refuses a setting that does nothing under the others. cuda: whether there is a GPU; None: not known."""
    for name, bounds in named.items():
        why = unmet(bounds.needs, config, cuda)
        fix = f"has no effect, since {why}; it needs {bounds.needs}; set that, or leave it out"
        require(not why, name, value_of(config, name), fix)
