"""The text of a harmony prompt's system and developer messages, byte for byte as openai-harmony renders them.

Left out: tools whose arguments are more than flat fields of text, numbers and truth values, and OpenAI's built-in
tools (our Python tool is declared as a function). Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
KNOWLEDGE_CUTOFF = "2024-06"
_TYPES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def system_text(reasoning_effort: str, current_date: str, with_tools: bool) -> str:
    """reasoning_effort: low, medium or high; current_date: YYYY-MM-DD; with_tools: functions are declared."""
    text = (
        f"{IDENTITY}\nKnowledge cutoff: {KNOWLEDGE_CUTOFF}\nCurrent date: {current_date}\n\n"
        f"Reasoning: {reasoning_effort}\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    )
    return text + "\nCalls to these tools must go to the commentary channel: 'functions'." if with_tools else text


def developer_text(instructions: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """Instructions and declared functions; empty without both. Raises ValueError for a tool that is left out here."""
    parts = [f"# Instructions\n\n{instructions}"] if instructions else []
    if tools:
        declared = "".join(_declaration(tool["function"]) for tool in tools)
        parts.append(f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{declared}}} // namespace functions")
    return "\n\n".join(parts)


def _declaration(function: Mapping[str, Any]) -> str:
    """One function in TypeScript."""
    parameters = function.get("parameters") or {}
    required = parameters.get("required", ())
    lines = [f"// {line}" for line in function.get("description", "").splitlines()]
    fields = []
    for name, field in parameters.get("properties", {}).items():
        if set(field) - {"type", "description"} or field.get("type") not in _TYPES:
            raise ValueError(f"tool {function['name']}: argument {name!r} must be flat, of type {', '.join(_TYPES)}")
        fields += [f"// {field['description']}"] if field.get("description") else []
        fields.append(f"{name}{'' if name in required else '?'}: {_TYPES[field['type']]},")
    head = f"type {function['name']} = "
    lines += [f"{head}(_: {{", *fields, "}) => any;"] if "properties" in parameters else [f"{head}() => any;"]
    return "\n".join(lines) + "\n\n"
