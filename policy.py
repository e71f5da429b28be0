"""The policy: a Hugging Face model inside DeepSpeed's hybrid engine under ZeRO-2, sampled and trained in one process.

Invariants: the modules and parameters that `Policy.model` gives to the rollout are the ones the optimizer updates;
gradients are sums of per-token terms that already hold the global denominator, whatever the number of micro-batches or
ranks; the learning rate follows the trainer's step counter, not DeepSpeed's (which also counts skipped steps).
`engine.generate` is not used: Qwen3 has no inference container, and the forward is `engine.module`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch

# DeepSpeed takes the CUDA that torch was built with, also where CUDA_VISIBLE_DEVICES hides every GPU.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed
import torch.distributed as dist
from deepspeed.runtime import hybrid_engine
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.rollout import RolloutEngine as DeepSpeedRolloutEngine
from torch import Tensor
from transformers import PreTrainedModel

from config import Config
from modeling import lora
from modeling.activations import Recompute, free_bytes
from modeling.divergence import TeacherStates
from modeling.loading import build_model
from modeling.logprob import TokenLogprobs
from modeling.packed_model import PackedBatch, TokenLogprobModule
from modeling.probe import check_attention
from run import random_state, tensorfiles
from run.zero_settings import BUCKET_ELEMENTS, deepspeed_settings
from update.reference import Reference

deepspeed.utils.logger.setLevel(logging.ERROR)


def init_distributed(device: torch.device) -> None:
    """Joins the process group of the launcher (`deepspeed`, `torchrun`), or makes one of a single process."""
    if device.type == "cpu":
        # Its first use would compile C++ for 100 s, and fail where there is no compiler; gloo serves as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
        return
    os.environ["LOCAL_RANK"] = "0"  # the engine asserts it
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)


@contextlib.contextmanager
def _without_containers() -> Iterator[None]:
    """Keeps DeepSpeed's inference kernels away from the families for which it has some (Llama, OPT, ...): they would
    hold copies of the weights and replace forwards, and on a CPU they do not exist."""
    policies, hybrid_engine.replace_policies = hybrid_engine.replace_policies, []
    try:
        yield
    finally:
        hybrid_engine.replace_policies = policies


def register_rollout_engine(engine: type) -> None:
    """Makes `engine` an instance of DeepSpeed's `RolloutEngine` in the eyes of isinstance; nothing is inherited."""
    DeepSpeedRolloutEngine.register(engine)


