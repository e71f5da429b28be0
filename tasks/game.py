"""A guessing game with state: the reward comes from the game itself, not from the text. A template to copy.

    tool.functions: ["game.py:Game"]          reward.function: "game.py:score"

A row is {"prompt": "Find the number from 1 to 100. Use guess.", "secret": 42, "tries": 7}. Each trajectory has a game
of its own, in a process of its own. `python tasks/game.py` writes game/rows.jsonl.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

WON = "Found it"


class Game:
    def __init__(self, problem: dict):
        self._secret = int(problem["secret"])
        self._left = int(problem.get("tries", 7))
        self._won = False

    def guess(self, number: int) -> str:
        """Guesses the secret number and says whether it is higher or lower.

        Args:
            number: The guess.
        """
        if self._won or self._left == 0:
            return "The game is over."
        self._left -= 1
        if number == self._secret:
            self._won = True
            return f"{WON} with {self._left} tries left."
        hint = "higher" if number < self._secret else "lower"
        return f"The number is {hint}. {self._left} tries left."


def score(trajectory, problem: dict) -> tuple[float, str]:
    """1 for a game that was won, less up to half for the tries it took; 0 for one that was lost.

    What the game said is in each call's text, so a policy that only claims to have won gets nothing.
    """
    guesses = [
        call for turn in trajectory.turns for call in turn.calls if call.name == "guess" and call.status == "ok"
    ]
    if not guesses:
        return 0.0, "no_guess"
    if not any(call.text.startswith(WON) for call in guesses):
        return 0.0, "lost"
    tries = int(problem.get("tries", 7))
    used = next(number for number, call in enumerate(guesses, start=1) if call.text.startswith(WON))
    return 1.0 - 0.5 * (used - 1) / tries, "won"


def write_rows(folder: Path, count: int = 64) -> None:
    draw = random.Random(0)
    prompt = "Find the number from 1 to 100 in at most 7 tries. Call guess."
    rows = [{"prompt": prompt, "secret": draw.randint(1, 100), "tries": 7} for _ in range(count)]
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write_rows(Path(__file__).resolve().with_suffix(""))
