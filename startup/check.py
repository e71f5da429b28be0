"""`main.py check`, and the start of every run: does what was built work as it will be used?

One finding for each question: ok, a note of something to look at, or a failure with its fix. The check uses the parts
of the run and leaves them as they were: nothing is trained, and no step shares its noise.

Left out: measured memory and measured step times. Memory is the forecast beside what the system says is free; time is
scaled from the probe.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch

from config import UserError
from data import Problem, unmatchable
from modeling.packed_model import TokenLogprobModule
from reward import clean, grade_trajectory
from rollout.records import RolloutRecord, SamplingConfig, StopReason, Work
from startup import neighbours, rewards, toolbox
from startup.building import Parts
from startup.forecast import GIGABYTE, Memory
from update.batch import ResponseTokenBatch

GOLD_ROWS = 100
AIME_PROBLEMS = 30  # a year
_AIME_NAME = re.compile("(?i)(?<![a-z])aime(?![a-z])")
SHOWN_TOKENS = 16  # of a prompt's end
PROBE_PROMPTS, PROBE_SAMPLES, PROBE_TOKENS, PROBE_TURNS = 2, 2, 64, 4
SEED_OFFSET = 1 << 33  # neither training nor evaluation draws here
# Mean |log-prob difference| between sampling and training that always passes. Above it the model's own floor decides:
# two plain forwards of the same tokens that differ in the attention alone. In bf16 it is 0.035 for a pretrained model
# that is unsure of its tokens.
MAX_MISMATCH = {"float32": 1e-4, "bfloat16": 0.02}
FLOORS = 2  # times its floor, a model's mismatch is a fault
FLOOR_TOKENS = 4096  # a trajectory up to this length; the textbook attention holds all its scores
MAX_RATIO_ERROR = 1e-3  # |ratio - 1| of two forwards
LONGEST_IN_SECONDS, LONGEST_IN_MINUTES = 120, 7200  # seconds


class CheckError(UserError, RuntimeError):
    """A run that would not work as it is set up."""


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    state: Literal["ok", "note", "FAIL"]
    text: str

    def __str__(self) -> str:
        return f"{self.state:4}  {self.name:9} {self.text}"


def check(parts: Parts) -> list[Finding]:
    """Every finding, also after a failure. Nothing is sampled where the tokenizer has ids that the model lacks."""
    given = [
        _check_prompt(parts),
        _check_lengths(parts),
        _check_held_out(parts),
        _check_stop_ids(parts),
        Finding(*rewards.check_gold(parts)) if parts.scorer else _check_gold(parts),
        *(Finding(*found) for found in toolbox.check_tools(parts)),
    ]
    if len(parts.tokenizer) > _embedding_rows(parts):
        return given
    started = time.perf_counter()
    records = _probe(parts)
    rollout_seconds = time.perf_counter() - started
    mismatch, forward_seconds = _mismatch(parts, records)
    return [
        *given,
        _check_template(parts, records),
        _check_rollout(parts, records, rollout_seconds),
        *(Finding(*found) for found in rewards.check_rewards(parts, records)),
        mismatch,
        *_check_teacher(parts, records),
        check_memory(parts.memory, parts.config.micro_batch_tokens, parts.policy.device),
        _check_time(parts, records, rollout_seconds, forward_seconds),
        Finding("mask", "ok", masked(records[0], parts.tokenizer.decode)),
    ]


def require_pass(findings: Sequence[Finding]) -> None:
    """Raises CheckError naming every failure."""
    failed = [f"{found.name}: {found.text}" for found in findings if found.state == "FAIL"]
    if failed:
        raise CheckError(f"check failed: {'; '.join(failed)} (train.check=false starts anyway)")


def masked(record: RolloutRecord, decode: Callable[..., object]) -> str:
    """The trajectory's text, sampled (and trained) spans between double brackets."""
    text, place = "", 0
    for turn in record.turns:
        text += f"{decode(record.token_ids[place : turn.start], skip_special_tokens=False)}"
        text += f"⟦{decode(record.token_ids[turn.start : turn.end], skip_special_tokens=False)}⟧"
        place = turn.end
    return f"{text}{decode(record.token_ids[place:], skip_special_tokens=False)}"


