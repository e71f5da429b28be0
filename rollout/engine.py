"""The rollout: prompts in, one `RolloutRecord` per trajectory out; tools run while other sequences decode.

Each turn of the loop picks up finished tool calls, submits one plan of the scheduler and reads what an earlier one
drew. Where the decoder can, a step is submitted before the one before it is read, so that the device never waits for
the host; a sequence that turns out to have ended drops the draw that was already on its way. No call blocks the loop
while another sequence can decode, `rollout.deterministic` excepted. A trajectory opens a session of
the tools at its first call and closes it at its end. The engine has DeepSpeed's `RolloutEngine` surface (`generate`,
`sync_weights`, `shutdown`); weights need no sync.
"""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from config import UserError
from decode.interface import LAST_DRAW, Chunk, Decoder, Pending
from decode.noise import row_key
from rollout.chat.formats import Chat
from rollout.chat.toolcall import Call, CallError
from rollout.episode import Episode, Limits, OpenTurn, TurnEnd, call_seed, tool_call
from rollout.records import RolloutRecord, SamplingConfig, StopReason, Work
from rollout.scheduler import LiveSequence, Scheduler
from rollout.stats import RolloutStats

# Pages of a sequence, how many of its tokens were computed, and how many are asked for -> their experts.
Routes = Callable[[Sequence[int], int, int], bytes]


class PolicyError(UserError, RuntimeError):
    """The model's own numbers make no trajectory."""

    of_one_rank = True


class Session(Protocol):
    """The tools of one trajectory: `sandbox.result.ToolSession`. A future always resolves, whatever dies."""

    def call(self, name: str, arguments: dict[str, Any], seed: int) -> concurrent.futures.Future[Any]: ...

    def close(self) -> None: ...


