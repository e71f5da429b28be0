"""A recorded trajectory once more: sampled again, or fed to the model to see what it would draw (teacher forcing).

The noise is the one that sampling used, so a draw that differs is a difference of the logits: of another dtype, kernel
or batch. The margin says how small a change was enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.noise import gumbel, row_key
from modeling.attention import NO_MASK, Softmax, TrainingRows
from modeling.logprob import CHUNK_LOGITS, head_logits
from rollout.engine import RolloutEngine, RolloutRequest
from rollout.records import RolloutRecord, SamplingConfig, Work


@dataclass(frozen=True, slots=True)
class ForcedDraws:
    """One entry for each place asked for, [M]."""

    tokens: list[int]  # what the noise and these logits choose
    margins: list[float]  # score of that token minus the recorded one's; 0.0 where they are the same
    logprobs: list[float]  # of the recorded tokens


class Again:
    """For rows as `run.trajectories.read_step` gives them."""

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

    def force(self, row: dict[str, Any], places: Sequence[int]) -> ForcedDraws:
        """places: as in `forced_draws`."""
        key = row_key(self._sampling.seed, row["policy_step"], row["prompt_index"], row["sample_index"])
        ids, temperature = row["token_ids"], self._sampling.temperature
        return forced_draws(self._model, self._softmax, ids, places, key, temperature)


@torch.no_grad()
def forced_draws(
    model: PreTrainedModel, softmax: Softmax, token_ids: Sequence[int], places: Sequence[int], key: tuple[int, int],
    temperature: float,
) -> ForcedDraws:  # fmt: skip
    """token_ids: the line [T]; places: indices in it of the tokens to draw, each above 0; key: noise.row_key."""
    device = model.device
    line = torch.tensor(token_ids, device=device)
    positions = torch.tensor(places, device=device)
    rows = TrainingRows([len(token_ids)], softmax, device)
    hidden = model.base_model(
        input_ids=line[None], position_ids=torch.arange(len(token_ids), device=device)[None], attention_mask=NO_MASK,
        use_cache=False, rows=rows,
    ).last_hidden_state[0, positions - 1]  # [M, H]  # fmt: skip
    head = model.get_output_embeddings().weight
    step = max(1, CHUNK_LOGITS // head.shape[0])
    parts = [
        _draw(head_logits(h, head, temperature), line[p], p, key, temperature)
        for h, p in zip(hidden.split(step), positions.split(step), strict=True)
    ]
    tokens, margins, logprobs = (torch.cat(column).tolist() for column in zip(*parts, strict=True))
    return ForcedDraws(tokens, margins, logprobs)


def _draw(
    logits: Tensor, recorded: Tensor, positions: Tensor, key: tuple[int, int], temperature: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """logits [M, V], recorded [M], positions [M] -> chosen [M], margins [M], log-probs of recorded [M]."""
    words = torch.tensor([key], dtype=torch.int64).to(torch.int32).expand(len(positions), 2).to(logits.device)
    scores = logits if temperature == 0 else logits + gumbel(words, positions, logits.shape[1])
    best, tokens = scores.max(dim=-1)
    margins = best - scores.gather(1, recorded[:, None])[:, 0]
    return tokens, margins, logits.gather(1, recorded[:, None])[:, 0] - logits.logsumexp(dim=-1)
