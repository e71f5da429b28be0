"""The command line, and the only place that constructs things.

    main.py --config FILE [--set section.field=value ...] [--run-dir DIR] [--resume]

trains; `audit`, `report`, `compare` and `replay` look at what a run left behind. Everything that can be refused is
refused before anything is written, before the model is built and before the GPU is touched: settings, data, prompts,
batch maths. Errors are one line on standard error and exit status 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import commands
from config import Config, ConfigError, UserError, load_config
from schema import differences, read_json

USER_ERROR_STATUS = 2
FIXED_BY_THE_CURSOR = (
    "data.path", "data.shuffle", "train.seed", "rollout.trajectories_per_step", "rollout.samples_per_prompt",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in commands.NAMES:
            return _look(commands.look_parser().parse_args(words))
        args = commands.train_parser().parse_args(words)
        config = load_config(args.config, args.set)
        _train(config, Path(args.run_dir or config.log.run_dir or f"runs/{Path(args.config).stem}"), args.resume)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_STATUS
    return 0


def _train(config: Config, run_dir: Path, resume: bool) -> None:
    resume_from = _check_run_dir(config, run_dir, resume)
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    check_batch(config, world_size)

    from report.console import open_console
    from report.trackers import check_trackers
    from report.writers import open_writer
    from trainer import Trainer

    check_trackers(config.log)
    tokenizer = load_tokenizer(config)
    chat, data, eval_data = load_data(config, tokenizer)
    shape = check_model(config)
    tool = start_tool(config, rank)
    console = open_console(config.train.steps) if rank == 0 else None
    writer = None
    try:
        device = _device(config)
        policy, engine = build_policy(config, shape, device, chat, tool, console and console.progress)
        writer = open_writer(config, run_dir, console) if console else None
        trainer = Trainer(
            config, policy, sample_with(engine), lambda: engine.stats, chat, tokenizer, data, eval_data, run_dir,
            writer,
        )  # fmt: skip
        first = trainer.resume(resume_from) if resume_from else 0
        trainer.run(first)
    finally:
        for opened in (writer, console, tool):
            if opened:
                opened.close()


def _audit(args: argparse.Namespace) -> int:
    from audit import audit, summary

    run_dir = Path(args.run)
    config = load_config(run_dir / "config.json")
    chat = load_chat(config, load_tokenizer(config))
    tool = None if args.no_tools else start_tool(config, rank=0)
    try:
        counts, problems, missing = audit(run_dir, chat.decode, tool)
    finally:
        if tool:
            tool.close()
    print("\n".join([*problems[:50], *missing, summary(counts, problems)]))
    return 1 if problems else 0


def _look(args: argparse.Namespace) -> int:
    """The commands that look at a finished run; exit status 1 where one finds a difference."""
    if args.command in ("audit", "replay"):
        return (_audit if args.command == "audit" else _replay)(args)
    if args.command == "compare":
        from report.compare import compare

        print(compare(Path(args.a), Path(args.b), args.last, args.out))
        return 0
    from report.page import write_report

    tokenizer = load_tokenizer(load_config(Path(args.run) / "config.json"))
    print(write_report(Path(args.run), tokenizer, args.out, args.trajectories))
    return 0


def _replay(args: argparse.Namespace) -> int:
    from modeling.attention import SOFTMAX
    from policy import build_model
    from report import replay
    from rollout.again import Again
    from trainer import sampling_of

    run_dir = Path(args.run)
    row = replay.pick(run_dir, args.step, args.sample)
    config = load_config(run_dir / "config.json")
    weights = replay.weights_before(config.model, run_dir, row["policy_step"])
    tokenizer = load_tokenizer(config)
    chat, shape, tool = load_chat(config, tokenizer), check_model(config), start_tool(config, rank=0)
    try:
        model = build_model(weights, config.train.seed, _device(config))
        engine = build_engine(config, shape, model, chat, tool)
        again = Again(engine, model, SOFTMAX[config.model.attn_implementation], sampling_of(config))
        result = replay.replay(row, again.sample, again.force, tokenizer.decode)
    finally:
        if tool:
            tool.close()
    print("\n".join(result.lines))
    return 0 if result.equal else 1


def _check_run_dir(config: Config, run_dir: Path, resume: bool) -> Path | None:
    """The checkpoint to resume from. A folder that holds a run is never overwritten."""
    from checkpoint import CheckpointError, find_latest

    if not resume:
        if (run_dir / "metrics.jsonl").exists():
            raise ConfigError("--run-dir", str(run_dir), "already holds a run; add --resume, or name another folder")
        return None
    latest = find_latest(run_dir)
    if latest is None:
        raise CheckpointError(f"{run_dir}: no complete checkpoint to resume from; start without --resume")
    changed = differences(read_json(run_dir / "config.json"), json.loads(config.to_json()))
    for name, (before, now) in changed.items():
        if name in FIXED_BY_THE_CURSOR:
            raise ConfigError(name, now, f"was {before!r} in the run to resume, and fixes which problems are done; "
                              f"set it back, or start a new run with model.path={latest}")  # fmt: skip
        if os.environ.get("RANK", "0") == "0":
            print(f"resuming with {name} changed from {before!r} to {now!r}", flush=True)
    return latest


def check_batch(config: Config, world_size: int) -> None:
    prompts, samples = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
    if prompts % world_size:
        good = [n * world_size * samples for n in (prompts // world_size, prompts // world_size + 1) if n]
        raise ConfigError(
            "rollout.trajectories_per_step", config.rollout.trajectories_per_step,
            f"gives {prompts} prompts a step, which {world_size} processes can not share equally; "
            f"set {' or '.join(map(str, good))}",
        )  # fmt: skip


def load_tokenizer(config: Config) -> Any:
    from transformers import AutoTokenizer

    name = "tokenizer_path" if config.model.tokenizer_path else "path"
    return _from_hub(f"model.{name}", getattr(config.model, name), AutoTokenizer)


def load_chat(config: Config, tokenizer: Any) -> Any:
    """The chat format, probed. Raises ChatTemplateError."""
    from rollout.chat import Qwen3Chat
    from tools import tool_schema

    tools = [tool_schema(config.tool)] if config.tool.enabled else []
    return Qwen3Chat(tokenizer, tools=tools, enable_thinking=config.model.enable_thinking)


def load_data(config: Config, tokenizer: Any) -> tuple[Any, Any, Any]:
    """The chat format, and the problems with their rendered prompts. Raises DataError or ConfigError."""
    from data import load_problems, render_prompts
    from trainer import TrainingData

    chat = load_chat(config, tokenizer)
    system = [{"role": "system", "content": config.data.system_prompt}] if config.data.system_prompt else []

    def render(text: str) -> list[int]:
        return chat.prompt_ids([*system, {"role": "user", "content": text}])

    def rendered(path: str) -> TrainingData:
        problems = load_problems(path, config.data)
        limit = config.rollout.context_length - 1
        return TrainingData(*render_prompts(problems, render, limit, config.data.over_long_prompts, path))

    return chat, rendered(config.data.path), rendered(config.eval.path) if config.eval.path else None


def check_model(config: Config) -> Any:
    """The model's shape, from its config.json alone."""
    from transformers import AutoConfig

    import lora
    from modeling.attention import check_supported
    from modeling.shapes import shape_source

    lora.check_available(config.lora)
    shape = _from_hub("model.path", shape_source(config.model), AutoConfig)
    try:
        check_supported(shape)
    except ValueError as error:
        raise ConfigError("model.path", config.model.path, str(error)) from error
    if config.rollout.context_length > shape.max_position_embeddings:
        raise ConfigError(
            "rollout.context_length", config.rollout.context_length,
            f"is more than the model's max_position_embeddings={shape.max_position_embeddings}; lower it",
        )  # fmt: skip
    return shape


