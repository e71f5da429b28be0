"""Constructs what a run or a look at one needs: the tool, the policy, caches, decoders and engines.

Called by main.py, and by benchmarks for the decoder that a run would get. Heavy libraries are imported where they are
used, so that a refused setting is refused fast.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from config import Config, ConfigError
from run.files import say


def start_tool(config: Config, rank: int) -> Any:
    """The Python tool, started before CUDA is touched: it forks, and nothing of the GPU may be inherited."""
    if not config.tool.enabled:
        return None
    from tools import PythonTool

    tool = PythonTool(config.tool)
    if rank == 0:
        say(tool.report)
    return tool


def device_of(config: Config) -> Any:
    import torch

    if config.train.num_threads:
        torch.set_num_threads(config.train.num_threads)
    if not torch.cuda.is_available():
        if config.model.dtype == "bfloat16" and os.environ.get("RANK", "0") == "0":  # who means a CPU sets float32
            say("note: no GPU was found, so the CPU is used; model.dtype=bfloat16 is meant for a GPU and slow here")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def build_policy(
    config: Config, shape: Any, device: Any, chat: Any, tool: Any, progress: Any
) -> tuple[Any, Any, Any, int]:  # fmt: skip
    """The policy inside DeepSpeed, its teacher or None, the rollout engine over its live weights, and the bytes of the
    engine's cache."""
    from policy import Policy, init_distributed, register_rollout_engine
    from rollout.engine import RolloutEngine

    register_rollout_engine(RolloutEngine)
    init_distributed(device)
    policy = Policy(config, device)
    teacher = build_teacher(config, policy, device)  # before the cache, which takes a share of what is left free
    cache = build_cache(config, shape, policy.model, device)
    decoder = build_decoder(config, policy.model, cache, device)
    return policy, teacher, build_engine(config, decoder, cache, chat, tool, progress), cache.kv.nbytes


def build_teacher(config: Config, policy: Any, device: Any) -> Any:
    """The `update.teacher.Teacher` that loss.distill_weight asks for, or None."""
    if config.loss.distill_weight == 0:
        return None
    import torch

    from modeling import lora
    from modeling.divergence import Measure
    from modeling.families import can_fuse
    from modeling.packed_model import PredictingStates
    from policy import build_model
    from update import teacher_weights as places
    from update.teacher import TEACHER_MEAN, Teacher

    told, host, implementation = config.teacher, torch.device("cpu"), config.model.attn_implementation
    temperature = config.rollout.temperature if told.temperature is None else told.temperature
    measure = Measure(told.divergence, told.beta, temperature, told.top_k)
    live: Any = policy.model
    vocabulary = len(live.get_output_embeddings().weight)
    present: Any = None
    if told.source == "live":
        present = places.Live(live)
    elif told.source == "base" and config.lora.rank:
        present = places.Resident(live, lambda: lora.without_adapters(live))
    if present:
        return Teacher(PredictingStates(live, implementation), present, measure, device, vocabulary)
    home = device if told.placement == "gpu" else host
    source = "teacher.path" if told.source == "model" else "model.path"
    seed = config.train.seed + (told.source == "model")  # random weights of its own
    # Not fused with ZeRO-3, which gathers a module's weights where it is called: those kernels read norms without.
    whole = told.placement != "zero3"
    born = device if config.model.random_weights and whole else home  # the same draws wherever they will wait
    model: Any = build_model(config.teacher_model, seed, born, name=source)
    model = places.frozen(model.to(home))
    if born != device and whole and can_fuse(model.config, device):
        from modeling.train_layers import fuse

        fuse(model)
    module = PredictingStates(model, implementation)
    if told.source == "ema":
        present = places.RunningMean(model, live, told.ema_decay, device, home)
        policy.saved_beside[TEACHER_MEAN] = present
    elif told.placement == "zero3":
        present = places.Sharded(module, model)
    else:
        present = places.Resident(model) if told.placement == "gpu" else places.Parked(model, device)
    return Teacher(module, present, measure, device, vocabulary)


def plan_memory(config: Config, shape: Any, policy: Any, kv_cache: int, teacher: Any = None) -> tuple[Config, Any]:
    """The config with train.max_tokens_per_micro_batch as a number, and the forecast. Collective.

    kv_cache: bytes of the cache, which stands already, as do the captured graphs
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
    room = policy.update_room(kv_cache if config.rollout.release_kv else 0)
    if config.train.max_tokens_per_micro_batch == "auto" and room is not None:
        tokens = micro_batch_tokens(config, shape, room, taught, 4 * trained // policy.world_size)
        config = dataclasses.replace(
            config, train=dataclasses.replace(config.train, max_tokens_per_micro_batch=tokens)
        )
    return config, forecast(config, shape, held, kv_cache, policy.world_size, room, trained, taught)


def build_cache(config: Config, shape: Any, model: Any, device: Any) -> Any:
    from decode.cache import PagedCache, num_pages

    pages = num_pages(config.rollout, shape, model.dtype, device)
    return PagedCache(shape, pages, config.rollout.page_size, model.dtype, device)


def build_engine(config: Config, decoder: Any, cache: Any, chat: Any, tool: Any, progress: Any = None) -> Any:
    from rollout.engine import RolloutEngine

    return RolloutEngine(
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


def build_samplers(configs: Any, shape: Any, device: Any, chats: Any, tool: Any, adapters: Any) -> dict[str, Any]:
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
    tools = {"on": tool, "off": None, "broken": BrokenTool()}
    engines = {name: build_engine(configs[name], decoder, cache, chat, tools[name]) for name, chat in chats.items()}
    return {name: sample_with(engine) for name, engine in engines.items()}


def build_decoder(config: Config, model: Any, cache: Any, device: Any, graphs: bool = True) -> Any:
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


def sample_with(engine: Any) -> Any:
    """The engine as the plain function that the trainer takes."""
    from rollout.engine import RolloutRequest

    def sample(prompts: Any, step: int, work: Any, sampling: Any) -> Any:
        return engine.generate(RolloutRequest(prompts, step, work), sampling)

    return sample


def build_again(config: Config, shape: Any, model: Any, chat: Any, tool: Any, sampling: Any) -> Any:
    """What replays trajectories of a run over one model."""
    from audit.again import Again
    from modeling.attention import SOFTMAX

    cache = build_cache(config, shape, model, model.device)
    engine = build_engine(config, build_decoder(config, model, cache, model.device), cache, chat, tool)
    return Again(engine, model, SOFTMAX[config.model.attn_implementation], sampling)
