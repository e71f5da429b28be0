"""Stand-ins for the chat and the policy of a trainer."""

from __future__ import annotations

from tests.support.policies import CPU


class FakeChat:
    """The last id of a turn is its boxed answer."""

    def answer(self, ids):
        return f"\\boxed{{{ids[-1]}}}"


class FakePolicy:
    device = CPU

    def eval(self):
        pass
