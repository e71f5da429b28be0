"""Questions over a local corpus: a search tool on SQLite FTS5, scored by exact match and F1. A template to copy.

    tool.functions: ["search.py:search"]          reward.function: "search.py:score"

The corpus is a JSONL file of {"title": ..., "text": ...}, named by the environment variable CORPUS, else that of
search/ beside this file: people and towns that do not exist, so that no model knows the answers (`python
tasks/search.py` writes it and its questions). A row is {"prompt": "Where was ... born?", "answer": "Ulm"}, or a list
of answers that all count.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import sqlite3
import string
from collections import Counter
from pathlib import Path

RESULTS = 3
CHARACTERS = 500  # shown of each document


@functools.cache
def _index() -> sqlite3.Connection:
    """The corpus, indexed once for each worker process: a connection must not be shared over a fork."""
    path = Path(os.environ.get("CORPUS", Path(__file__).with_suffix("") / "corpus.jsonl"))
    index = sqlite3.connect(":memory:")
    index.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text)")
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    index.executemany("INSERT INTO documents VALUES (?, ?)", [(row["title"], row["text"]) for row in rows])
    return index


def search(query: str) -> str:
    """Searches an encyclopedia and returns the best passages.

    Args:
        query: A few words to look for.
    """
    words = re.findall(r"\w+", query)
    if not words:
        return "Write at least one word to look for."
    match = " OR ".join(f'"{word}"' for word in words)  # quoted: FTS5 has operators of its own
    found = _index().execute(
        "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY rank LIMIT ?", (match, RESULTS)
    )
    return "\n\n".join(f"{title}: {text[:CHARACTERS]}" for title, text in found) or "Nothing found."


def score(trajectory, problem: dict) -> tuple[float, str]:
    """1 for the exact answer between <answer> and </answer>, else its token F1; 0 without one."""
    if trajectory.stop != "answered":
        return 0.0, str(trajectory.stop)
    said = re.findall(r"<answer>(.*?)</answer>", trajectory.final_text, re.DOTALL)
    if not said:
        return 0.0, "no_answer"
    answers = problem["answer"] if isinstance(problem["answer"], list) else [problem["answer"]]
    best = max(f1(said[-1], str(answer)) for answer in answers)
    if any(normal(said[-1]) == normal(str(answer)) for answer in answers):
        return 1.0, "exact"
    return best, "partial" if best > 0 else "wrong"


def gold(problem: dict) -> str:
    """The final text that `check` scores."""
    answer = problem["answer"]
    return f"<answer>{answer[0] if isinstance(answer, list) else answer}</answer>"


def normal(text: str) -> list[str]:
    """Words as SQuAD compares them: lower case, no punctuation, no articles."""
    bare = "".join(char for char in text.lower() if char not in string.punctuation)
    return [word for word in bare.split() if word not in ("a", "an", "the")]


def f1(said: str, answer: str) -> float:
    """Harmonic mean of precision and recall over words."""
    left, right = normal(said), normal(answer)
    common = sum((Counter(left) & Counter(right)).values())
    return 2 * common / (len(left) + len(right)) if common else 0.0


def write_corpus(folder: Path, people: int = 60) -> None:
    """Invented people and towns, and a question about each person; half of them need two searches."""
    draw = random.Random(0)
    syllables = ["ka", "lo", "mi", "ren", "ta", "vo", "sel", "du", "ni", "bar", "esh", "or"]
    names = iter(dict.fromkeys("".join(draw.choices(syllables, k=3)).capitalize() for _ in range(9 * people)))
    towns = {next(names): next(names) for _ in range(people // 3)}  # town -> its river
    trades = ["clockmaker", "botanist", "painter", "glazier", "surveyor"]
    documents = [{"title": town, "text": f"{town} is a town on the river {river}."} for town, river in towns.items()]
    rows = []
    for number in range(people):
        name, town = f"{next(names)} {next(names)}", draw.choice(list(towns))
        text = f"{name} was a {draw.choice(trades)}, born in {town} in {draw.randint(1700, 1900)}."
        documents.append({"title": name, "text": text})
        far = number % 2
        asked = f"On which river lies the town where {name} was born?" if far else f"Where was {name} born?"
        rows.append({"prompt": f"{asked} Search, then answer between <answer> and </answer>.",
                     "answer": towns[town] if far else town})  # fmt: skip
    folder.mkdir(exist_ok=True)
    for file, lines in (("corpus.jsonl", documents), ("questions.jsonl", rows)):
        (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    write_corpus(Path(__file__).resolve().with_suffix(""))
