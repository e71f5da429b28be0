"""Reads nested frozen dataclasses from JSON: the machinery behind config.py, which declares the settings themselves.

A section is a dataclass derived from `Section`, and each of its fields is declared by `setting` with default, one line
of documentation and range. From these come the checks, the error texts and the listing of `main.py settings`.

Every error is one line that names the field, its value and the fix; an unknown key names the nearest known one.
Standard library only.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")


CODE = "code"  # folder of a run: the user's files as they ran


class UserError(Exception):
    """Something that the user can fix; the message is one line that says what and how. Anything else is a bug."""

    of_one_rank = False  # True: the rank that raises it prints it, since the others may not raise it


class ConfigError(UserError, ValueError):
    """A setting that cannot work. The message is one line: field, value, what is wrong and the fix."""

    def __init__(self, name: str, value: Any, fix: str):
        super().__init__(f"{name}={value!r}: {fix}")


def require(ok: bool, name: str, value: Any, fix: str) -> None:
    """Raises ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(name, value, fix)


# Declaring a setting


@dataclass(frozen=True, slots=True)
class Bounds:
    """The values that a setting may take beyond its type. `zero`, `null` and `empty` say what those values mean."""

    doc: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    zero: str = ""
    null: str = ""
    required: str = ""  # of a string: the fix where it is empty
    fix: str = ""  # what an error adds to the range
    needs: str = ""  # where the setting has an effect, see `configs.effect`; empty: always

    def holds(self, value: Any) -> bool:
        if self.required:
            return bool(value)
        if value is None or isinstance(value, (str, bool, tuple)):
            return True
        low = (self.at_least is None or value >= self.at_least) and (self.above is None or value > self.above)
        return low and (self.at_most is None or value <= self.at_most) and (self.below is None or value < self.below)

    @property
    def words(self) -> str:
        """The range as an error says it after "must": "be at least 1", "lie in [0, 1)"."""
        low = self.at_least if self.above is None else self.above
        high = self.at_most if self.below is None else self.below
        if low is None:
            return ""
        if high is not None:
            return f"lie in {'(['[self.above is None]}{low:g}, {high:g}{')]'[self.below is None]}"
        if self.zero and low == 0:
            return f"be 0 ({self.zero}) or more"
        return f"be above {low:g}" if self.above is not None else f"be at least {low:g}"

    @property
    def error(self) -> str:
        if self.required:
            return self.required
        null = f", or null ({self.null})" if self.null else ""
        return f"must {self.words}{null}" + (f"; {self.fix}" if self.fix else "")


def setting(default: Any, doc: str, **bounds: Any) -> Any:
    """A field of a section. doc: one plain line; bounds: see `Bounds`."""
    return dataclasses.field(default=default, metadata={"bounds": Bounds(doc, **bounds)})