class Policy:
    """One per process. Everything that DeepSpeed does happens behind these methods."""

    def __init__(self, config: Config, device: torch.device):
        """Builds the model and the engine; `init_distributed` must have run.

        Raises ConfigError where model.attn_implementation computes another attention than the model's own.
        """
        self.config, self.device = config, device
        self.model = build_model(config.model, config.train.seed, device)
        check_attention(self.model, config.model.attn_implementation)
        if config.lora.rank:
            lora.add_adapters(self.model, config.lora, config.train.seed)
        self.recompute = Recompute(self.model.base_model.layers, config.model.gradient_checkpointing, device)
        self.saved_beside: dict[str, Any] = {}  # by file name; each has state_dict and load_state_dict, alike on ranks
        module = TokenLogprobModule(
            self.model, config.model.attn_implementation, config.rollout.temperature, self.recompute,
            only_distils=config.loss.distill_weight == 1 and config.loss.kl_coef == 0,
            router_replay=config.model.router_replay, router_balance=config.loss.router_balance > 0,
        )  # fmt: skip
        self.world_size = dist.get_world_size()
        self._accumulating = False  # between the first and the last micro-batch of an update
        self._reference = build_reference(config, device)
        # DeepSpeed prints here what its logger would not.
        with contextlib.redirect_stdout(io.StringIO()), _without_containers():
            self._engine, self._optimizer, _, _ = deepspeed.initialize(
                model=module,
                optimizer=build_optimizer(self.model, config),
                config=deepspeed_settings(config, self.world_size),
            )

    def eval(self) -> None:
        self._engine.module.eval()  # engine.eval() prints a latency line each time

    def train(self) -> None:
        self._engine.module.train()

    def token_logprobs(self, batch: PackedBatch, lesson: TeacherStates | None = None) -> TokenLogprobs:
        """Log-probabilities [M] of the batch's sampled tokens under the current weights, differentiable.

        lesson: see `TokenLogprobModule.forward`
        """
        self.recompute.to_come = self._gradient_bytes()
        return self._engine(batch, lesson)

    @torch.no_grad()
    def frozen_logprobs(self, batch: PackedBatch) -> Tensor:
        """The same values [M] without a gradient."""
        return self._engine.module(batch).logprobs

    @torch.no_grad()
    def reference_logprobs(self, batches: Iterable[PackedBatch]) -> list[Tensor]:
        """[M] for each batch under the policy of before training. Only with loss.kl_coef above 0."""
        if self._reference:
            return self._reference.logprobs(batches)
        with lora.without_adapters(self.model):
            return [self.frozen_logprobs(batch) for batch in batches]

    def backward(self, loss: Tensor, last: bool) -> None:
        """Adds a micro-batch's gradient. All ranks make equally many calls; the last one before `step` says so.

        loss: this rank's part of the step's loss, with the global denominator in it
        """
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss)  # its settings undo DeepSpeed's two divisions: see `deepspeed_settings`
        if not last:
            self._engine.step()  # counts the micro-batch, updates nothing
        self._accumulating = not last

    def update_room(self, released: int = 0) -> int | None:
        """Bytes that a micro-batch may take on every rank, from what is free now; None on CPU. Collective.

        released: bytes that stand now and will be away in updates (rollout.release_kv)
        Call it once cache and captured graphs stand. From here on torch's pools grow in place: micro-batches of unlike
        sizes would tear them otherwise (15 of 147 GB lay idle in an update at 4B).
        """
        if self.device.type != "cuda":
            return None
        with warnings.catch_warnings():  # torch 2.11 announces another name, which 2.10 lacks
            warnings.simplefilter("ignore", FutureWarning)
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        moments = 0 if self.config.train.offload_optimizer else 8 * trained // self.world_size
        free = free_bytes(self.device) + released
        room = torch.tensor(free - self._gradient_bytes() - moments, device=self.device)
        dist.all_reduce(room, dist.ReduceOp.MIN)
        return int(room)

    def _gradient_bytes(self) -> int:
        """What a backward pass allocates beside activations; the fp32 sum stays from a step's first one on."""
        trained = [p.numel() for p in self.model.parameters() if p.requires_grad]
        buckets = 3 * 4 * BUCKET_ELEMENTS  # the bucket, its copy for the reduction, and what that returns
        largest = (2 + 4 + 4) * max(trained)
        return buckets + largest + (0 if self._accumulating else 4 * sum(trained) // self.world_size)

    def step(self, learning_rate: float) -> float:
        """Clips and updates; returns the gradient's global norm before clipping.

        A gradient that is not finite on any rank updates nothing on all of them (DeepSpeed drops it), and neither is
        the norm that is returned.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def save(self, folder: Path) -> dict[str, str]:
        """Weights, optimizer and this rank's random state, under `folder/engine`; their checksums by file.

        Not collective: these are the two writers that DeepSpeed 0.19.8's `save_checkpoint` calls between its barriers,
        in which the other ranks would wait for ever when one rank's disk is full.
        """
        (folder / "engine").mkdir(parents=True, exist_ok=True)
        files = self._engine.checkpoint_engine = EngineFiles(folder)
        with ThreadPoolExecutor(1) as beside:
            weights = beside.submit(self._save_weights, folder)
            with _stream_beside(self.device):
                self._engine._save_zero_checkpoint(str(folder), "engine")
                files.save(random_state.take(), folder / "engine" / f"random_rank_{dist.get_rank()}.pt")
                for name, part in self.saved_beside.items() if dist.get_rank() == 0 else ():
                    files.save(part.state_dict(), folder / "engine" / name)
            weights.result()
        return files.sums

    def _save_weights(self, folder: Path) -> None:
        adapters_alone = self.config.lora.rank > 0  # the frozen weights are in model.path
        with _stream_beside(self.device):
            self._engine._save_checkpoint(str(folder), "engine", exclude_frozen_parameters=adapters_alone)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote on the same number of ranks. Collective."""
        self._load(folder)
        for state in self._optimizer.state.values():  # some of it would stay the file's pages
            state.update({k: v.clone() for k, v in state.items() if isinstance(v, Tensor) and v.device.type == "cpu"})
        train = self.config.train
        for group in self._optimizer.param_groups:  # the file brings back the settings it was written under
            group["betas"] = (train.adam_beta1, train.adam_beta2)
            group["weight_decay"] = train.weight_decay if group["weight_decay"] else 0.0
        if train.offload_optimizer:
            _count_again(self._optimizer.optimizer)
        path = folder / "engine" / f"random_rank_{dist.get_rank()}.pt"
        random_state.put_back(torch.load(path, weights_only=False))

    def load_weights(self, folder: Path) -> None:
        """Restores the weights alone, on any number of ranks. Collective."""
        self._load(folder, load_module_only=True)

    def _load(self, folder: Path, **options: bool) -> None:
        whole = self.config.lora.rank == 0
        self._engine.checkpoint_engine = EngineFiles(folder)
        path, _ = self._engine.load_checkpoint(str(folder), tag="engine", load_module_strict=whole, **options)
        if path is None:
            raise RuntimeError(f"{folder}: DeepSpeed found no engine state in it")
        for name, part in self.saved_beside.items():
            part.load_state_dict(tensorfiles.load(folder / "engine" / name))

    def save_pretrained(self, folder: Path) -> None:
        """The Hugging Face copy, or with LoRA the adapters in peft's form; rank 0 alone. Holds it in host memory."""
        with _stream_beside(self.device):
            if self.config.lora.rank:
                lora.save_adapters(self.model, self.config.lora, folder)
            else:
                with tensorfiles.host_copies(self.model.state_dict()) as state:
                    self.model.save_pretrained(folder, state_dict=state)


class EngineFiles(TorchCheckpointEngine):
    """DeepSpeed's way to files: written without a stop for the threads beside it, read without a copy on the host."""

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder
        self.sums: dict[str, str] = {}  # of what it wrote, by name below the folder

    def save(self, state_dict: Any, path: str | Path) -> None:
        self.sums[Path(path).relative_to(self._folder).as_posix()] = tensorfiles.save(state_dict, Path(path))

    def load(self, path: str | Path, map_location: Any = None) -> Any:
        return tensorfiles.load(Path(path))  # DeepSpeed asks for the host's wherever a state can be saved


def build_reference(config: Config, device: torch.device) -> Reference | None:
    """The weights of before training; None where nothing asks for them, or where LoRA leaves them in the policy."""
    if config.loss.kl_coef == 0 or config.lora.rank:
        return None
    model = build_model(config.model, config.train.seed, device)
    module = TokenLogprobModule(model, config.model.attn_implementation, config.rollout.temperature)
    return Reference(module, device, stays=config.loss.kl_reference == "gpu")


@contextlib.contextmanager
def _stream_beside(device: torch.device) -> Iterator[None]:
    """A stream of its own: copies to the host would else stand in line with the decode steps of the next rollout."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))  # the update's last kernels
    with torch.cuda.stream(stream):
        yield


def build_optimizer(model: PreTrainedModel, config: Config) -> torch.optim.Optimizer:
    """AdamW; vectors (norms, biases) and the embedding are not decayed."""
    train = config.train
    embedding = cast(Tensor, model.get_input_embeddings().weight)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if train.weight_decay == 0:
        groups = [{"params": parameters, "weight_decay": 0.0}]
    else:
        groups = [
            {"params": [p for p in parameters if _decays(p, embedding)], "weight_decay": train.weight_decay},
            {"params": [p for p in parameters if not _decays(p, embedding)], "weight_decay": 0.0},
        ]
    betas = (train.adam_beta1, train.adam_beta2)
    if train.offload_optimizer:
        return deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=train.learning_rate, betas=betas, adamw_mode=True)
    fused = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, fused=fused)


def _count_again(adam: Any) -> None:
    """Takes the steps of a loaded `DeepSpeedCPUAdam` once more, of no element: its C++ part multiplies the powers of
    the betas up step by step and is in no checkpoint; powers that it takes at once, after a gap, round otherwise."""
    beta1, beta2 = adam.param_groups[0]["betas"]
    nothing = [torch.empty(0)] * 4  # parameters, gradients, two moments
    for step in range(max((state["step"] for state in adam.state.values()), default=0)):
        adam.ds_opt_adam.adam_update(adam.opt_id, step + 1, 0.0, beta1, beta2, 1.0, 0.0, True, *nothing)


def _decays(parameter: Tensor, embedding: Tensor) -> bool:
    return parameter.ndim > 1 and parameter is not embedding