def _from_hub(name: str, path: str, loader: Any) -> Any:
    hub_name = path.count("/") == 1 and path[0] not in "/.~"
    if not Path(path).is_dir() and not hub_name:
        raise ConfigError(name, path, "is neither a folder nor a hub name of the form organisation/model")
    try:
        return loader.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(name, path, f"cannot be loaded: {str(error).splitlines()[0]}") from error


def start_tool(config: Config, rank: int) -> Any:
    """The Python tool, started before CUDA is touched: it forks, and nothing of the GPU may be inherited."""
    if not config.tool.enabled:
        return None
    from tools import PythonTool

    tool = PythonTool(config.tool)
    if rank == 0:
        print(tool.report, flush=True)
    return tool


def _device(config: Config) -> Any:
    import torch

    if config.train.num_threads:
        torch.set_num_threads(config.train.num_threads)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def build_policy(
    config: Config, shape: Any, device: Any, chat: Any, tool: Any, progress: Any
) -> tuple[Any, Any]:  # fmt: skip
    """The policy inside DeepSpeed, and the rollout engine over its live weights."""
    from policy import Policy, init_distributed, register_rollout_engine
    from rollout.engine import RolloutEngine

    register_rollout_engine(RolloutEngine)
    init_distributed(device)
    policy = Policy(config, device)
    return policy, build_engine(config, shape, policy.model, chat, tool, progress)


def build_engine(config: Config, shape: Any, model: Any, chat: Any, tool: Any, progress: Any = None) -> Any:
    from rollout.cache import PagedCache, num_pages
    from rollout.engine import RolloutEngine

    rollout = config.rollout
    pages = num_pages(rollout, shape, model.dtype, model.device)
    cache = PagedCache(shape, pages, rollout.page_size, model.dtype, model.device)
    decoder = build_decoder(config, model, cache, model.device)
    return RolloutEngine(
        decoder,
        chat,
        tool,
        decode_rows=rollout.decode_rows,
        page_size=rollout.page_size,
        num_pages=pages,
        prefill_tokens=rollout.prefill_tokens,
        forced_tokens=rollout.forced_tokens if decoder.pipelined else 0,  # an eager step reads them at no extra cost
        deterministic=rollout.deterministic,
        progress=progress,
    )


def build_decoder(config: Config, model: Any, cache: Any, device: Any) -> Any:
    """Captured graphs on CUDA, unless rollout.cuda_graphs is off; eager decoding elsewhere."""
    from rollout.decoder import EagerDecoder

    eager = EagerDecoder(model, cache, config.model.attn_implementation)
    if device.type != "cuda" or not config.rollout.cuda_graphs:
        return eager
    from modeling.fused import UnsupportedModel
    from rollout.graphs import GraphDecoder
    from rollout.prefill import FlashDecoder

    half = config.model.dtype == "bfloat16" and config.model.attn_implementation == "auto"
    try:
        return GraphDecoder(
            model,
            cache,
            FlashDecoder(model, cache) if half else eager,
            max_rows=config.rollout.decode_rows,
            context_length=config.rollout.context_length,
            temperature=config.rollout.temperature,
        )
    except UnsupportedModel as error:
        raise ConfigError("rollout.cuda_graphs", True, f"{error}; set it to false to decode eagerly") from error


def sample_with(engine: Any) -> Any:
    """The engine as the plain function that the trainer takes."""
    from rollout.engine import RolloutRequest

    return lambda prompts, step, take, sampling: engine.generate(RolloutRequest(prompts, step, take), sampling)


if __name__ == "__main__":
    status = main()
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        sys.modules["torch.distributed"].destroy_process_group()
    sys.exit(status)
