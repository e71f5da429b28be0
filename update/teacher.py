"""The teacher of on-policy distillation: one pass over the policy's own trajectories before each update.

The pass keeps the teacher's last hidden states in host memory, not its logits (at V = 151,936 and H = 4,096 a 37th of
the bytes, and exact): the update multiplies them with the teacher's head again, chunk by chunk. For
`teacher.divergence` "sampled" it keeps the log-probabilities of the sampled tokens alone. The teacher may read other
prompts than the policy (privileged context): the response, sampled tokens and tool results alike, is the same, and
tokens are matched by their place in it.

`Resident`, `Live`, `Parked`, `RunningMean` and `Sharded` say where the teacher's weights wait. Each brings them to the
device for a pass and gives the LM head, which outlives the pass, since the update multiplies with it.

Invariants: a teacher has no gradient and no optimizer; a checkpoint holds nothing of it but the running mean of source
"ema".
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
        vocabulary: rows of the policy's head; further rows of the teacher's head are left out
        """
        self._module, self._present, self.measure, self._device = module, present, measure, device
        self._vocabulary = vocabulary

    @property
    def model(self) -> Any:
        """The Hugging Face model; its weights need not be on the device."""
        return self._module.model

    @torch.no_grad()
    def lessons(self, minibatches: Sequence[Sequence[Any]], prompts: Sequence[Sequence[int]]) -> list[list[Lesson]]:
        """For each micro-batch of each update. Collective where ZeRO-3 partitions the weights.

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
        # The policy may sample a padding id outside the teacher's vocabulary; the teacher reads its last id instead.
        ids = batch.input_ids.clamp(max=self.model.config.vocab_size - 1)
        hidden = self._module(dataclasses.replace(batch, input_ids=ids))
        if self.measure.kind == "sampled":
            return self._of_targets(hidden, head, batch)
        return TeacherStates(_to_host(hidden), head, self.measure)

    def _of_targets(self, hidden: Tensor, head: Tensor, batch: Any) -> TokenLogprobs:
        """Log-probabilities of the sampled tokens. A padding id outside the teacher's head gets the policy's own
        log-probability, so that it has no gap."""
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

    batch: a `update.batch.ResponseTokenBatch`; prompts: by prompt_index
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
    """The text appended to the user turn: teacher.privilege with the problem's answer and hint filled in."""
    return template.replace("{answer}", problem.answer).replace("{hint}", problem.hint)


def head_of(model: Any) -> Tensor:
    return model.get_output_embeddings().weight.detach()  # [V, H']


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False).eval()


class Resident:
    """Weights that stay on the device: a separate teacher, or the policy without its adapters."""

    def __init__(self, model: Any, around: Callable[[], Any] = contextlib.nullcontext):
        self._model, self._around = model, around

    @contextmanager
    def __call__(self) -> Iterator[Tensor]:
        with self._around():
            yield head_of(self._model)


class Live:
    """The policy's weights as they are at the pass; the head is a copy, since several updates may follow."""

    def __init__(self, model: Any):
        self._model = model

    @contextmanager
    def __call__(self) -> Iterator[Tensor]:
        yield head_of(self._model).clone()


class Parked:
    """Weights that wait in host memory (pinned, for the full bus rate) and are copied to the device for a pass.

    Nothing is copied back: they do not change.
    """

    def __init__(self, model: Any, device: torch.device):
        """model: on the host"""
        self._model, self._device = model, device
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        pin = device.type == "cuda"
        self._waiting = [(p, p.data.pin_memory() if pin else p.data) for p in model.parameters()]

    @contextmanager
    def __call__(self) -> Iterator[Tensor]:
        for parameter, data in self._waiting:
            parameter.data = data.to(self._device, non_blocking=True)
        try:
            yield head_of(self._model)
        finally:
            for parameter, data in self._waiting:
                parameter.data = data


class RunningMean:
    """The exponential mean of the policy's weights, one move toward them before each pass.

    Kept in fp32, since a move of 1 % is lost in bf16; on the device or on the host.
    """

    def __init__(self, model: Any, policy_model: Any, decay: float, device: torch.device, home: torch.device):
        """model: the policy as it was before training; it holds the mean during a pass"""
        self._model, self._device, self._decay = model.to(device), device, decay
        self._names = [name for name, _ in model.named_parameters()]
        self._live = [dict(policy_model.named_parameters())[name] for name in self._names]
        self._mean = [p.data.to(home, torch.float32, copy=True) for p in model.parameters()]
        self._release()

    @contextmanager
    def __call__(self) -> Iterator[Tensor]:
        for parameter, mean, live in zip(self._model.parameters(), self._mean, self._live, strict=True):
            mean.lerp_(live.detach().to(mean.device, torch.float32), 1 - self._decay)
            parameter.data = mean.to(self._device, live.dtype, copy=True)
        try:
            yield head_of(self._model)
        finally:
            self._release()

    def _release(self) -> None:
        for parameter in self._model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._mean, strict=True))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, mean in zip(self._names, self._mean, strict=True):
            mean.copy_(state[name])


class Sharded:
    """Weights partitioned over the host memory of all ranks by ZeRO-3, which gathers each layer for its forward.

    Every rank makes equally many forwards (`update.batch.collate` sees to it). The head is gathered once and kept.
    """

    def __init__(self, module: nn.Module, model: Any):
        """module: the callable around `model`; both whole, on the host"""
        import deepspeed

        zero_config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu", "pin_memory": True},
                # On, it would replace torch's linear in the whole process for good, and the policy round otherwise.
                "memory_efficient_linear": False,
            },
            "bf16": {"enabled": head_of(model).dtype == torch.bfloat16},
            "steps_per_print": 1 << 40,
        }
        # Tensor by tensor: never whole on the device.
        deepspeed.zero.Init(module=module, config_dict_or_path=zero_config)
        engine, *_ = deepspeed.initialize(model=module, config=zero_config)
        self._engine = engine  # its hooks gather
        for buffer in module.buffers():
            buffer.data = buffer.data.to(engine.device)
        weight = model.get_output_embeddings().weight
        with deepspeed.zero.GatheredParameters([weight]):
            self._head = weight.detach().clone().to(engine.device)

    @contextmanager
    def __call__(self) -> Iterator[Tensor]:
        yield self._head
