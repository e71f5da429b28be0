"""Reads nested frozen dataclasses from JSON: the machinery behind config.py, which holds the settings themselves.

Every error is one line that names the field, its value and the mend; an unknown key names the nearest known one.
Standard library only.
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from pathlib import Path
from typing import Any, Literal


class UserError(Exception):
    """Something that a user can mend; the message is one line that says what and how. Anything else is our fault."""

    of_one_rank = False  # not every rank raises it, so whichever does must say it


class ConfigError(UserError, ValueError):
    """A setting that cannot work. The message is one line: field, value, what is wrong and the mend."""

    def __init__(self, name: str, value: Any, mend: str):
        super().__init__(f"{name}={value!r}: {mend}")


def require(ok: bool, name: str, value: Any, mend: str) -> None:
    if not ok:
        raise ConfigError(name, value, mend)


def read_json(path: str | Path) -> dict[str, Any]:
    """One JSON object of sections. Raises ConfigError."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--config", str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("--config", str(path), f"cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError("--config", str(path), f"line {error.lineno} is not JSON: {error.msg}") from error
    require(isinstance(raw, dict), "--config", str(path), "must hold one JSON object of sections")
    return raw


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """`section.field` -> (old, new) for each setting of two resolved configs that differs."""
    changed = {}
    for section, values in new.items():
        for key, value in values.items():
            before = old.get(section, {}).get(key)
            if before != value:
                changed[f"{section}.{key}"] = (before, value)
    return changed


def apply_override(raw: dict[str, Any], text: str) -> None:
    name, equals, value = text.partition("=")
    section, dot, key = name.partition(".")
    require(bool(equals and dot and key), "--set", text, "write section.field=value, e.g. train.steps=3")
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        parsed = value
    raw.setdefault(section, {})
    require(isinstance(raw[section], dict), section, raw[section], "a section is a JSON object")
    raw[section][key] = parsed


def parse_sections(root: type, raw: dict[str, Any], foreign: dict[str, str]) -> Any:
    """A dictionary of sections into `root`, a dataclass of dataclasses. Raises ConfigError.

    foreign: keys that people bring from elsewhere, with the reason why they are no settings here
    """
    sections = typing.get_type_hints(root)
    for name, value in raw.items():
        if name not in sections:
            homes = [section for section, cls in sections.items() if name in cls.__dataclass_fields__]
            mend = f"unknown section; did you mean {homes[0]}.{name}?" if homes else _nearest(name, sections)
            raise ConfigError(name, value, mend)
        require(isinstance(value, dict), name, value, "a section is a JSON object")
    return root(**{name: _parse_section(name, raw.get(name, {}), sections, foreign) for name in sections})


def _parse_section(section: str, raw: dict[str, Any], sections: dict[str, type], foreign: dict[str, str]) -> Any:
    cls = sections[section]
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in raw.items():
        name = f"{section}.{key}"
        if key not in hints:
            raise ConfigError(name, value, _unknown_key(section, key, sections, foreign))
        values[key] = _coerce(name, value, hints[key])
    return cls(**values)


def _unknown_key(section: str, key: str, sections: dict[str, Any], foreign: dict[str, str]) -> str:
    if key in foreign:
        return f"not a setting: {foreign[key]}"
    for other, cls in sections.items():
        if other != section and key in cls.__dataclass_fields__:
            return f"unknown in this section; did you mean {other}.{key}?"
    return _nearest(key, sections[section].__dataclass_fields__, prefix=f"{section}.")


def _nearest(key: str, known: typing.Iterable[str], prefix: str = "") -> str:
    names = list(known)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(names)}"
    return f"unknown key; {hint}"


def _coerce(name: str, value: Any, hint: Any) -> Any:
    """Checks one JSON value against its annotation; an integer may stand for a float, a list for a tuple."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        require(value in args and isinstance(value, str), name, value, f"must be one of {', '.join(map(repr, args))}")
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        words = [word for a in args if typing.get_origin(a) is Literal for word in typing.get_args(a)]
        others = [a for a in args if a is not type(None) and typing.get_origin(a) is not Literal]
        if not others:
            return _coerce(name, value, next(a for a in args if a is not type(None)))
        other = others[0]
        if words and isinstance(value, str):
            mend = f"must be {_TYPE_WORDS[other]} or {', '.join(map(repr, words))}"
            require(value in words, name, value, mend)
            return value
        return _coerce(name, value, other)
    if origin is tuple:
        require(
            isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value), name, value,
            "must be a list of strings",
        )  # fmt: skip
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    require(type(value) is hint, name, value, f"must be {_TYPE_WORDS[hint]}, not {type(value).__name__}")
    if hint is float:
        require(value == value and abs(value) != float("inf"), name, value, "must be a finite number")
    return value


_TYPE_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
