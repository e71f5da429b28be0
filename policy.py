"""The policy: a Hugging Face model inside DeepSpeed's hybrid engine under ZeRO-2, sampled and trained in one process.

Invariants: the modules and parameters that `Policy.model` gives to the rollout are the ones the optimizer updates;
gradients are sums of per-token terms that already hold the global denominator, whatever the number of micro-batches or
ranks; the learning rate follows the trainer's step counter, not DeepSpeed's (which also counts skipped steps).
`engine.generate` is not used: Qwen3 has no inference container, and the forward is `engine.module`.
"""

from __future__ import annotations

import contextlib
import glob
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
from torch import Tensor, nn
from transformers import PreTrainedModel

from config import Config
from modeling import lora
from modeling.activations import Recompute, free_bytes
from modeling.divergence import TeacherStates
from modeling.loading import build_model
from modeling.logprob import TokenLogprobs
from modeling.packed_model import PackedBatch, TokenLogprobModule
from modeling.probe import check_attention
from run import tensorfiles
from run.engine_files import EngineFiles, random_state, restore_random_state

deepspeed.utils.logger.setLevel(logging.ERROR)

BUCKET_ELEMENTS = 100_000_000  # of gradients that are reduced at once; DeepSpeed's default takes five times the memory


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
        """[M] for each batch under the policy before training. Only with loss.kl_coef above 0."""
        if self._reference:
            return self._reference.logprobs(batches)
        with lora.without_adapters(self.model):
            return [self.frozen_logprobs(batch) for batch in batches]

    def backward(self, loss: Tensor, last: bool) -> None:
        """Adds a micro-batch's gradient. All ranks make the same number of calls; `last` marks the one before `step`.

        loss: this rank's part of the step's loss, with the global denominator in it
        """
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss)  # undivided: see `deepspeed_settings`
        if not last:
            self._engine.step()  # counts the micro-batch, updates nothing
        self._accumulating = not last

    def update_room(self) -> int | None:
        """Bytes that a micro-batch may take on every rank, from what is free now; None on CPU. Collective.

        Call it once cache and captured graphs are allocated. From here on torch's pools grow in place: micro-batches
        of unlike sizes would fragment them otherwise (15 of 147 GB lay idle in an update at 4B).
        """
        if self.device.type != "cuda":
            return None
        with warnings.catch_warnings():  # torch 2.11 announces another name, which 2.10 lacks
            warnings.simplefilter("ignore", FutureWarning)
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        moments = 0 if self.config.train.offload_optimizer else 8 * trained // self.world_size
        room = torch.tensor(free_bytes(self.device) - self._gradient_bytes() - moments, device=self.device)
        dist.all_reduce(room, dist.ReduceOp.MIN)
        return int(room)

    def _gradient_bytes(self) -> int:
        """Bytes that a backward pass allocates beside activations; the fp32 sum stays after a step's first one."""
        trained = [p.numel() for p in self.model.parameters() if p.requires_grad]
        buckets = 3 * 4 * BUCKET_ELEMENTS  # the bucket, its copy for the reduction, and what that returns
        largest = (2 + 4 + 4) * max(trained)
        return buckets + largest + (0 if self._accumulating else 4 * sum(trained) // self.world_size)

    def step(self, learning_rate: float) -> float:
        """Clips and updates; returns the gradient's global norm before clipping.

        A gradient that is not finite on one rank updates nothing on any of them (DeepSpeed drops it); the norm is not
        finite then.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def save(self, folder: Path) -> dict[str, str]:
        """Weights, optimizer and this rank's random state, under `folder/engine`; their checksums by file.

        Not collective: it calls the two writers of DeepSpeed 0.19.8's `save_checkpoint` without its barriers, where
        the other ranks would wait forever if one rank's disk were full.
        """
        (folder / "engine").mkdir(parents=True, exist_ok=True)
        files = self._engine.checkpoint_engine = EngineFiles(folder)
        with ThreadPoolExecutor(1) as pool:
            weights = pool.submit(self._save_weights, folder)
            with _own_stream(self.device):
                self._engine._save_zero_checkpoint(str(folder), "engine")
                files.save(random_state(), folder / "engine" / f"random_rank_{dist.get_rank()}.pt")
                for name, part in self.saved_beside.items() if dist.get_rank() == 0 else ():
                    files.save(part.state_dict(), folder / "engine" / name)
            weights.result()
        return files.sums

    def _save_weights(self, folder: Path) -> None:
        adapters_alone = self.config.lora.rank > 0  # the frozen weights are in model.path
        with _own_stream(self.device):
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
        restore_random_state(torch.load(path, weights_only=False))

    def load_weights(self, folder: Path) -> None:
        """Restores the weights alone, on any number of ranks. Collective."""
        self._load(folder, load_module_only=True)

    def _load(self, folder: Path, **options: bool) -> None:
        whole = self.config.lora.rank == 0
        self._engine.checkpoint_engine = EngineFiles(folder)
        found = type(self._engine)._get_all_ckpt_names  # by glob, in which a path with brackets is a pattern
        self._engine._get_all_ckpt_names = lambda place, tag: found(self._engine, glob.escape(place), tag)
        path, _ = self._engine.load_checkpoint(str(folder), tag="engine", load_module_strict=whole, **options)
        if path is None:
            raise RuntimeError(f"{folder}: DeepSpeed found no engine state in it")
        for name, part in self.saved_beside.items():
            part.load_state_dict(tensorfiles.load(folder / "engine" / name))

    def save_pretrained(self, folder: Path) -> None:
        """The Hugging Face copy, or with LoRA the adapters in peft's form; rank 0 alone. Holds it in host memory."""
        with _own_stream(self.device):
            if self.config.lora.rank:
                lora.save_adapters(self.model, self.config.lora, folder)
            else:
                with tensorfiles.host_copies(self.model.state_dict()) as state:
                    self.model.save_pretrained(folder, state_dict=state)


def deepspeed_settings(config: Config, world_size: int) -> dict[str, Any]:
    """DeepSpeed's settings. Gradients are sums of parts that hold the global denominator, over micro-batches and ranks
    alike: "sum" replaces DeepSpeed's average over ranks, and gradient_accumulation_steps, by which it divides, stays
    1 whatever the number of micro-batches.
    """
    zero: dict[str, Any] = {"stage": config.train.zero_stage, "contiguous_gradients": True, "overlap_comm": False}
    zero |= {"reduce_bucket_size": BUCKET_ELEMENTS, "reduce_scatter": world_size > 1}  # one rank: fewer copies
    if config.train.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_allreduce_op": "sum",
        "gradient_clipping": config.train.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "hybrid_engine": {"enabled": True},
        "steps_per_print": 1 << 40,
    }
    if config.model.dtype == "bfloat16":
        # Without grad_accum_dtype micro-batches would be added up in bf16.
        # Without immediate_grad_update stage 1 would add each micro-batch to the earlier ones twice.
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


