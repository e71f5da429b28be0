"""A user's file of tools, good and hostile; tests/sandbox/workers runs it."""

import random
import time


def search(query: str, top: int = 3) -> list:
    """Searches a corpus.

    Args:
        query: What to look for.
        top: How many results.
    """
    return [f"{query} {n}" for n in range(top)]


def dice() -> str:
    """Throws a die."""
    return str(random.random())


def hostile(code: str, value: str = "") -> object:
    """Runs what a test wants to go wrong, or right.

    Args:
        code: The body of the call.
        value: An argument.
    """
    scope = {"value": value}
    exec(code, scope)
    return scope.get("result", "done")


class Notebook:
    def __init__(self, problem: dict):
        self._names = {"problem": problem}
        exec(problem.get("init", ""), self._names)

    def run(self, code: str) -> object:
        """Runs code that keeps its names.

        Args:
            code: The code.
        """
        exec(code, self._names)
        return self._names.get("result", "done")

    def wait(self, seconds: float) -> str:
        """Waits.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "waited"

    def _hidden(self):
        """Is no tool."""

    def close(self):
        exec(self._names["problem"].get("close", ""), self._names)
