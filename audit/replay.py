"""`main.py replay RUN --step S --sample I`: samples a recorded trajectory again, from its checkpoint, with its tool.

Equal means bit for bit: ids, log-probs, tool statuses and texts. Where a draw differs, the recorded ids are fed to the
model instead (teacher forcing). The noise is that of the recorded run, so a draw that differs is a difference of the
logits: of another dtype, kernel or batch. The margin says how small a change was enough. `replay` compares and gets
the model as two functions; `Resampler` provides them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from config import ModelConfig, UserError
from decode.noise import gumbel, row_key
from modeling.attention import NO_MASK, Softmax, TrainingRows
from modeling.logprob import CHUNK_LOGITS, head_logits
from rollout.engine import RolloutEngine, RolloutRequest
from rollout.records import RolloutRecord, SamplingConfig, Work
from run.trajectories import read_step, stored_steps

Row = dict[str, Any]


class ReplayError(UserError, LookupError):
    """A trajectory that cannot be sampled again; one line with the reason and the fix."""


@dataclass(frozen=True, slots=True)
class ForcedDraws:
    """One entry for each requested place, [M]."""

    tokens: list[int]  # what the noise and these logits choose
    margins: list[float]  # score of that token minus the recorded one's; 0.0 where they are the same
    logprobs: list[float]  # of the recorded tokens


@dataclass(slots=True)
class Replay:
    equal: bool
    lines: list[str] = field(default_factory=list)


def pick(run_dir: Path, step: int, sample: int) -> Row:
    """Row `sample` (from 0, in (prompt, sample) order) of step `step` (from 1). Raises UserError."""
    rows = read_step(run_dir, step)
    if not 0 <= sample < len(rows):
        raise ReplayError(f"--sample={sample}: step {step} has samples 0 to {len(rows) - 1}")
    return rows[sample]


def weights_before(model: ModelConfig, run_dir: Path, policy_step: int) -> tuple[ModelConfig, Path | None]:
    """Where the weights lie that had taken `policy_step` steps, and the LoRA adapters on them if any.

    model: the run's, whose weights are those of step 0, and in a run with adapters of every step
    Raises ReplayError where no checkpoint was kept at that step, naming the steps that can be replayed.
    """
    if policy_step == 0:
        return model, None
    folder = run_dir / "checkpoints" / f"step_{policy_step}"
    if (folder / "state.json").exists():
        if (folder / "adapter_config.json").exists():
            return model, folder
        return dataclasses.replace(model, path=str(folder), random_weights=False), None
    made = (path.parent.name.removeprefix("step_") for path in (run_dir / "checkpoints").glob("step_*/state.json"))
    able = sorted(({1} | {int(step) + 1 for step in made}) & set(stored_steps(run_dir)))
    raise ReplayError(
        f"--step={policy_step + 1}: needs the weights after step {policy_step}, and there is no such checkpoint; "
        f"can be replayed: {', '.join(map(str, able))} (train.save_every sets how many)"
    )


def replay(
    row: Row,
    sample: Callable[[Row], RolloutRecord],
    force: Callable[[Row, Sequence[int]], ForcedDraws],
    decode: Callable[[Sequence[int]], str],
) -> Replay:
    """Samples `row` again and compares.

    sample: the row's prompt, indices and step -> a new record
    force: the row and places in its trajectory -> the draws that the model makes there
    decode: ids -> text, for the printed lines
    """
    new = sample(row)
    sampled = [place for place, drawn in enumerate(row["sampled"]) if drawn]
    place = _first_difference(row["token_ids"], new.token_ids)
    calls = _call_differences(row, new)
    size = f"{len(row['token_ids'])} tokens, {len(sampled)} of them sampled, {len(row['turns'])} turns"
    if place is None and not calls:
        gaps = [abs(a - b) for a, b in zip(row["logprobs"], new.logprobs, strict=True)]
        if not any(gaps):
            return Replay(True, [f"bit-exact: {size}; ids, log-probs and tool results are equal"])
        return Replay(True, [f"same ids and tool results: {size}; log-probs differ by at most {max(gaps):.3g}"])
    result = Replay(False, [f"differs: {size}", *calls])
    if place is not None:
        result.lines.append(_describe(place, row, new, decode))
        result.lines += _forced_lines(row, sampled, force(row, sampled), decode)
    return result


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _call_differences(row: Row, new: RolloutRecord) -> list[str]:
    """Calls with the same program but another result: a difference of the tool, not of the model."""
    found = []
    for number, (old_turn, new_turn) in enumerate(zip(row["turns"], new.turns, strict=False), start=1):
        for old, again in zip(old_turn["calls"], new_turn.calls, strict=False):
            if old["code"] == again.code and (old["status"], old["text"]) != (again.status, again.text):
                found.append(
                    f"turn {number}: the same program gave {old['status']} {old['text'][:80]!r}, "
                    f"now {again.status} {again.text[:80]!r}"
                )
    return found


def _describe(place: int, row: Row, new: RolloutRecord, decode: Callable[[Sequence[int]], str]) -> str:
    old_ids, new_ids = row["token_ids"], new.token_ids
    was, now = (repr(decode([ids[place]])) if place < len(ids) else "the end" for ids in (old_ids, new_ids))
    drawn = row["sampled"] if place < len(old_ids) else new.sampled
    kind = "sampled" if drawn[place] else "appended"
    return f"token {place} ({kind}) was {was}, now {now}; {place} tokens before it are equal"


def _forced_lines(
    row: Row, places: Sequence[int], draws: ForcedDraws, decode: Callable[[Sequence[int]], str]
) -> list[str]:
    recorded = [row["token_ids"][place] for place in places]
    gap = max(abs(row["logprobs"][place] - new) for place, new in zip(places, draws.logprobs, strict=True))
    other = [i for i, (a, b) in enumerate(zip(recorded, draws.tokens, strict=True)) if a != b]
    lines = [f"teacher-forced: {len(other)} of {len(places)} draws differ; log-probs differ by at most {gap:.3g}"]
    if other:
        first = other[0]
        lines.append(
            f"first differing draw: token {places[first]}, recorded {decode([recorded[first]])!r}, "
            f"now {decode([draws.tokens[first]])!r}, margin {draws.margins[first]:.3g} of log-probability plus noise"
        )
    return lines


class Resampler:
    """Runs one recorded trajectory through the engine or the model; rows are those of `run.trajectories.read_step`."""

    def __init__(self, engine: RolloutEngine, model: PreTrainedModel, softmax: Softmax, sampling: SamplingConfig):
        """engine: over `model`; sampling: the run's."""
        self._engine, self._model, self._softmax, self._sampling = engine, model, softmax, sampling

    def sample(self, row: dict[str, Any]) -> RolloutRecord:
        prompt = row["token_ids"][: row["turns"][0]["start"]]
        index, samples = row["prompt_index"], self._sampling.n_samples_per_prompt
        prompts = [prompt] * (index + 1)  # only the last is sampled; its place among them keys the noise
        take = iter([index * samples + row["sample_index"], len(prompts) * samples]).__next__
        [record] = self._engine.generate(RolloutRequest(prompts, row["policy_step"], Work(take)), self._sampling)
        return record

    @torch.no_grad()
    def force(self, row: dict[str, Any], places: Sequence[int]) -> ForcedDraws:
        """places: indices of the tokens to draw, each above 0."""
        key = row_key(self._sampling.seed, row["policy_step"], row["prompt_index"], row["sample_index"])
        device, temperature = self._model.device, self._sampling.temperature
        ids, positions = (torch.tensor(x, device=device) for x in (row["token_ids"], places))
        hidden = self._model.base_model(
            input_ids=ids[None], position_ids=torch.arange(len(ids), device=device)[None], attention_mask=NO_MASK,
            use_cache=False, rows=TrainingRows([len(ids)], self._softmax, device),
        ).last_hidden_state[0, positions - 1]  # [M, H]  # fmt: skip
        head = self._model.get_output_embeddings().weight
        step = max(1, CHUNK_LOGITS // head.shape[0])
        parts = [
            _draw(head_logits(h, head, temperature), ids[p], p, key, temperature)
            for h, p in zip(hidden.split(step), positions.split(step), strict=True)
        ]
        tokens, margins, logprobs = (torch.cat(column).tolist() for column in zip(*parts, strict=True))
        return ForcedDraws(tokens, margins, logprobs)


def _draw(
    logits: Tensor, recorded: Tensor, positions: Tensor, key: tuple[int, int], temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [M, V], recorded [M], positions [M] -> chosen [M], margins [M], log-probs of recorded [M]."""
    words = torch.tensor([key], dtype=torch.int64).to(torch.int32).expand(len(positions), 2).to(logits.device)
    scores = logits if temperature == 0 else logits + gumbel(words, positions, logits.shape[1])
    best, tokens = scores.max(dim=-1)
    margins = best - scores.gather(1, recorded[:, None])[:, 0]
    return tokens, margins, logits.gather(1, recorded[:, None])[:, 0] - logits.logsumexp(dim=-1)
