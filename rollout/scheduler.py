"""Decides, step by step, whose tokens the model computes. Integers only: it returns a plan and touches no tensor.

A sequence waits, runs (it has a lane and gets one chunk a step), is parked while its tool runs (its pages stay, its
lane goes to another) and finishes. Older sequences come first everywhere, and an older one may take the pages of a
younger one, which then computes its tokens again later: so the oldest always moves on and nobody starves.
The full pages of a group's prompt are computed once, by the first sibling, and shared by reference count. A shared
page is never written, so none needs a copy: what a prompt has beyond its full pages, at most one page of tokens, each
sibling computes in pages of its own.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from decode.interface import Chunk
from rollout.pages import PageAllocator


@dataclass(slots=True, eq=False)
class LiveSequence:
    """What the scheduler knows of one trajectory. `tokens` is the episode's own list and grows from outside."""

    order: int  # submission order: smaller is older
    group: int  # sequences of one group begin with the same prompt
    prompt_length: int
    tokens: list[int]
    key: tuple[int, int]
    computed: int = 0  # leading tokens whose keys lie in `pages`
    pages: list[int] = field(default_factory=list)
    lane: int | None = None
    admitted: bool = False  # has ever run
    shared: int = 0  # of `computed`, what a sibling computed, until the sequence runs on it
    returned: bool = False  # its tool has answered and it has not run since