class Reference:
    """The frozen policy from before training, against which `loss.kl_coef` measures; with its own copy of the weights.

    With `loss.kl_reference` "cpu" they wait in host memory and move to the device for one forward a step: slower by
    two copies, but no device memory during rollout and update. The forward is the policy's own (same attention, same
    head walk), so an untrained policy has a KL of exactly 0.
    """

    def __init__(self, module: nn.Module, device: torch.device, stays: bool):
        """module: a packed batch in, `TokenLogprobs` out; stays: keeps its weights on the device between calls"""
        self._module = module.requires_grad_(False).eval()
        self._device, self._home = device, device if stays else torch.device("cpu")
        self._module.to(self._home)

    @torch.no_grad()
    def logprobs(self, batches: Iterable[PackedBatch]) -> list[Tensor]:
        """[M] for each batch of the device, in order."""
        self._module.to(self._device)
        values = [self._module(batch).logprobs for batch in batches]
        self._module.to(self._home)
        return values


def build_reference(config: Config, device: torch.device) -> Reference | None:
    """The weights before training; None where loss.kl_coef is 0, or where LoRA leaves them in the policy."""
    if config.loss.kl_coef == 0 or config.lora.rank:
        return None
    model = build_model(config.model, config.train.seed, device)
    module = TokenLogprobModule(model, config.model.attn_implementation, config.rollout.temperature)
    return Reference(module, device, stays=config.loss.kl_reference == "gpu")


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """A separate CUDA stream, so that copies to the host do not queue behind the next rollout's decode steps."""
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
    """Replays the step counter of a loaded `DeepSpeedCPUAdam` with empty tensors. Its C++ part multiplies the powers
    of the betas step by step and is in no checkpoint; computed at once they would round differently."""
    beta1, beta2 = adam.param_groups[0]["betas"]
    nothing = [torch.empty(0)] * 4  # parameters, gradients, two moments
    for step in range(max((state["step"] for state in adam.state.values()), default=0)):
        adam.ds_opt_adam.adam_update(adam.opt_id, step + 1, 0.0, beta1, beta2, 1.0, 0.0, True, *nothing)


def _decays(parameter: Tensor, embedding: Tensor) -> bool:
    return parameter.ndim > 1 and parameter is not embedding
