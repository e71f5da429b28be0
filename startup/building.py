"""Constructs what a run or a look at one needs: the tool, the policy, its teacher, caches, decoders and engines.

Called by main.py, and by benchmarks for the decoder that a run would get. Heavy libraries are imported where they are
used, so that a refused setting is refused fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from config import Config, ConfigError
from startup import inputs
from startup.launch import require_rank
from startup.rewards import build_grader, started_reward
from startup.toolbox import OwnTools, started_own, started_tools

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from audit.replay import Resampler
    from data import TrainingData
    from decode.cache import PagedCache
    from decode.interface import Decoder
    from evaluation.grading import Grader
    from modeling.packed_model import PredictingStates
    from policy import Policy
    from rollout.chat.formats import Chat
    from rollout.engine import RolloutEngine, Tool
    from rollout.records import RolloutRecord, Sample, SamplingConfig, Work
    from sandbox.workers.rewards import Scorer
    from startup.forecast import Memory
    from tools import ToolBox
    from update.teacher import Teacher

    Progress = Callable[[int, int, int, int], None]  # see `rollout.engine.RolloutEngine`
    Weights = Callable[[], AbstractContextManager[Tensor]]  # see `update.teacher.Teacher`


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of, on one rank."""

    config: Config  # with train.max_tokens_per_micro_batch as a number on a GPU
    shape: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    chat: Chat
    data: TrainingData
    eval_data: TrainingData | None
    own: OwnTools
    tool: ToolBox | None  # all tools; None where none is offered
    policy: Policy
    teacher: Teacher | None
    engine: RolloutEngine
    sample: Sample  # the engine's `generate` as the trainer calls it
    memory: Memory  # the forecast
    grader: Grader
    scorer: Scorer | None  # with reward.function
    rank: int
    world_size: int


@contextlib.contextmanager
def built(config: Config, progress: Progress | None = None) -> Iterator[Parts]:
    """Builds a run's parts, each refused as early as it can be, and closes tool and reward when the block ends."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    inputs.check_batch(config, world_size)
    require_rank(os.environ)
    tokenizer = inputs.load_tokenizer(config)
    config = inputs.dated(config, tokenizer)
    with started_own(config) as own:
        chat = inputs.load_chat(config, tokenizer, own.schema)
        teacher_shape = inputs.check_teacher(config, tokenizer)
        data = inputs.load_data(config, chat, config.data.path)
        eval_data = inputs.load_data(config, chat, config.eval.path, once=True) if config.eval.path else None
        shape = inputs.check_model(config)
        data = inputs.add_teacher_prompts(config, chat, data, teacher_shape or shape)
        with started_reward(config) as scorer, started_tools(config, own) as tool:
            device = device_of(config)
            policy, teacher = build_policy(config, device)
            cache = build_cache(config, shape, policy.model, device)
            decoder = build_decoder(config, policy.model, cache, device)
            engine = build_engine(config, decoder, cache, chat, tool, progress)
            grader = build_grader(chat, scorer)
            engine.on_record = grader.begin if scorer else None
            config, memory = plan_memory(config, shape, policy, cache.kv.nbytes, teacher)
            yield Parts(
                config, shape, tokenizer, chat, data, eval_data, own, tool, policy, teacher, engine,
                sample_with(engine), memory, grader, scorer, rank, world_size,
            )  # fmt: skip


def device_of(config: Config) -> torch.device:
    """This rank's GPU, or the CPU; applies train.num_threads."""
    import torch

    if config.train.num_threads:
        torch.set_num_threads(config.train.num_threads)
    if not torch.cuda.is_available():
        if config.model.dtype == "bfloat16":  # float32 means the CPU is intended
            inputs.tell("note: no GPU was found, so the CPU is used; model.dtype=bfloat16 is for a GPU and slow here")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def build_policy(config: Config, device: torch.device) -> tuple[Policy, Teacher | None]:
    """The policy inside DeepSpeed and its teacher. Call it before the cache, which takes a share of what is left."""
    from policy import Policy, init_distributed

    init_distributed(device)
    policy = Policy(config, device)
    return policy, build_teacher(config, policy, device)


# The teacher of on-policy distillation: one builder for each teacher.source, giving what computes its hidden states
# and what brings its weights to the device for a pass.


def build_teacher(config: Config, policy: Policy, device: torch.device) -> Teacher | None:
    """The teacher that loss.distill_weight asks for, or None."""
    if config.loss.distill_weight == 0:
        return None
    from modeling.divergence import Measure
    from update.teacher import Teacher

    settings = config.teacher
    builders = {"live": _live_teacher, "base": _base_teacher, "model": _own_teacher, "ema": _mean_teacher}
    module, weights = builders[settings.source](config, policy, device)
    temperature = config.rollout.temperature if settings.temperature is None else settings.temperature
    measure = Measure(settings.divergence, settings.beta, temperature, settings.top_k)
    return Teacher(module, weights, measure, device, len(policy.model.get_output_embeddings().weight))