class Scheduler:
    def __init__(
        self, *, decode_rows: int, page_size: int, num_pages: int, prefill_tokens: int, forced_tokens: int = 0,
        step_rows: int = 0,
    ):  # fmt: skip
        """num_pages counts the scratch page (`PageAllocator`).

        decode_rows: lanes. forced_tokens: a sequence with at most this many new tokens is computed beside the others'
        draws; it uses the lanes left in `step_rows` once each running sequence has one, and always its own; 0: never.
        prefill_tokens: most tokens of longer chunks in one step.
        """
        self._allocator = PageAllocator(num_pages)
        self._page_size, self._prefill_tokens = page_size, prefill_tokens
        self._forced_tokens, self._step_rows = forced_tokens, step_rows
        self._lanes = list(range(decode_rows - 1, -1, -1))
        self._waiting: list[LiveSequence] = []  # by order
        self._running: list[LiveSequence] = []  # by order
        self._parked: list[LiveSequence] = []
        self._prompts: dict[int, list[int]] = {}  # group -> full prompt pages, held by a reference of its own
        self._not_started: dict[int, int] = {}  # group -> siblings that have never run
        self.preemptions = 0
        self.reused_tokens = 0  # prompt tokens that a sibling found computed
        self.kept_tokens = 0  # tokens of earlier turns that were still computed when the next turn began

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_lanes(self) -> int:
        return len(self._lanes)

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._parked)

    @property
    def num_free_pages(self) -> int:
        return self._allocator.num_free

    def add(self, sequence: LiveSequence) -> None:
        self._not_started[sequence.group] = self._not_started.get(sequence.group, 0) + 1
        bisect.insort(self._waiting, sequence, key=_order)

    def park(self, sequence: LiveSequence) -> None:
        """Gives the lane away; the pages stay."""
        self._leave(sequence)
        self._parked.append(sequence)

    def resume(self, sequence: LiveSequence) -> None:
        self._parked.remove(sequence)
        sequence.returned = True
        bisect.insort(self._waiting, sequence, key=_order)

    def finish(self, sequence: LiveSequence) -> None:
        self._leave(sequence)
        self._release(sequence)

    def plan(self) -> list[tuple[LiveSequence, Chunk]]:
        """The chunks of this step, at most one a sequence. The caller computes all of them before the next plan."""
        self._admit()
        planned = []
        budget, spare = self._prefill_tokens, max(self._step_rows - len(self._running), 0)
        for sequence in list(self._running):
            if sequence.lane is None:  # an older one has just taken its pages
                continue
            length = len(sequence.tokens) - sequence.computed
            if length <= self._forced_tokens:
                length = min(length, 1 + spare)
                spare -= max(length - 1, 0)
            elif length > 1:
                length = min(length, budget)
                budget -= length
            if length == 0:
                continue
            if self._grow(sequence, sequence.computed + length):
                planned.append((sequence, self._chunk(sequence, length)))
            else:
                self._wait(sequence)  # older ones hold the pages; one of them may need this lane to let go
        # What is planned keeps its pages: only older ones take, and they came first.
        self._remember_prompts(planned)
        return planned

    def _chunk(self, sequence: LiveSequence, length: int) -> Chunk:
        assert sequence.lane is not None
        start, end = sequence.computed, sequence.computed + length
        self.reused_tokens += sequence.shared
        if sequence.returned:
            self.kept_tokens += start - sequence.shared
        sequence.computed, sequence.shared, sequence.returned = end, 0, False
        return Chunk(
            lane=sequence.lane,
            token_ids=sequence.tokens[start:end],
            start=start,
            pages=sequence.pages,
            key=sequence.key,
            sample=end == len(sequence.tokens),
        )

    def _admit(self) -> None:
        """Gives free lanes to the oldest that wait. One whose sibling is computing their prompt lets others pass."""
        if not self._waiting or not self._lanes:
            return
        computing = {s.group for s in self._running if s.computed < self._shareable(s)}
        for sequence in list(self._waiting):
            if not self._lanes:
                return
            if not sequence.pages and sequence.group in computing and sequence.group not in self._prompts:
                continue
            self._share_prompt(sequence)
            # A page for each running sequence is kept back, or the newcomer would be preempted at once.
            needed = self._pages_for(len(sequence.tokens)) - len(sequence.pages)
            if self._running and self._allocator.num_free < needed + len(self._running):
                self._drop_prompts()
                if self._allocator.num_free < needed + len(self._running):
                    return
            self._start(sequence)
            if sequence.computed < self._shareable(sequence):
                computing.add(sequence.group)

    def _start(self, sequence: LiveSequence) -> None:
        self._waiting.remove(sequence)
        sequence.lane = self._lanes.pop()
        bisect.insort(self._running, sequence, key=_order)
        if not sequence.admitted:
            sequence.admitted = True
            self._not_started[sequence.group] -= 1
            if sequence.group in self._prompts and self._not_started[sequence.group] == 0:
                self._allocator.release(self._prompts.pop(sequence.group))

    def _shareable(self, sequence: LiveSequence) -> int:
        """Prompt tokens in full pages, the last token excepted: each sibling computes that one for its first draw."""
        return (sequence.prompt_length - 1) // self._page_size * self._page_size

    def _share_prompt(self, sequence: LiveSequence) -> None:
        shared = self._prompts.get(sequence.group)
        if shared and not sequence.pages:
            self._allocator.share(shared)
            sequence.pages = list(shared)
            sequence.computed = sequence.shared = len(shared) * self._page_size

    def _remember_prompts(self, planned: list[tuple[LiveSequence, Chunk]]) -> None:
        """Keeps the prompt pages that this step completes, for siblings that have not started."""
        for sequence, _ in planned:
            if sequence.group in self._prompts or not self._not_started.get(sequence.group):
                continue
            count = self._shareable(sequence) // self._page_size
            if count and sequence.computed >= count * self._page_size:
                self._prompts[sequence.group] = sequence.pages[:count]
                self._allocator.share(sequence.pages[:count])

    def _drop_prompts(self) -> None:
        for pages in self._prompts.values():
            self._allocator.release(pages)
        self._prompts.clear()

    def _grow(self, sequence: LiveSequence, length: int) -> bool:
        """Makes the pages hold `length` tokens, at the cost of younger sequences. False: wait a step."""
        needed = self._pages_for(length) - len(sequence.pages)
        if needed <= 0:
            return True
        if self._allocator.num_free < needed:
            self._drop_prompts()
        while self._allocator.num_free < needed:
            holders = [
                s for s in (*self._running, *self._parked, *self._waiting) if s.pages and s.order > sequence.order
            ]
            if not holders:
                return False
            self._preempt(max(holders, key=_order))
        sequence.pages = sequence.pages + self._allocator.take(needed)
        return True

    def _preempt(self, sequence: LiveSequence) -> None:
        """Takes the pages; the tokens are computed again when the sequence next runs."""
        self.preemptions += sequence.computed > sequence.shared  # else it only waits beside its siblings' prompt
        self._release(sequence)
        if sequence.lane is not None:
            self._wait(sequence)

    def _leave(self, sequence: LiveSequence) -> None:
        """Out of the list it is in. A draw read one step late may end a sequence that has just been preempted."""
        for others in (self._running, self._parked, self._waiting):
            if sequence in others:
                others.remove(sequence)
        self._free_lane(sequence)

    def _wait(self, sequence: LiveSequence) -> None:
        self._running.remove(sequence)
        self._free_lane(sequence)
        bisect.insort(self._waiting, sequence, key=_order)

    def _release(self, sequence: LiveSequence) -> None:
        self._allocator.release(sequence.pages)
        sequence.pages, sequence.computed, sequence.shared = [], 0, 0

    def _free_lane(self, sequence: LiveSequence) -> None:
        if sequence.lane is not None:
            self._lanes.append(sequence.lane)
            sequence.lane = None

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)


def _order(sequence: LiveSequence) -> int:
    return sequence.order