def _probe(parts: Parts) -> list[RolloutRecord]:
    config = parts.config
    sampling = SamplingConfig.of(
        config,
        max_new_tokens=min(config.rollout.max_new_tokens, PROBE_TOKENS),
        n_samples_per_prompt=PROBE_SAMPLES,
        max_turns=min(config.rollout.max_turns, PROBE_TURNS),
        seed=config.train.seed + SEED_OFFSET,
    )
    prompts = parts.data.prompts[:PROBE_PROMPTS]
    parts.policy.eval()
    rows = [problem.row for problem in parts.data.problems[:PROBE_PROMPTS]]
    return parts.sample(prompts, 0, Work(), sampling, rows)  # alone, other ranks take no part


def _packed(records: Sequence[RolloutRecord]) -> ResponseTokenBatch:
    return ResponseTokenBatch.from_rollout(records, [1.0] * len(records), [1.0] * len(records))


@torch.no_grad()
def _mismatch(parts: Parts, records: Sequence[RolloutRecord]) -> tuple[Finding, float]:
    """The training forward of what was sampled, twice; with the seconds of the second."""
    batch = _packed(records).to(parts.policy.device)
    out = parts.policy.token_logprobs(batch)
    first = out.logprobs
    started = time.perf_counter()
    second = parts.policy.token_logprobs(batch).logprobs
    ratio_error = (torch.exp(second - first) - 1).abs().max().item()
    seconds = time.perf_counter() - started
    difference = (first - batch.behaviour_logprobs).abs()
    mean, largest = difference.mean().item(), difference.max().item()
    text = f"off 1 by {ratio_error:.1g}; |sampling - training log-prob| mean {mean:.2g}, largest {largest:.2g}"
    floor = _floor(parts, batch, first)
    if floor is not None:
        text += f"; two plain forwards of other attention: mean {floor:.2g}"
    if not ratio_error <= MAX_RATIO_ERROR:  # NaN fails too
        return Finding(
            "ratio", "FAIL", f"{text}: the forward does not repeat itself; remove dropout or noise"
        ), seconds
    if not mean <= max(MAX_MISMATCH[parts.config.model.dtype], FLOORS * (floor or 0.0)):
        fix = "what is sampled is not what is trained; set model.attn_implementation=eager and report it"
        if out.flips is not None and out.flips.any() and not parts.config.model.router_replay:
            share = out.flips.mean().item()
            fix = f"{share:.1%} of the choices of experts differ between the two; set model.router_replay=true"
        return Finding("ratio", "FAIL", f"{text}: {fix}"), seconds
    for state, words in neighbours.compared(parts, _packed, records):
        return Finding("ratio", state, f"{text}; {words}"), seconds
    return Finding("ratio", "ok", text), seconds


def _floor(parts: Parts, batch: ResponseTokenBatch, logprobs: torch.Tensor) -> float | None:
    """Mean |log-prob difference| of two training forwards, that of the run and one with the other attention.

    logprobs: of the run's  # [M]. None where the textbook attention would not fit.
    """
    if max(batch.lengths) > FLOOR_TOKENS:
        return None
    model = parts.config.model
    other = "eager" if model.attn_implementation == "auto" else "auto"
    temperature = parts.config.rollout.temperature
    plain = TokenLogprobModule(parts.policy.model, other, temperature, router_replay=model.router_replay)
    return (plain(batch).logprobs - logprobs).abs().mean().item()


def _check_teacher(parts: Parts, records: Sequence[RolloutRecord]) -> list[Finding]:
    """One pass over the probe; not where other ranks hold a part of the teacher (ZeRO-3)."""
    if parts.teacher is None and parts.config.teacher.path:
        return [Finding("teacher", "note", "teacher.path is not used, since loss.distill_weight is 0")]
    if parts.teacher is None or (parts.config.teacher.placement == "zero3" and parts.world_size > 1):
        return []
    started = time.perf_counter()
    gap = parts.teacher.gap(_packed(records), parts.data.teacher_prompts[:PROBE_PROMPTS])
    text = f"KL(policy || teacher) about {gap:.3g} nats a token; a pass took {time.perf_counter() - started:.2f} s"
    return [Finding("teacher", "ok" if math.isfinite(gap) else "FAIL", text)]