def _live_teacher(config: Config, policy: Policy, device: torch.device) -> tuple[PredictingStates, Weights]:
    from modeling.packed_model import PredictingStates
    from update.teacher import Live

    return PredictingStates(policy.model, config.model.attn_implementation), Live(policy.model)


def _base_teacher(config: Config, policy: Policy, device: torch.device) -> tuple[PredictingStates, Weights]:
    """With LoRA the policy without its adapters, else a copy of the weights before training."""
    if not config.lora.rank:
        return _own_teacher(config, policy, device)
    from modeling import lora
    from modeling.packed_model import PredictingStates
    from update.teacher import Resident

    module = PredictingStates(policy.model, config.model.attn_implementation)
    return module, Resident(policy.model, lambda: lora.without_adapters(policy.model))


def _own_teacher(config: Config, policy: Policy, device: torch.device) -> tuple[PredictingStates, Weights]:
    """Frozen weights of its own, waiting where teacher.placement says."""
    from modeling.packed_model import PredictingStates
    from update.teacher import Parked, Resident, Sharded

    model = _frozen_model(config, device)
    module = PredictingStates(model, config.model.attn_implementation)
    if config.teacher.placement == "zero3":
        return module, Sharded(module, model)
    return module, Resident(model) if config.teacher.placement == "gpu" else Parked(model, device)


def _mean_teacher(config: Config, policy: Policy, device: torch.device) -> tuple[PredictingStates, Weights]:
    """The running mean of the policy's weights, which checkpoints hold."""
    from modeling.packed_model import PredictingStates
    from update.teacher import TEACHER_MEAN, RunningMean

    model = _frozen_model(config, device)
    mean = RunningMean(model, policy.model, config.teacher.ema_decay, device, _home(config, device))
    policy.saved_beside[TEACHER_MEAN] = mean
    return PredictingStates(model, config.model.attn_implementation), mean


def _frozen_model(config: Config, device: torch.device) -> PreTrainedModel:
    """A teacher's weights where they wait between passes."""
    from modeling.families import can_fuse
    from modeling.loading import build_model
    from update.teacher import frozen

    home, own = _home(config, device), config.teacher.source == "model"
    # Not fused under ZeRO-3, which gathers a module's weights where it is called: the kernels read norms elsewhere.
    whole = config.teacher.placement != "zero3"
    born = device if config.model.random_weights and whole else home  # the same draws wherever they will wait
    seed = config.train.seed + own  # random weights that differ from the policy's
    model = build_model(config.teacher_model, seed, born, name="teacher.path" if own else "model.path")
    frozen(model.to(home))  # type: ignore[arg-type]  # the stub of `to` is a descriptor
    if born != device and whole and can_fuse(model.config, device):
        from modeling.train_layers import fuse

        fuse(model)
    return model


def _home(config: Config, device: torch.device) -> torch.device:
    import torch

    return device if config.teacher.placement == "gpu" else torch.device("cpu")


