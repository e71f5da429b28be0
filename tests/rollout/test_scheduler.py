"""The scheduler over thousands of random histories: no page leaks, nobody starves, no page has two writers."""

from __future__ import annotations

import random

import pytest

from rollout.scheduler import LiveSequence, Scheduler

PAGE = 4


class World:
    """Plays engine and model: remembers which tokens' keys each page would hold, and checks every plan against it."""

    def __init__(
        self, rng: random.Random, *, groups: int, samples: int, rows: int, pages: int, prefill: int, forced: int,
        extra: int, late: bool,
    ):  # fmt: skip
        """late: a step's draws are looked at after the next step is planned, as the engine does with a device."""
        self.rng = rng
        self.capacity = pages - 1
        self.scheduler = Scheduler(
            decode_rows=rows, page_size=PAGE, num_pages=pages, prefill_tokens=prefill, forced_tokens=forced,
            step_rows=rows + extra if extra else 0,
        )  # fmt: skip
        self.rows, self.prefill, self.forced, self.extra, self.late = rows, prefill, forced, extra, late
        self.flying: list[tuple[LiveSequence, int, int]] = []  # who drew in the last step, the draw's place, the turn
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}  # (page, offset) -> (position, token)
        self.parked: list[LiveSequence] = []
        self.finished: list[LiveSequence] = []
        self.sequences = []
        for group in range(groups):
            prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 3 * PAGE - 2))]
            for _ in range(samples):
                sequence = LiveSequence(len(self.sequences), group, len(prompt), list(prompt), (group, 0))
                self.sequences.append(sequence)
                self.scheduler.add(sequence)
        self.fresh, self.saved = set(range(len(self.sequences))), 0  # about to begin a turn or to begin again
        self.goal = {s.order: rng.randint(1, PAGE * self.capacity - s.prompt_length) for s in self.sequences}
        self.drawn, self.turn = dict.fromkeys(self.goal, 0), dict.fromkeys(self.goal, 0)

    def step(self) -> None:
        for sequence in [s for s in self.parked if self.rng.random() < 0.3]:
            self.parked.remove(sequence)
            sequence.tokens += [self.rng.randrange(1000) for _ in range(self.rng.randint(1, 2 * PAGE))]
            sequence.tokens[:] = sequence.tokens[: PAGE * self.capacity]
            self.scheduler.resume(sequence)
            self.fresh.add(sequence.order)
        plan = self.scheduler.plan()
        self.check(plan)
        self.saved += sum(chunk.start for s, chunk in plan if s.order in self.fresh)
        self.fresh -= {s.order for s, _ in plan}
        self.fresh |= {s.order for s in self.sequences if not s.pages}
        for _, chunk in plan:
            for i, token in enumerate(chunk.token_ids):
                place = chunk.start + i
                self.memory[chunk.pages[place // PAGE], place % PAGE] = (place, token)
        for sequence, chunk in plan:
            self.check_memory(sequence, chunk.start + len(chunk.token_ids))
        landed = self.flying
        self.flying = [(s, len(s.tokens), self.turn[s.order]) for s, chunk in plan if chunk.sample]
        for sequence, _, _ in self.flying:
            sequence.tokens.append(self.rng.randrange(1000))
        for flight in landed if self.late else self.flying:
            self.look_at(*flight)

    def look_at(self, sequence: LiveSequence, place: int, turn: int) -> None:
        if turn != self.turn[sequence.order]:
            return  # a draw that an ended turn never asked for
        self.drawn[sequence.order] += 1
        full = place + 1 >= PAGE * self.capacity
        done = full or self.drawn[sequence.order] >= self.goal[sequence.order]
        if not done and self.rng.random() >= 0.15:
            return
        self.turn[sequence.order] += 1
        del sequence.tokens[place + 1 :]
        if done:
            self.scheduler.finish(sequence)
            self.finished.append(sequence)
        else:
            self.scheduler.park(sequence)
            self.parked.append(sequence)

    def check(self, plan) -> None:
        assert len(plan) <= self.rows
        assert len({chunk.lane for _, chunk in plan}) == len(plan)
        beside = [len(c.token_ids) for s, c in plan if len(s.tokens) - c.start <= max(self.forced, 1)]
        longer = [len(c.token_ids) for s, c in plan if len(s.tokens) - c.start > max(self.forced, 1)]
        assert sum(longer) <= self.prefill
        assert sum(beside) <= max(self.rows + self.extra if self.extra else 0, len(beside))
        written: dict[tuple[int, int], int] = {}
        for sequence, chunk in plan:
            assert chunk.token_ids == sequence.tokens[chunk.start : chunk.start + len(chunk.token_ids)]
            assert chunk.token_ids
            for place in range(chunk.start, chunk.start + len(chunk.token_ids)):
                slot = (chunk.pages[place // PAGE], place % PAGE)
                assert slot[0] != 0
                assert written.setdefault(slot, sequence.order) == sequence.order, "two writers of one slot"
                assert sum(slot[0] in s.pages for s in self.sequences) == 1, "a shared page is never written"

    def check_memory(self, sequence: LiveSequence, length: int) -> None:
        """Every key that the sequence attends to is its own token at its own position."""
        for place in range(length):
            assert self.memory[sequence.pages[place // PAGE], place % PAGE] == (place, sequence.tokens[place])


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_end_with_every_sequence_done_and_every_page_free(seed):
    preemptions = reused = kept = 0
    for history in range(250):
        rng = random.Random(f"{seed} {history}")
        pages = rng.choice([4, 6, 9, 17, 40])
        world = World(
            rng, groups=rng.randint(1, 4), samples=rng.randint(1, 4), rows=rng.randint(1, 6), pages=pages,
            prefill=rng.choice([2, 5, 64]), forced=rng.choice([0, 3, 40]), extra=rng.choice([0, 2, 20]),
            late=rng.random() < 0.5,
        )  # fmt: skip
        for _ in range(20_000):
            if not world.scheduler.num_unfinished:
                break
            world.step()
        assert len(world.finished) == len(world.sequences)
        assert world.scheduler.num_free_pages == world.capacity
        assert world.saved == world.scheduler.reused_tokens + world.scheduler.kept_tokens
        preemptions += world.scheduler.preemptions
        reused += world.scheduler.reused_tokens
        kept += world.scheduler.kept_tokens
    assert preemptions > 0 and reused > 0 and kept > 0  # the histories did exercise all three


def scheduler(rows=2, pages=9, prefill=64) -> Scheduler:
    return Scheduler(decode_rows=rows, page_size=PAGE, num_pages=pages, prefill_tokens=prefill)


def sequence(order: int, length: int, group: int | None = None) -> LiveSequence:
    return LiveSequence(order, order if group is None else group, length, list(range(length)), (order, 0))


def test_a_row_that_ends_is_given_to_the_next_in_line_at_once():
    s = scheduler(rows=1)
    first, second = sequence(0, 3), sequence(1, 3)
    s.add(first)
    s.add(second)
    [(planned, _)] = s.plan()
    assert planned is first
    s.finish(first)
    [(planned, _)] = s.plan()
    assert planned is second


def test_siblings_share_the_full_pages_of_their_prompt_and_compute_the_rest():
    s = scheduler(rows=3)
    siblings = [sequence(i, 10, group=0) for i in range(3)]
    for x in siblings:
        s.add(x)
    [(leader, chunk)] = s.plan()
    assert leader is siblings[0] and len(chunk.token_ids) == 10
    leader.tokens.append(7)
    chunks = {x.order: c for x, c in s.plan()}
    assert [len(chunks[i].token_ids) for i in range(3)] == [1, 2, 2]
    assert chunks[1].pages[:2] == chunks[0].pages[:2] == chunks[2].pages[:2]
    assert len({chunks[i].pages[2] for i in range(3)}) == 3
    assert s.reused_tokens == 16


def test_a_prompt_longer_than_the_step_budget_is_read_in_parts():
    s = scheduler(prefill=5)
    s.add(sequence(0, 12))
    parts = [s.plan()[0][1] for _ in range(3)]
    assert [(p.start, len(p.token_ids), p.sample) for p in parts] == [(0, 5, False), (5, 5, False), (10, 2, True)]


def test_few_new_tokens_are_fed_one_a_step_and_more_are_read_at_once():
    s = Scheduler(decode_rows=1, page_size=PAGE, num_pages=9, prefill_tokens=64, forced_tokens=3)
    x = sequence(0, 6)
    s.add(x)
    assert [len(c.token_ids) for _, c in s.plan()] == [6]
    s.park(x)
    x.tokens += [7, 8, 9]
    s.resume(x)
    parts = [s.plan()[0][1] for _ in range(3)]
    assert [(p.start, p.token_ids, p.sample) for p in parts] == [(6, [7], False), (7, [8], False), (8, [9], True)]


def test_tokens_fed_beside_other_rows_fill_the_rows_of_a_step_that_are_left():
    s = Scheduler(
        decode_rows=3, page_size=PAGE, num_pages=40, prefill_tokens=64, forced_tokens=20, step_rows=8,
    )  # fmt: skip
    lengths = [1, 9, 7]
    for order, length in enumerate(lengths):
        s.add(sequence(order, length))
    # one row each, and the five rows that are left go to the oldest that can use them
    assert [len(c.token_ids) for _, c in s.plan()] == [1, 6, 1]
    assert [(len(c.token_ids), c.sample) for _, c in s.plan()] == [(3, True), (4, False)]


def test_a_parked_sequence_keeps_its_pages_and_gives_its_row_away():
    s = scheduler(rows=1)
    first, second = sequence(0, 5), sequence(1, 3)
    s.add(first)
    s.add(second)
    s.plan()
    s.park(first)
    pages = list(first.pages)
    assert s.plan()[0][0] is second
    s.finish(second)
    first.tokens += [1, 2]
    s.resume(first)
    [(planned, chunk)] = s.plan()
    assert planned is first and first.pages[:2] == pages
    assert (chunk.start, chunk.token_ids) == (5, [1, 2])


def test_the_oldest_takes_pages_from_the_youngest_which_computes_its_tokens_again():
    s = scheduler(rows=2, pages=5)
    old, young = sequence(0, 7), sequence(1, 5)
    s.add(old)
    s.plan()
    s.add(young)
    old.tokens.append(99)
    s.plan()
    assert young.lane is None  # a page is kept back for the running row, so it waits
    s.finish(old)
    s.plan()
    assert young.lane is not None
