"""Sums with a calculator of our own, learnt by the shipped tiny model in half a minute on two CPU cores.

    tool.functions: ["tasks/tiny_calc.py:calc"]          reward.function: "tasks/tiny_calc.py:score"

A row is {"prompt": "What is 77*27+60?", "answer": "2139"}. The tiny model writes a call's fixed words as one token of
its vocabulary, so it can call no tool by a name that this token does not spell. tasks/tiny_calc/ is its tokenizer with
these words exchanged (`python tasks/tiny_calc.py` writes it): same ids, same weights, another tool. A real model needs
no such thing: it spells any name.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from pathlib import Path

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calc(expression: str) -> str:
    """Computes a sum of whole numbers.

    Args:
        expression: Numbers with +, - and *.
    """
    return str(value(ast.parse(expression.strip(), mode="eval").body))


def value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    raise ValueError("not a sum")


def score(trajectory, problem: dict) -> tuple[float, str, bool]:
    """1 for the answer in a box, less 0.05 for each call; 0.2 for the answer without a box; else 0.

    The answer must be what the calculator said last: a guess is not paid.
    """
    results = [call.text for turn in trajectory.turns for call in turn.calls if call.status == "ok"]
    if trajectory.stop != "answered" or not results or results[-1] != problem["answer"]:
        return 0.0, "not_computed", False
    boxes = re.findall(r"\\boxed\{(\d+)\}", trajectory.final_text)
    if boxes[-1:] == [problem["answer"]]:
        return 1.0 - 0.05 * len(results), "boxed", True
    if not boxes and problem["answer"] in trajectory.final_text:
        return 0.2, "no_box", False
    return 0.0, "wrong", False


def write_tokenizer(source: Path, target: Path) -> None:
    """The tiny model's tokenizer, with what it says of the Python tool exchanged for `calc`."""
    from transformers.utils import get_json_schema

    from config import ToolConfig
    from tools import tool_schema

    function = get_json_schema(calc)
    function["function"].pop("return", None)
    exchanged = {
        json.dumps(tool_schema(ToolConfig())): json.dumps(function),
        '{"name": "python", "arguments": {"code": "': '{"name": "calc", "arguments": {"expression": "',
        "print(": "(0+",
    }
    made = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, split = made["model"]["vocab"], made["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    for old, new in exchanged.items():
        coded, recoded = (text.replace(" ", "\u0120").replace("\n", "\u010a") for text in (old, new))
        vocabulary = {token.replace(coded, recoded): number for token, number in vocabulary.items()}
        assert re.escape(old) in split["Regex"], old
        split["Regex"] = split["Regex"].replace(re.escape(old), re.escape(new))
    made["model"]["vocab"] = vocabulary
    target.mkdir(exist_ok=True)
    (target / "tokenizer.json").write_text(json.dumps(made, indent=1, ensure_ascii=False), encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (target / name).write_bytes((source / name).read_bytes())


if __name__ == "__main__":
    here = Path(__file__).resolve()
    write_tokenizer(here.parents[1] / "models" / "tiny_qwen3", here.with_suffix(""))
