"""The text of a harmony prompt's system and developer messages, byte for byte as openai-harmony renders them.

Flat fields are declared as openai-harmony does; lists, choices and nested objects are TypeScript too, where it has its
own habits. Left out: OpenAI's built-in tools (our Python tool is declared as a function). Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
KNOWLEDGE_CUTOFF = "2024-06"
_TYPES = {name: name for name in ("string", "number", "boolean", "null", "object")} | {"integer": "number"}


def system_text(reasoning_effort: str, current_date: str, with_tools: bool) -> str:
    """reasoning_effort: low, medium or high; current_date: YYYY-MM-DD; with_tools: functions are declared."""
    text = (
        f"{IDENTITY}\nKnowledge cutoff: {KNOWLEDGE_CUTOFF}\nCurrent date: {current_date}\n\n"
        f"Reasoning: {reasoning_effort}\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    )
    return text + "\nCalls to these tools must go to the commentary channel: 'functions'." if with_tools else text


def developer_text(instructions: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """Instructions and declared functions; empty without both."""
    parts = [f"# Instructions\n\n{instructions}"] if instructions else []
    if tools:
        declared = "".join(declaration(tool["function"]) for tool in tools)
        parts.append(f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{declared}}} // namespace functions")
    return "\n\n".join(parts)


def declaration(function: Mapping[str, Any]) -> str:
    """One function in TypeScript."""
    parameters = function.get("parameters") or {}
    lines = [f"// {line}" for line in function.get("description", "").splitlines()]
    head = f"type {function['name']} = "
    fields = _fields(parameters, "")
    lines += [f"{head}(_: {{", *fields, "}) => any;"] if "properties" in parameters else [f"{head}() => any;"]
    return "\n".join(lines) + "\n\n"


def _fields(schema: Mapping[str, Any], indent: str) -> list[str]:
    """One line for each property of an object, its description before it."""
    lines = []
    for name, field in schema.get("properties", {}).items():
        described = str(field.get("description", "")).splitlines()
        lines += [f"{indent}// {line}" for line in described]
        optional = "" if name in schema.get("required", ()) else "?"
        default = f" // default: {_literal(field['default'])}" if "default" in field else ""
        lines.append(f"{indent}{name}{optional}: {_type(field, indent)},{default}")
    return lines


def _type(field: Mapping[str, Any], indent: str) -> str:
    """A JSON schema as a TypeScript type; what has none is `any`."""
    wanted = field.get("type")
    choices = next((field[key] for key in ("oneOf", "anyOf") if isinstance(field.get(key), list)), None)
    if choices:
        text = " | ".join(_type(choice, indent) for choice in choices)
    elif isinstance(wanted, list):
        text = " | ".join(_TYPES.get(str(name), "any") for name in wanted)
    elif field.get("enum"):
        text = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in field["enum"])
    elif wanted == "array":
        items = _type(field.get("items") or {}, indent)
        text = f"({items})[]" if " | " in items else f"{items}[]"
    elif wanted == "object" and field.get("properties"):
        text = "\n".join(["{", *_fields(field, indent + "    "), f"{indent}}}"])
    else:
        text = _TYPES.get(str(wanted), "any")
    return f"{text} | null" if field.get("nullable") and "null" not in text else text


def _literal(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
