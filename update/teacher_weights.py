"""Where a teacher's weights are: each of these brings them to the device for a pass and gives the LM head.

The head outlives the pass, since the update multiplies the teacher's hidden states with it; the rest need not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def head_of(model: Any) -> Tensor:
    return model.get_output_embeddings().weight.detach()  # [V, H']


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False).eval()


class Resident:
    """Weights that are on the device anyway: a teacher of its own, or the policy without its adapters."""

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
    """Weights that wait in host memory (pinned, so that they come at the bus's rate) and are copied for a pass.

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
        """model: the policy as it was before training, for the mean to be put into"""
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
    """Weights dealt to the host memory of all ranks by ZeRO-3, which gathers each layer for its forward alone.

    Every rank makes equally many forwards (`data.collate` sees to it). The head is gathered once and kept.
    """

    def __init__(self, module: nn.Module, model: Any):
        """module: what is called, around `model`; both whole, on the host"""
        import deepspeed

        settings = {
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
        deepspeed.zero.Init(module=module, config_dict_or_path=settings)  # tensor by tensor: never whole on the device
        engine, *_ = deepspeed.initialize(model=module, config=settings)
        self._engine = engine  # its hooks gather
        for buffer in module.buffers():
            buffer.data = buffer.data.to(engine.device)
        weight = model.get_output_embeddings().weight
        with deepspeed.zero.GatheredParameters([weight]):
            self._head = weight.detach().clone().to(engine.device)

    @contextmanager
    def __call__(self) -> Iterator[Tensor]:
        yield self._head