class Section:
    """Base of a section's dataclass. `TrainConfig` declares the section `train`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            bounds: Bounds = field.metadata["bounds"]
            self.demand(bounds.holds(getattr(self, field.name)), field.name, bounds.error)
        self.rules()

    def rules(self) -> None:
        """Rules between the fields of this section. Raises ConfigError."""

    def demand(self, ok: bool, name: str, fix: str) -> None:
        section = type(self).__name__.removesuffix("Config").lower()
        require(ok, f"{section}.{name}", getattr(self, name), fix)


def located_spec(spec: str, beside: Path) -> str:
    """A spec "FILE.py:NAME" with the file's whole path: in `beside`, in the working directory, or, where a run's file
    has moved since, the copy that the run keeps. One that is nowhere stays as it is, for start-up to refuse."""
    file, colon, name = spec.rpartition(":")
    for path in (beside / file, Path.cwd() / file, beside / CODE / Path(file).name):
        if colon and file and path.is_file():
            return f"{path.resolve()}:{name}"
    return spec


def listing(root: type, only: str | None = None) -> list[str]:
    """One line for each setting: name, default, allowed values, documentation. only: one section. Raises UserError."""
    sections = typing.get_type_hints(root)
    if only is not None and only not in sections:
        raise UserError(f"{only}: no such section; known: {', '.join(sections)}")
    rows = [
        (f"{section}.{field.name}", _as_json(field.default), _allowed(hints[field.name], field.metadata["bounds"]),
         field.metadata["bounds"].doc)
        for section, cls in sections.items() if only in (None, section)
        for hints in [typing.get_type_hints(cls)]
        for field in dataclasses.fields(cls)
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"{name:{widths[0]}}  {value:{widths[1]}}  {doc} ({allowed})" for name, value, allowed, doc in rows]


def _as_json(value: Any) -> str:
    return json.dumps(value)


def _allowed(hint: Any, bounds: Bounds) -> str:
    options = _options(hint)
    words = [bounds.words.removeprefix("be ").removeprefix("lie ")] if bounds.words else []
    if bounds.zero and not bounds.words.startswith("be 0 ("):
        words.append(f"0 means {bounds.zero}")
    null = [f"or null ({bounds.null})" if bounds.null else "or null"] if type(None) in typing.get_args(hint) else []
    needs = [f"needs {bounds.needs}"] if bounds.needs else []
    return ", ".join([" or ".join(options), *words, *null, *needs])


def _options(hint: Any) -> list[str]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return [_as_json(word) for word in args]
    if origin is tuple:
        return [f"list of {' or '.join(_options(args[0]))}"]
    if args:
        return [option for arg in args if arg is not type(None) for option in _options(arg)]
    return [_TYPE_WORDS[hint].removeprefix("an ").removeprefix("a ")]


# Reading JSON


@dataclass(frozen=True, slots=True)
class Removed:
    """A setting that earlier versions had; with `value`, only that value of one that is still there."""

    name: str  # section.field
    default: Any  # its old default, accepted in a run folder's resolved config
    instead: str
    value: Any = None

    def stands_in(self, raw: dict[str, Any]) -> bool:
        section, _, key = self.name.partition(".")
        values = raw.get(section)
        return isinstance(values, dict) and key in values and (self.value is None or values[key] == self.value)


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
        for key, value in values.items() if isinstance(values, dict) else ():
            before = old.get(section, {}).get(key)
            if before != value:
                changed[f"{section}.{key}"] = (before, value)
    return changed


def apply_override(raw: dict[str, Any], text: str) -> None:
    """Applies one `section.field=value` in place. Raises ConfigError."""
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


def without_removed(raw: dict[str, Any], removed: Iterable[Removed]) -> dict[str, Any]:
    """A run's resolved settings without those that were removed since and stand at their old default."""
    cleaned = {name: dict(values) if isinstance(values, dict) else values for name, values in raw.items()}
    for gone in removed:
        section, _, key = gone.name.partition(".")
        if gone.value is None and gone.stands_in(cleaned) and cleaned[section][key] == gone.default:
            del cleaned[section][key]
    return cleaned


def parse_sections(
    root: type[T], raw: dict[str, Any], foreign: dict[str, str], removed: Sequence[Removed] = ()
) -> T:  # fmt: skip
    """A dictionary of sections into `root`, a dataclass of sections. Raises ConfigError.

    foreign: keys that people bring from elsewhere, with the reason why they are no settings here
    """
    sections = typing.get_type_hints(root)
    for gone in removed:
        if gone.stands_in(raw):
            section, _, key = gone.name.partition(".")
            raise ConfigError(gone.name, raw[section][key], f"was removed; {gone.instead}")
    for name, value in raw.items():
        if name not in sections:
            homes = [section for section, cls in sections.items() if name in cls.__dataclass_fields__]
            fix = f"unknown section; did you mean {homes[0]}.{name}?" if homes else _nearest(name, sections)
            raise ConfigError(name, value, fix)
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


def _nearest(key: str, known: Iterable[str], prefix: str = "") -> str:
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
        return _coerce_union(name, value, args)
    if origin is tuple:
        listed = isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value)
        require(listed, name, value, "must be a list of strings")
        return tuple(_coerce(name, word, args[0]) for word in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    require(type(value) is hint, name, value, f"must be {_TYPE_WORDS[hint]}, not {type(value).__name__}")
    if hint is float:
        require(math.isfinite(value), name, value, "must be a finite number")
    return value


def _coerce_union(name: str, value: Any, args: tuple[Any, ...]) -> Any:
    """A type or one of some words, or null: `int | Literal["auto"] | None`."""
    if value is None and type(None) in args:
        return None
    words = [word for a in args if typing.get_origin(a) is Literal for word in typing.get_args(a)]
    others = [a for a in args if a is not type(None) and typing.get_origin(a) is not Literal]
    if not others:
        return _coerce(name, value, next(a for a in args if a is not type(None)))
    if words and isinstance(value, str):
        require(value in words, name, value, f"must be {_TYPE_WORDS[others[0]]} or {', '.join(map(repr, words))}")
        return value
    return _coerce(name, value, others[0])


_TYPE_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
