"""Engines with scripted tools and decoders."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from dataclasses import dataclass

from decode.cache import PagedCache
from decode.eager import EagerDecoder
from decode.interface import LAST_DRAW, Done, Draws
from decode.noise import row_key
from rollout.engine import RolloutEngine, RolloutRequest
from rollout.records import SamplingConfig, Work


@dataclass(frozen=True)
class Result:
    status: str
    text: str
    wall_s: float = 0.001


class FakeTool:
    """Answers from a function, at once or when released; remembers what it was asked."""

    def __init__(self, answer=lambda code: Result("ok", "1234"), hold: bool = False):
        self.answer, self.hold = answer, hold
        self.asked: list[tuple[str, int, Future]] = []
        self.opened: list[dict] = []
        self.closed = 0

    def open(self, problem: dict) -> FakeTool:
        self.opened.append(problem)
        return self

    def close(self) -> None:
        self.closed += 1

    def call(self, name: str, arguments: dict, seed: int) -> Future:
        code, future = arguments["code"], Future()
        self.asked.append((code, seed, future))
        if not self.hold:
            future.set_result(self.answer(code))
        return future

    def release_newest(self) -> None:
        for code, _, future in reversed(self.asked):
            if not future.done():
                future.set_result(self.answer(code))
                return


def sampling(**changes) -> SamplingConfig:
    settings = {
        "max_new_tokens": 40, "temperature": 1.0, "n_samples_per_prompt": 4, "max_turns": 3, "context_length": 160,
        "seed": 11,
    }  # fmt: skip
    return SamplingConfig(**settings | changes)


def make_engine(model, chat, tool, *, rows=16, page_size=16, pages=200, prefill=512, decoder=None, **options):
    decoder = decoder or EagerDecoder(model, PagedCache(model.config, pages, page_size, model.dtype, "cpu"), "auto")
    return RolloutEngine(
        decoder, chat, tool, decode_rows=rows, page_size=page_size, num_pages=pages, prefill_tokens=prefill, **options
    )


def prompts(chat, count=4) -> list[list[int]]:
    texts = [f"What is {12 + 7 * i}*{83 - 5 * i}+{29 + i}?" for i in range(count)]
    return [chat.prompt_ids([{"role": "user", "content": text}]) for text in texts]


def generate(engine, chat, *, count=4, work=Work, step=0, **changes):
    return engine.generate(RolloutRequest(prompts(chat, count), step, work()), sampling(**changes))


class LaggingDecoder(EagerDecoder):
    """Computes at once, but tells a step's draws only after the next was submitted, as a device does."""

    pipelined = True

    def __init__(self, *args):
        super().__init__(*args)
        self.last: dict[int, int] = {}  # row -> token that it drew last
        self.unread: list = []
        self.blind_tokens = 0

    def submit(self, chunks, temperature):
        assert len(self.unread) <= 1, "a third step was submitted before the first was read"
        self.blind_tokens += sum(c.token_ids == [LAST_DRAW] for c in chunks)
        known = [
            dataclasses.replace(c, token_ids=[self.last[c.lane]] if c.token_ids == [LAST_DRAW] else c.token_ids)
            for c in chunks
        ]
        assert all(LAST_DRAW not in c.token_ids for c in known)
        draws = self.run(known, temperature)
        self.last = dict(zip([c.lane for c in chunks if c.sample], draws.tokens, strict=True))
        self.unread.append(draws)
        return self

    def read(self):
        return self.unread.pop(0)


class ScriptedDecoder:
    """Draws given texts instead of a model's: turn k of sample s is scripts[s][k], the end-of-turn id included."""

    def __init__(self, tokenizer, scripts: dict[int, list[str]], seed=11):
        self.turns = {row_key(seed, 0, 0, s): [tokenizer.encode(t) for t in turns] for s, turns in scripts.items()}

    pipelined, captures = False, 0

    def submit(self, chunks, temperature):
        tokens = []
        for chunk in chunks:
            if chunk.sample:
                turns = self.turns[chunk.key]
                tokens.append(turns[0].pop(0))
                if not turns[0]:
                    turns.pop(0)
        return Done(Draws(tokens, [-1.0] * len(tokens)))


def call(code: str) -> str:
    return f'<tool_call>\n{{"name": "python", "arguments": {{"code": "{code}"}}}}\n</tool_call>'


END = "<|im_end|>"