def plan_memory(
    config: Config, shape: PretrainedConfig, policy: Policy, kv_cache: int, teacher: Teacher | None = None
) -> tuple[Config, Memory]:
    """The config with train.max_tokens_per_micro_batch as a number, and the forecast. Collective.

    kv_cache: bytes of the cache, which is allocated already, as are the captured graphs
    """
    from startup.forecast import forecast, micro_batch_tokens, teacher_memory

    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in policy.model.parameters()]
    held, trained = sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)
    taught = None
    if teacher:
        theirs = [getattr(p, "ds_numel", p.numel()) for p in teacher.model.parameters()]  # the name of ZeRO-3
        count = held if config.teacher.source == "ema" else sum(theirs)  # a mean's tensors are empty between passes
        on_gpu = policy.device.type == "cuda"
        taught = teacher_memory(config, teacher.model.config, count, policy.world_size, on_gpu)
    room = policy.update_room()
    if config.train.max_tokens_per_micro_batch == "auto" and room is not None:
        tokens = micro_batch_tokens(config, shape, room, taught, 4 * trained // policy.world_size)
        config = dataclasses.replace(
            config, train=dataclasses.replace(config.train, max_tokens_per_micro_batch=tokens)
        )
    return config, forecast(config, shape, held, kv_cache, policy.world_size, room, trained, taught)


def build_cache(config: Config, shape: PretrainedConfig, model: PreTrainedModel, device: torch.device) -> PagedCache:
    from decode.cache import PagedCache, num_pages

    pages = num_pages(config.rollout, shape, model.dtype, device)
    return PagedCache(shape, pages, config.rollout.page_size, model.dtype, device)


def build_engine(
    config: Config, decoder: Decoder, cache: PagedCache, chat: Chat, tool: Tool | None,
    progress: Progress | None = None,
) -> RolloutEngine:  # fmt: skip
    from rollout.engine import RolloutEngine
    from rollout.episode import Limits

    engine = RolloutEngine(
        decoder,
        chat,
        tool,
        decode_rows=config.rollout.decode_rows,
        page_size=cache.page_size,
        num_pages=cache.num_pages,
        prefill_tokens=config.rollout.prefill_tokens,
        # An eager step reads them at no extra cost.
        forced_tokens=config.rollout.forced_tokens if decoder.pipelined else 0,
        step_rows=decoder.step_rows,
        deterministic=config.rollout.deterministic,
        progress=progress,
        routes=None if cache.routes is None else cache.routes_of,
    )
    engine.tool_limits = Limits(config.tool.max_calls_per_turn, config.tool.max_seconds)
    return engine


def build_samplers(
    configs: Mapping[str, Config], shape: PretrainedConfig, device: torch.device, chats: Mapping[str, Chat],
    tool: ToolBox | None, adapters: Path | None,
) -> dict[str, Sample]:  # fmt: skip
    """For each treatment of the tool an engine over one frozen model; no optimizer, no DeepSpeed engine.

    adapters: folder of LoRA adapters on it, or None
    """
    from evaluation.treatments import BrokenTool, is_truncated
    from modeling.loading import build_model
    from policy import init_distributed

    init_distributed(device)
    config = next(iter(configs.values()))
    model = build_model(config.model, config.train.seed, device, adapters).eval()
    cache = build_cache(config, shape, model, device)
    decoder = build_decoder(config, model, cache, device, graphs=not is_truncated(config))
    tools: dict[str, Tool | None] = {"on": tool, "off": None, "broken": BrokenTool()}
    engines = {name: build_engine(configs[name], decoder, cache, chat, tools[name]) for name, chat in chats.items()}
    return {name: sample_with(engine) for name, engine in engines.items()}


def build_decoder(
    config: Config, model: PreTrainedModel, cache: PagedCache, device: torch.device, graphs: bool = True
) -> Decoder:
    """Captured graphs on CUDA, unless `graphs` or rollout.cuda_graphs is off; eager decoding elsewhere.

    Where the device refuses to capture, eager decoding too, with a warning (decode/fallback.py).
    """
    from decode.eager import EagerDecoder
    from evaluation.treatments import is_truncated

    eager = EagerDecoder(model, cache, config.model.attn_implementation)
    if device.type != "cuda" or not (graphs and config.rollout.cuda_graphs):
        return eager
    if config.eval.path and is_truncated(config):
        raise ConfigError(
            "rollout.cuda_graphs", True, "captured graphs draw from the whole softmax; set it to false, or leave out "
            "eval.top_p and eval.top_k here and score checkpoints with main.py evaluate",
        )  # fmt: skip
    from decode.fallback import GraphsOrEager, capturing
    from decode.graphs import GraphDecoder, rows_beside
    from decode.prefill import FlashDecoder
    from decode.weights import UnsupportedModel

    half = config.model.dtype == "bfloat16" and config.model.attn_implementation == "auto"

    def capture() -> GraphDecoder:
        with capturing():
            return GraphDecoder(
                model,
                cache,
                FlashDecoder(model, cache) if half else eager,
                max_rows=config.rollout.decode_rows,
                context_length=config.rollout.context_length,
                temperature=config.rollout.temperature,
                extra_rows=rows_beside(config.rollout.decode_rows) if config.rollout.forced_tokens else 0,
            )

    try:
        return GraphsOrEager(capture, eager)
    except UnsupportedModel as error:
        raise ConfigError("rollout.cuda_graphs", True, f"{error}; set it to false to decode eagerly") from error


def sample_with(engine: RolloutEngine) -> Sample:
    """The engine as the plain function that the trainer takes."""
    from rollout.engine import RolloutRequest

    def sample(
        prompts: Sequence[list[int]], step: int, work: Work, sampling: SamplingConfig,
        rows: Sequence[Mapping[str, object]],
    ) -> list[RolloutRecord]:  # fmt: skip
        return engine.generate(RolloutRequest(prompts, step, work, rows), sampling)

    return sample


def build_again(
    config: Config, shape: PretrainedConfig, model: PreTrainedModel, chat: Chat, tool: ToolBox | None
) -> Resampler:
    """What replays trajectories of a run over one model."""
    from audit.replay import Resampler
    from modeling.attention import SOFTMAX
    from rollout.records import SamplingConfig

    cache = build_cache(config, shape, model, model.device)
    engine = build_engine(config, build_decoder(config, model, cache, model.device), cache, chat, tool)
    return Resampler(engine, model, SOFTMAX[config.model.attn_implementation], SamplingConfig.of(config))