def _check_prompt(parts: Parts) -> Finding:
    ids = parts.data.prompts[0]
    text = parts.tokenizer.decode(ids, skip_special_tokens=False)
    tail = parts.tokenizer.decode(ids[-SHOWN_TOKENS:], skip_special_tokens=False)  # never a part of a control token
    shown = f"{len(ids)} tokens, ending in {tail!r}"
    if "boxed" not in text and not parts.config.reward.function:
        fix = (
            "it does not ask for \\boxed{}, which alone is graded; ask in data.system_prompt if the model has to know"
        )
        return Finding("prompt", "note", f"{shown}: {fix}")
    return Finding("prompt", "ok", shown)


def _check_lengths(parts: Parts) -> Finding:
    lengths = sorted(map(len, parts.data.prompts))
    limit, turn = parts.config.rollout.context_length, parts.config.rollout.max_new_tokens
    high = lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))]
    text = (
        f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]} tokens, median {statistics.median(lengths):.0f}, "
        f"95 % up to {high}, in a context of {limit}"
    )
    tight = sum(length + turn > limit for length in lengths)
    if tight:
        return Finding("lengths", "note", f"{text}; {tight} leave less than one turn (rollout.max_new_tokens={turn})")
    return Finding("lengths", "ok", text)


def _check_held_out(parts: Parts) -> Finding:
    if parts.eval_data is None:
        text = "no evaluation (eval.path is empty)"
        if parts.config.eval.every or parts.config.eval.at_start:
            return Finding("held out", "note", f"{text}, although eval.every or eval.at_start asks for one")
        return Finding("held out", "ok", text)
    trained = {problem.prompt for problem in parts.data.problems}
    count = len(parts.eval_data.problems)
    seen = sum(problem.prompt in trained for problem in parts.eval_data.problems)
    if seen:
        return Finding("held out", "note", f"{seen} of {count} evaluation prompts are also in data.path")
    return Finding("held out", "ok", f"none of {count} evaluation prompts is in data.path")


def _check_template(parts: Parts, records: Sequence[RolloutRecord]) -> Finding:
    """The chat's own probe of the template has passed; here sampled turns must be in the token ids verbatim."""
    suffixes = 0
    for record in records:
        rebuilt = list(parts.data.prompts[record.prompt_index])
        for number, turn in enumerate(record.turns):
            drawn = record.token_ids[turn.start : turn.end]
            rebuilt += drawn
            if number + 1 < len(record.turns):
                rebuilt += parts.chat.reply_ids(drawn, [call.text for call in turn.calls])
                suffixes += 1
        if tuple(rebuilt) != record.token_ids:
            return Finding(
                "template", "FAIL", "a trajectory is not prompt, sampled ids and derived suffixes; report it"
            )
    return Finding(
        "template", "ok", f"keeps its prefix; {suffixes} tool results appended as derived, sampled ids verbatim"
    )


def _check_stop_ids(parts: Parts) -> Finding:
    stops = sorted(parts.chat.stop_ids)
    names = ", ".join(f"{parts.tokenizer.convert_ids_to_tokens(i)} {i}" for i in stops)
    rows = _embedding_rows(parts)
    if len(parts.tokenizer) > rows:
        fix = "name the model's own tokenizer in model.tokenizer_path"
        return Finding(
            "stop ids", "FAIL", f"the tokenizer has {len(parts.tokenizer)} ids, the model {rows} rows: {fix}"
        )
    ends = getattr(parts.policy.model.generation_config, "eos_token_id", None)
    unknown = set(ends if isinstance(ends, list) else [ends]) - {None, *stops}
    if unknown:
        return Finding("stop ids", "note", f"{names}; the model's generation config also ends at {sorted(unknown)}")
    return Finding("stop ids", "ok", names)


def _embedding_rows(parts: Parts) -> int:
    return cast(torch.Tensor, parts.policy.model.get_input_embeddings().weight).shape[0]


def _check_gold(parts: Parts) -> Finding:
    """The reference, boxed and sent through the tokenizer, must be right; odd references are noted."""
    rows = parts.data.problems[:GOLD_ROWS]
    for problem in rows:
        text = parts.chat.answer(parts.chat.answer_ids(f"\\boxed{{{problem.answer}}}"))
        verdict = grade_trajectory(text, StopReason.ANSWERED, problem.answer)
        if not verdict.correct:
            fix = "fix the row or the tokenizer"
            text = f"line {problem.line}: its own answer {problem.answer!r} is graded {verdict.reason}: {fix}"
            return Finding("gold", "FAIL", text)
    text = f"the first {len(rows)} references, boxed, are graded right"
    files = [("data.path", parts.config.data.path, parts.data), ("eval.path", parts.config.eval.path, parts.eval_data)]
    odd = [note for setting, path, data in files if data for note in _odd_references(setting, path, data.problems)]
    return Finding("gold", "note" if odd else "ok", "; ".join([text, *odd]))


