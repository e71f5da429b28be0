"""A device that refuses to capture graphs slows a rollout down, says so once and is counted; it changes no id."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from triton.errors import TritonError

from decode.cache import PagedCache
from decode.eager import EagerDecoder
from decode.fallback import CaptureError, GraphsOrEager, capturing
from decode.interface import LAST_DRAW, Done
from tests.support.captured import gpu, make, rollout
from tests.support.captured import graphs as captured
from tests.support.engines import FakeTool, generate, make_engine
from tests.support.interpreted import DEVICE


class Graphs(EagerDecoder):
    """Stands for the graph decoder: knows what each row drew last, and fails to capture in some submission."""

    step_rows, captures = 128, 5

    def __init__(self, model, cache, fails_in: int):
        super().__init__(model, cache, "auto")
        self.left, self.last, self.blind = fails_in, {}, 0

    def submit(self, chunks, temperature):
        if self.left == 0:
            self.blind = sum(LAST_DRAW in c.token_ids for c in chunks)
            raise CaptureError("OutOfMemoryError: CUDA out of memory")
        self.left -= 1
        known = [
            dataclasses.replace(c, token_ids=[self.last[c.lane] if t == LAST_DRAW else t for t in c.token_ids])
            for c in chunks
        ]
        draws = self.run(known, temperature)
        self.last = dict(zip([c.lane for c in chunks if c.sample], draws.tokens, strict=True))
        return Done(draws)


def parts(model, fails_in: int):
    cache = PagedCache(model.config, 200, 16, model.dtype, "cpu")
    graphs = Graphs(model, cache, fails_in)
    return graphs, GraphsOrEager(lambda: graphs, EagerDecoder(model, cache, "auto"))


def test_a_capture_that_fails_at_the_start_leaves_an_eager_decoder(model, chat, reference, capfd):
    def refuse():
        with capturing():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore words")

    eager = EagerDecoder(model, PagedCache(model.config, 200, 16, model.dtype, "cpu"), "auto")
    decoder = GraphsOrEager(refuse, eager)
    assert (decoder.pipelined, decoder.captures, decoder.step_rows) == (False, 0, 0)
    engine = make_engine(model, chat, FakeTool(), decoder=decoder)
    assert generate(engine, chat) == reference
    assert engine.stats.eager_steps == engine.stats.steps > 0
    said = capfd.readouterr().err
    assert said.count("\n") == said.count("warning: ") == 1
    for words in ("OutOfMemoryError: CUDA out of memory", "every step", "kv_memory_fraction", "cuda_graphs=false"):
        assert words in said


@pytest.mark.parametrize("steps", [0, 1, 4, 12])
def test_a_capture_that_fails_in_the_middle_of_a_rollout_changes_no_id(model, chat, reference, capfd, steps):
    graphs, decoder = parts(model, fails_in=steps)
    assert (decoder.pipelined, decoder.captures, decoder.step_rows) == (True, 5, 128)
    engine = make_engine(model, chat, FakeTool(), decoder=decoder)
    assert generate(engine, chat) == reference
    assert engine.stats.eager_steps == engine.stats.steps - steps > 0
    assert graphs.blind > 0 or steps < 4, "rows must be under way whose last draw had not been read"
    assert capfd.readouterr().err.count("warning: ") == 1


def test_other_temperatures_keep_their_graphs(model, chat, capfd):
    graphs, decoder = parts(model, fails_in=0)
    engine = make_engine(model, chat, FakeTool(), decoder=decoder)
    generate(engine, chat, temperature=0.6)
    assert engine.stats.eager_steps == engine.stats.steps
    graphs.left = 10_000
    generate(engine, chat)
    assert engine.stats.eager_steps == 0
    generate(engine, chat, temperature=0.6)
    assert engine.stats.eager_steps == engine.stats.steps
    assert capfd.readouterr().err.count("warning: ") == 1


def test_what_a_capture_may_meet_is_one_kind_and_our_own_faults_are_not():
    for error in (RuntimeError("operation not permitted when stream is capturing"), TritonError("out of resource")):
        with pytest.raises(CaptureError, match=f"{type(error).__name__}: "), capturing():
            raise error
    with pytest.raises(CaptureError, match=r"^OutOfMemoryError: the reason"), capturing():
        try:
            raise torch.OutOfMemoryError("the reason")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
    with pytest.raises(ZeroDivisionError), capturing():
        _ = 1 // 0


def refusing(monkeypatch, decoder_of, error: str):
    """A graph decoder whose next capture meets something that really cannot be captured."""
    decoder = decoder_of()
    launch = type(decoder)._launch

    def bad(self, *words):
        launch(self, *words)
        if torch.cuda.is_current_stream_capturing():
            if error == "synchronizing":
                torch.ones(3, device=DEVICE).sum().item()
            else:
                torch.empty(1 << 44, dtype=torch.int8, device=DEVICE)  # 16 TiB

    monkeypatch.setattr(type(decoder), "_launch", bad)
    return decoder


@gpu
@pytest.mark.parametrize("error", ["synchronizing", "memory"])
def test_a_real_failed_capture_leaves_a_device_that_decodes_and_trains(monkeypatch, capfd, error):
    expected = rollout(EagerDecoder(*make("qwen3"), "auto"), [3, 40, 17], 20, 0.7)
    model, cache = make("qwen3")
    stream = torch.cuda.current_stream()
    graphs = refusing(monkeypatch, lambda: captured(model, cache), error)
    decoder = GraphsOrEager(lambda: graphs, EagerDecoder(model, cache, "auto"))
    decoder.run = lambda chunks, temperature: decoder.submit(chunks, temperature).read()
    assert rollout(decoder, [3, 40, 17], 20, 0.7)[0] == expected[0]
    assert "warning: " in capfd.readouterr().err and not decoder.pipelined
    assert torch.cuda.current_stream() == stream
    monkeypatch.undo()
    assert rollout(decoder, [3, 40, 17], 20, 1.0)[0] == rollout(captured(*make("qwen3")), [3, 40, 17], 20, 1.0)[0]
    weight = torch.ones(4, device=DEVICE, requires_grad=True)
    dropped = torch.utils.checkpoint.checkpoint(
        lambda x: torch.dropout(x, 0.5, True).sum(), weight, use_reentrant=False
    )
    dropped.backward()  # the device's random state must have left the capture too
    state = torch.cuda.get_rng_state()
    first = torch.rand(5, device=DEVICE)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(5, device=DEVICE))
