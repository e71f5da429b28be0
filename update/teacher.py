"""The teacher of on-policy distillation: one pass over the policy's own trajectories before each update.

It leaves its last hidden states in host memory, not its logits (at V = 151,936 and H = 4,096 a 37th of the bytes, and
exact): the update multiplies them with the teacher's head again, chunk by chunk. For `teacher.divergence` "sampled" it
leaves the log-probabilities of the sampled tokens alone. Prompts may be others than the policy's (privileged context):
the response, sampled tokens and tool results alike, is the same, and tokens are matched by their place in it.

Invariants: nothing of a teacher has a gradient or an optimizer; but for the running mean of source "ema" nothing of it
is in a checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from modeling.divergence import Lesson, Measure, TeacherStates
from modeling.logprob import TokenLogprobs, token_logprobs

TEACHER_MEAN = "teacher_mean.pt"  # of source "ema", in a checkpoint's engine/; resume needs nothing else of a teacher


class Teacher:
    def __init__(
        self, module: nn.Module, present: Callable[[], AbstractContextManager[Tensor]], measure: Measure,
        device: torch.device, vocabulary: int,
    ):  # fmt: skip
        """module: a packed batch in, hidden states [M, H'] out (`modeling.packed_model.PredictingStates`)
        present: brings the weights to the device for a pass; gives the LM head, which stays valid after it
        vocabulary: rows of the policy's head; further ones of the teacher's take no part
        """
        self._module, self._present, self.measure, self._device = module, present, measure, device
        self._vocabulary = vocabulary

    @property
    def model(self) -> Any:
        """The Hugging Face model; its weights need not be on the device."""
        return self._module.model

    @torch.no_grad()
    def lessons(self, minibatches: Sequence[Sequence[Any]], prompts: Sequence[Sequence[int]]) -> list[list[Lesson]]:
        """For each micro-batch of each update. Collective with weights that ZeRO-3 has dealt out.

        prompts: what the teacher reads in place of each prompt, by prompt_index; empty: the policy's own
        """
        with self._present() as head:
            head = head[: self._vocabulary]
            return [[self._lesson(with_prompts(b, prompts) if prompts else b, head) for b in bs] for bs in minibatches]

    def gap(self, batch: Any, prompts: Sequence[Sequence[int]]) -> float:
        """Mean of log policy - log teacher over a batch's sampled tokens, the policy's as recorded."""
        [[lesson]] = self.lessons([[batch]], prompts)
        if isinstance(lesson, TeacherStates):
            lesson = self._of_targets(lesson.hidden.to(self._device), lesson.head, batch.to(self._device))
        return (batch.behaviour_logprobs - lesson.logprobs.cpu()).mean().item()

    def _lesson(self, batch: Any, head: Tensor) -> Lesson:
        batch = batch.to(self._device)
        # A row that pads the policy's longer head may be drawn; the teacher reads its own last row in its place.
        ids = batch.input_ids.clamp(max=self.model.config.vocab_size - 1)
        hidden = self._module(dataclasses.replace(batch, input_ids=ids))
        if self.measure.kind == "sampled":
            return self._of_targets(hidden, head, batch)
        return TeacherStates(_to_host(hidden), head, self.measure)

    def _of_targets(self, hidden: Tensor, head: Tensor, batch: Any) -> TokenLogprobs:
        """Of the sampled tokens. Of one that is no row of the teacher's head, and so no token of the tokenizer, the
        policy's own log-probability: nothing is said of it."""
        known = batch.targets < head.shape[0]
        out = token_logprobs(hidden, head, batch.targets.where(known, 0), self.measure.temperature)
        return dataclasses.replace(out, logprobs=out.logprobs.where(known, batch.behaviour_logprobs))


def _to_host(hidden: Tensor) -> Tensor:
    if hidden.device.type == "cpu":
        return hidden
    waiting = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
    return waiting.copy_(hidden, non_blocking=True)  # read again by the same stream, hence after the copy


def with_prompts(batch: Any, prompts: Sequence[Sequence[int]]) -> Any:
    """The same responses after other prompts: predictors move with them, targets stay.

    batch: a `data.ResponseTokenBatch`; prompts: by prompt_index
    """
    ids: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    shifts: list[int] = []
    start = shift = 0
    places = batch.predictors.tolist()
    firsts = {row: place for place, row in reversed(list(zip(places, batch.rows.tolist(), strict=True)))}
    for row, (length, prompt) in enumerate(zip(batch.lengths, batch.prompts, strict=True)):
        response = batch.input_ids[0, firsts[row] + 1 : start + length].tolist()  # the last token predicts nothing
        new = [*prompts[prompt], *response]
        shift += len(new) - length
        ids += new
        positions += range(len(new))
        lengths.append(len(new))
        shifts.append(shift)
        start += length
    return dataclasses.replace(
        batch, input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]), lengths=tuple(lengths),
        predictors=batch.predictors + torch.tensor(shifts)[batch.rows],
    )  # fmt: skip


def privileged(template: str, problem: Any) -> str:
    """What is appended to the user turn: teacher.privilege with the problem's answer and hint in it."""
    return template.replace("{answer}", problem.answer).replace("{hint}", problem.hint)