def _odd_references(setting: str, path: str, problems: Sequence[Problem]) -> list[str]:
    found = unmatchable((f"line {problem.line}", problem.answer) for problem in problems)
    notes = [f"{setting}: {found}"] if found else []
    if _AIME_NAME.search(Path(path).name):
        other = [problem for problem in problems if not re.fullmatch("0*[0-9]{1,3}", clean(problem.answer))]
        has = [f"this file has {len(problems)}"] if len(problems) % AIME_PROBLEMS else []
        has += [f"line {problem.line} has {problem.answer!r:.40}" for problem in other[:1]]
        if has:
            notes.append(f"{setting}={path}: expects {AIME_PROBLEMS} answers of 0-999 for AIME; {' and '.join(has)}")
    return notes


def _check_rollout(parts: Parts, records: Sequence[RolloutRecord], seconds: float) -> Finding:
    calls = Counter(call.status for record in records for turn in record.turns for call in turn.calls)
    stops = Counter(record.stop.value for record in records)
    text = f"{len(records)} trajectories, {sum(r.num_sampled for r in records)} tokens, {seconds:.2f} s; "
    text += f"stops {dict(stops)}, calls {dict(calls)}"
    if stops[StopReason.TOOL_INFRA.value]:
        return Finding("rollout", "FAIL", f"{text}: the sandbox failed; see its report above")
    return Finding("rollout", "ok", text)


def check_memory(forecast: Memory, tokens: int, device: torch.device) -> Finding:
    """What is still to come (gradients, moments, one micro-batch) against what is free now."""
    cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if cuda else _free_host_bytes()
    coming = forecast.to_come + (0 if forecast.optimizer_on_host and cuda else forecast.optimizer)
    text = (
        f"{forecast}; micro-batches of up to {tokens} tokens; at most {coming / GIGABYTE:.2f} "
        f"GB are still to come, the rest is taken already; {free / GIGABYTE:.1f} GB free now"
    )
    if coming > free:
        cache = "rollout.kv_memory_fraction" if cuda else "rollout.kv_tokens"
        elsewhere = ", or set train.offload_optimizer" if cuda else ""
        return Finding("memory", "note", f"{text}: lower {cache} or train.max_tokens_per_micro_batch{elsewhere}")
    return Finding("memory", "ok", text)


def _free_host_bytes() -> int:
    words = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(words["MemAvailable"].split()[0]) * 1024


def _check_time(
    parts: Parts, records: Sequence[RolloutRecord], rollout_seconds: float, forward_seconds: float
) -> Finding:  # fmt: skip
    """From the probe, which takes as many decode steps as its longest trajectory has sampled tokens."""
    rollout = parts.config.rollout
    decode = rollout_seconds / max(record.num_sampled for record in records)
    rate = sum(len(record.token_ids) for record in records) / forward_seconds
    passes = 4 - parts.memory.kept_layers / parts.memory.layers  # forward, backward (two), and a recomputed part
    waves = -(-rollout.trajectories_per_step // (rollout.decode_rows * parts.world_size))
    length = statistics.median(map(len, parts.data.prompts)) + rollout.max_new_tokens
    sampling = waves * rollout.max_new_tokens * decode
    update = rollout.trajectories_per_step / parts.world_size * length * passes / rate
    text = (
        f"a decode step {1000 * decode:.1f} ms, a forward {rate:.0f} tokens/s on {len(records)} rows; if every "
        f"trajectory samples {rollout.max_new_tokens} tokens, a step takes about {spoken(sampling)} of sampling and "
        f"{spoken(update)} of update, more for full rows"
    )
    return Finding("time", "ok", text)


def spoken(seconds: float) -> str:
    """A duration in the unit that people would use."""
    if seconds < LONGEST_IN_SECONDS:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} minutes" if seconds < LONGEST_IN_MINUTES else f"{seconds / 3600:,.1f} hours"