class Tool(Protocol):
    """What the engine needs of `tools.ToolBox`."""

    def open(self, problem: dict[str, Any]) -> Session: ...


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """Prompts of one step, the same on every rank; noise is keyed by a prompt's place among them.

    Trajectories are numbered prompt by prompt, sample by sample.
    """

    prompts: Sequence[Sequence[int]]  # token ids of each prompt
    policy_step: int
    work: Work
    problems: Sequence[Mapping[str, Any]] = ()  # the data row of each prompt, for tools with state


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A step that is under way: the sequences that draw in it, each with the index its new token will have."""

    drawing: list[tuple[LiveSequence, int]]
    pending: Pending


class RolloutEngine:
    """Samples trajectories. One per process; `decoder` holds the cache of `num_pages` pages."""

    run_type: type[RolloutRun]  # set below; a benchmark puts one here that follows a script instead of a policy

    def __init__(
        self, decoder: Decoder, chat: Chat, tool: Tool | None, *, decode_rows: int, page_size: int,
        num_pages: int, prefill_tokens: int, forced_tokens: int = 0, step_rows: int = 0, deterministic: bool = False,
        progress: Callable[[int, int, int, int], None] | None = None, routes: Routes | None = None,
    ):  # fmt: skip
        """progress: called each step with trajectories that this process has done, those of all processes, tokens
        sampled, turns whose tool runs.
        routes: `PagedCache.routes_of` of a mixture of experts."""
        self._decoder, self._chat, self._tool = decoder, chat, tool
        self._limits = {
            "decode_rows": decode_rows, "page_size": page_size, "num_pages": num_pages,
            "prefill_tokens": prefill_tokens, "forced_tokens": forced_tokens, "step_rows": step_rows,
        }  # fmt: skip
        self._deterministic, self._progress, self._routes = deterministic, progress, routes
        self.on_record: Callable[[RolloutRecord], None] | None = None  # called with each as it is finished
        self.tool_limits = Limits()
        self.stats = RolloutStats()

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> list[RolloutRecord]:
        """Samples `n_samples_per_prompt` trajectories of each prompt; ordered by (prompt, sample)."""
        started = time.perf_counter()
        self.stats = stats = RolloutStats()
        total = len(request.prompts) * sampling.n_samples_per_prompt
        run = self.run_type(self._chat, self._tool, Scheduler(**self._limits), sampling, request, stats)
        run.routes, run.on_record, run.tool_limits = self._routes, self.on_record, self.tool_limits
        captures = self._decoder.captures
        try:
            self._run(run, sampling, total)
        finally:
            run.close()
        if self._progress:
            self._progress(total, total, stats.decode_tokens, 0)
        stats.seconds = time.perf_counter() - started
        stats.captures = self._decoder.captures - captures
        stats.preemptions, stats.reused_tokens = run.scheduler.preemptions, run.scheduler.reused_tokens
        stats.kept_tokens = run.scheduler.kept_tokens
        return sorted(run.records, key=lambda r: (r.prompt_index, r.sample_index))

    def _run(self, run: RolloutRun, sampling: SamplingConfig, total: int) -> None:
        """Steps until every trajectory that this process has taken is done and none is left."""
        flying: _Submitted | None = None  # not read yet
        stats = self.stats
        while run.take_more() or run.scheduler.num_unfinished:
            with stats.phase("tools_open_seconds", run.deliver(wait_for_all=self._deterministic)):
                landed, flying = flying, self._submit(run, sampling)
                if not landed and not flying:
                    run.wait_for_a_tool()
                with stats.phase("read_seconds"):
                    if landed:
                        run.advance(landed)
                    if flying and not self._decoder.pipelined:
                        run.advance(flying)
                        flying = None
            if self._progress:
                self._progress(len(run.records), total, stats.decode_tokens, len(run.open_turns))

    def _submit(self, run: RolloutRun, sampling: SamplingConfig) -> _Submitted | None:
        """Starts the next step. None where no sequence can decode."""
        if not (plan := run.scheduler.plan()):
            return None
        with self.stats.phase("submit_seconds"):
            pending = self._decoder.submit([c for _, c in plan], sampling.temperature, **sampling.truncation)
            self.stats.eager_steps += not self._decoder.pipelined
            self.stats.row_slots += self._limits["decode_rows"]
            return run.expect(plan, pending)

    def sync_weights(self, step: int) -> None:
        """Nothing to do: the sampled weights are the trained ones."""

    def shutdown(self) -> None:
        """Nothing to free: the tool and the model belong to main.py."""


class RolloutRun:
    """The state of one `generate`: which trajectories this process has taken and where each stands."""

    def __init__(
        self,
        chat: Chat,
        tool: Tool | None,
        scheduler: Scheduler,
        sampling: SamplingConfig,
        request: RolloutRequest,
        stats: RolloutStats,
    ):
        self.scheduler = scheduler
        self.records: list[RolloutRecord] = []
        self._chat, self._tool, self._sampling, self._stats = chat, tool, sampling, stats
        self._request, self._exhausted = request, False
        self._episodes: dict[int, Episode] = {}  # by order
        self.open_turns: list[OpenTurn] = []  # in order of submission
        self.routes: Routes | None = None
        self.on_record: Callable[[RolloutRecord], None] | None = None
        self.tool_limits = Limits()
        self._sessions: dict[int, Session] = {}  # by order; of trajectories that have called a tool

    def take_more(self) -> bool:
        """Takes trajectories while lanes are free for them, and a group more, whose siblings then share a prompt.

        Ranks that take no more than they can start, and hold no more than their share, leave the rest to those that
        are done sooner. True where any came.
        """
        work, samples, before = self._request.work, self._sampling.n_samples_per_prompt, len(self._episodes)
        wanted = min(self.scheduler.num_free_lanes + samples - self.scheduler.num_waiting, work.share - before)
        while not self._exhausted and len(self._episodes) - before < wanted:
            order = work.take()
            index, sample_index = divmod(order, samples)
            if index >= len(self._request.prompts):
                self._exhausted = True
                break
            prompt, step = self._request.prompts[index], self._request.policy_step
            episode = self.new_episode(prompt, index, sample_index)
            self._episodes[order] = episode
            key = row_key(self._sampling.seed, step, index, sample_index)
            self.scheduler.add(LiveSequence(order, index, len(prompt), episode.tokens, key))
        return len(self._episodes) > before

    def new_episode(self, prompt: Sequence[int], prompt_index: int, sample_index: int) -> Episode:
        return Episode(
            prompt, prompt_index=prompt_index, sample_index=sample_index, policy_step=self._request.policy_step,
            sampling=self._sampling,
        )  # fmt: skip

    def expect(self, plan: list[tuple[LiveSequence, Chunk]], pending: Pending) -> _Submitted:
        """Notes what a submitted step will draw, so that the next one can be planned before it is read."""
        drawing, tokens = [], 0
        for sequence, chunk in plan:
            tokens += len(chunk.token_ids)
            if chunk.sample:
                drawing.append((sequence, len(sequence.tokens)))
                self._episodes[sequence.order].expect(LAST_DRAW)
        self._stats.steps += 1
        self._stats.running_rows += len(plan)
        self._stats.prefill_tokens += tokens - len(drawing)
        return _Submitted(drawing, pending)

    def advance(self, step: _Submitted) -> None:
        """Reads a step's draws; one of a turn that had ended by then was never asked for, and is dropped."""
        draws = step.pending.read()
        for (sequence, place), token, logprob in zip(step.drawing, draws.tokens, draws.logprobs, strict=True):
            episode = self._episodes.get(sequence.order)
            if episode is None or episode.known != place or len(episode.tokens) == place:
                continue
            if not math.isfinite(logprob):
                raise PolicyError(
                    f"the policy gave token {token} the log-probability {logprob}: its weights have diverged; lower "
                    "train.learning_rate and resume from an earlier checkpoint"
                )
            self._stats.decode_tokens += 1
            end = episode.draw(token, logprob, self._chat.stop_ids)
            if end is TurnEnd.OPEN:
                continue
            episode.stop_drawing()
            if end is TurnEnd.FULL:
                episode.close_turn(ended=False)
                self.finish(sequence, StopReason.CONTEXT_FULL)
            else:
                self.end_turn(sequence, episode, ended=end is TurnEnd.ENDED)

    def end_turn(self, sequence: LiveSequence, episode: Episode, ended: bool) -> None:
        items = self._chat.calls(episode.turn_ids).items if self._tool else ()
        if not items:
            episode.close_turn(ended=ended)
            self.finish(sequence, StopReason.ANSWERED if ended else StopReason.TURN_TOKENS)
        elif episode.is_last_turn:
            episode.close_turn(ended=ended)
            readable = any(isinstance(item, Call) for item in items)
            self.finish(sequence, StopReason.TURN_LIMIT if readable else StopReason.BAD_CALL)
        else:
            self.scheduler.park(sequence)
            self.open_turns.append(self._submit_calls(sequence, episode, ended, items))

    def _submit_calls(
        self, sequence: LiveSequence, episode: Episode, ended: bool, items: Sequence[Call | CallError]
    ) -> OpenTurn:
        calls: list[tuple[Call | CallError, int]] = []
        futures: list[concurrent.futures.Future[Any] | str] = []
        for number, item in enumerate(items):
            seed = call_seed(sequence.key, episode.turn_index, number)
            calls.append((item, seed))
            refusal = self.tool_limits.refusal(number, episode.tool_seconds)
            if isinstance(item, CallError) or refusal:
                futures.append(refusal or "")
            else:
                futures.append(self._session(sequence.order, episode).call(item.name, item.arguments, seed))
        return OpenTurn(episode, sequence, ended, calls, futures)

    def _session(self, order: int, episode: Episode) -> Session:
        """The trajectory's, opened at its first call."""
        assert self._tool is not None
        if order not in self._sessions:
            rows = self._request.problems
            self._sessions[order] = self._tool.open(dict(rows[episode.prompt_index]) if rows else {})
        return self._sessions[order]

    def deliver(self, wait_for_all: bool) -> bool:
        """Picks up turns whose calls are done, in order of submission. True where others are still open."""
        if wait_for_all and self.open_turns:
            self._stats.tools_open_seconds += self._wait(concurrent.futures.ALL_COMPLETED)
        if ready := [turn for turn in self.open_turns if turn.is_done()]:
            self.open_turns = [turn for turn in self.open_turns if turn not in ready]
            for turn in ready:
                self.deliver_turn(turn)
        return bool(self.open_turns)

    def deliver_turn(self, turn: OpenTurn) -> None:
        self._stats.tool_seconds += time.perf_counter() - turn.submitted
        calls = tuple(tool_call(item, seed, f) for (item, seed), f in zip(turn.calls, turn.futures, strict=True))
        turn.episode.close_turn(ended=turn.ended, calls=calls)
        if any(call.status == "infra" for call in calls):
            self.finish(turn.sequence, StopReason.TOOL_INFRA)
            return
        suffix = self._chat.reply_ids(turn.episode.turn_ids, [call.text for call in calls])
        if turn.episode.has_room_for(suffix):
            turn.episode.append_suffix(suffix)
            self.scheduler.resume(turn.sequence)
        else:
            self.finish(turn.sequence, StopReason.CONTEXT_FULL)

    def wait_for_a_tool(self) -> None:
        self._wait(concurrent.futures.FIRST_COMPLETED)

    def _wait(self, until: str) -> float:
        """Seconds in which no sequence could decode."""
        started = time.perf_counter()
        concurrent.futures.wait(self._pending(), return_when=until)
        self._stats.idle_seconds += (seconds := time.perf_counter() - started)
        return seconds

    def _pending(self) -> list[concurrent.futures.Future[Any]]:
        return [f for turn in self.open_turns for f in turn.futures if not isinstance(f, str) and not f.done()]

    def finish(self, sequence: LiveSequence, stop: StopReason) -> None:
        episode = self._episodes.pop(sequence.order)
        if sequence.order in self._sessions:
            self._sessions.pop(sequence.order).close()
        routes = self.routes(sequence.pages, sequence.computed, len(episode.tokens) - 1) if self.routes else b""
        self.records.append(episode.finish(stop, routes))
        self.scheduler.finish(sequence)
        if self.on_record:
            self.on_record(self.records[-1])

    def close(self) -> None:
        """Ends the tools of trajectories that an error cut off."""
        while self._sessions:
            self._sessions.popitem()[1].close()


RolloutEngine.run_type = RolloutRun
