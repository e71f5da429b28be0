"""The command line, and the only place that constructs things.

    main.py --config FILE [--set section.field=value ...] [--run-dir DIR] [--resume]

trains; `check`, `evaluate` and `audit` are its subcommands. Everything that can be refused is refused before anything
is written, before the model is built and before the GPU is touched: settings, data, prompts, batch maths. Errors are
one line on standard error and exit status 2.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import arguments
import inputs
from config import Config, ConfigError, UserError, load_config

USER_ERROR_STATUS = 2


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in SUBCOMMANDS:
            return SUBCOMMANDS[words[0]](words[1:])
        args = arguments.train_parser().parse_args(words)
        config = load_config(args.config, args.set)
        _train(config, Path(args.run_dir or config.log.run_dir or f"runs/{Path(args.config).stem}"), args.resume)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_STATUS
    return 0


def _train(config: Config, run_dir: Path, resume: bool) -> None:
    resume_from = inputs.check_run_dir(config, run_dir, resume)
    with built(config) as parts:
        if parts.rank == 0 and config.train.check:
            from check import check, require_pass

            lines = check(parts)
            print("\n".join(str(line) for line in lines if line.name != "mask"), flush=True)
            require_pass(lines)
        from trainer import Trainer

        trainer = Trainer(
            config, parts.policy, parts.sample, lambda: parts.engine.stats, parts.chat, parts.tokenizer, parts.data,
            parts.eval_data, run_dir,
        )  # fmt: skip
        if parts.rank == 0:
            (run_dir / "config.json").write_text(config.to_json())
        first = trainer.resume(resume_from) if resume_from else 0
        trainer.run(first)


def _check(words: Sequence[str]) -> int:
    from check import check

    args = arguments.check_parser().parse_args(words)
    with built(load_config(args.config, args.set)) as parts:
        lines = check(parts) if parts.rank == 0 else []
    print("\n".join(map(str, lines)), end="\n" if lines else "")
    return int(any(line.state == "FAIL" for line in lines))


@contextlib.contextmanager
def built(config: Config) -> Iterator[Any]:
    """The `check.Parts` of a run, each refused as early as it can be; the tool ends with the block."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    inputs.check_batch(config, world_size)
    from check import Parts

    tokenizer = inputs.load_tokenizer(config)
    chat = inputs.load_chat(config, tokenizer)
    data = inputs.load_data(config, chat, config.data.path)
    eval_data = inputs.load_data(config, chat, config.eval.path, once=True) if config.eval.path else None
    shape = inputs.check_model(config)
    tool = start_tool(config, rank)
    try:
        policy, engine, kv_cache_bytes = build_policy(config, shape, _device(config), chat, tool)
        yield Parts(
            config, shape, tokenizer, chat, data, eval_data, tool, policy, engine, sample_with(engine),
            kv_cache_bytes, rank, world_size,
        )  # fmt: skip
    finally:
        if tool:
            tool.close()


def _evaluate(words: Sequence[str]) -> int:
    from evaluation import report_lines, write_results
    from ranks import Ranks
    from treatments import Treatment, choose_checkpoint, run_treatments, treated

    args = arguments.evaluate_parser().parse_args(words)
    config, step, out = choose_checkpoint(args.config, args.set, args.checkpoint, args.run_dir, args.out)
    tokenizer, shape = inputs.load_tokenizer(config), inputs.check_model(config)
    rank = int(os.environ.get("RANK", "0"))
    configs = {name: treated(config, name) for name in args.tools}
    chats = {name: inputs.load_chat(settings, tokenizer) for name, settings in configs.items()}
    data = {name: inputs.load_data(configs[name], chat, config.eval.path, once=True) for name, chat in chats.items()}
    tool = start_tool(config, rank) if "on" in args.tools else None
    try:
        sample = build_samplers(configs, shape, _device(config), chats, tool)
        found = run_treatments({
            name: Treatment(configs[name], data[name].problems, data[name].prompts, sample[name], chat.decode)
            for name, chat in chats.items()
        }, step, Ranks())  # fmt: skip
    finally:
        if tool:
            tool.close()
    if rank == 0:
        write_results(out, found)
        print("\n".join(report_lines(found)) + f"\nwritten to {out}")
    return 0


def _audit(words: Sequence[str]) -> int:
    from audit import audit

    args = arguments.audit_parser().parse_args(words)
    run_dir = Path(args.run)
    config = load_config(run_dir / "config.json")
    chat = inputs.load_chat(config, inputs.load_tokenizer(config))
    if args.math_verify:
        from second_opinion import list_disagreements

        return list_disagreements(run_dir, chat.decode)
    tool = None if args.no_tools else start_tool(config, rank=0)
    try:
        counts, problems, missing = audit(run_dir, chat.decode, tool)
    finally:
        if tool:
            tool.close()
    for line in problems[:50] + missing:
        print(line)
    print(", ".join(f"{count} {name}" for name, count in counts.items()), "recomputed;", len(problems), "differ")
    return 1 if problems else 0


SUBCOMMANDS = {"check": _check, "evaluate": _evaluate, "audit": _audit}


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


def build_policy(config: Config, shape: Any, device: Any, chat: Any, tool: Any) -> tuple[Any, Any, int]:
    """The policy inside DeepSpeed, the rollout engine over its live weights, and the bytes of its cache."""
    from policy import Policy, init_distributed, register_rollout_engine
    from rollout.engine import RolloutEngine

    register_rollout_engine(RolloutEngine)
    init_distributed(device)
    policy = Policy(config, device)
    cache = build_cache(config, shape, policy.model, device)
    decoder = build_decoder(config, policy.model, cache, device)
    return policy, build_engine(config, decoder, cache, chat, tool), cache.kv.nbytes


def build_cache(config: Config, shape: Any, model: Any, device: Any) -> Any:
    from rollout.cache import PagedCache, num_pages

    pages = num_pages(config.rollout, shape, model.dtype, device)
    return PagedCache(shape, pages, config.rollout.page_size, model.dtype, device)


def build_engine(config: Config, decoder: Any, cache: Any, chat: Any, tool: Any) -> Any:
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
        deterministic=config.rollout.deterministic,
    )


def build_samplers(configs: Any, shape: Any, device: Any, chats: Any, tool: Any) -> dict[str, Any]:
    """For each treatment of the tool an engine over one frozen model; no optimizer, no DeepSpeed engine."""
    from policy import build_model, init_distributed
    from treatments import BrokenTool, is_truncated

    init_distributed(device)
    config = next(iter(configs.values()))
    model = build_model(config.model, config.train.seed, device).eval()
    cache = build_cache(config, shape, model, device)
    decoder = build_decoder(config, model, cache, device, graphs=not is_truncated(config))
    tools = {"on": tool, "off": None, "broken": BrokenTool()}
    engines = {name: build_engine(configs[name], decoder, cache, chat, tools[name]) for name, chat in chats.items()}
    return {name: sample_with(engine) for name, engine in engines.items()}


def build_decoder(config: Config, model: Any, cache: Any, device: Any, graphs: bool = True) -> Any:
    """Captured graphs on CUDA, unless `graphs` or rollout.cuda_graphs is off; eager decoding elsewhere."""
    from rollout.decoder import EagerDecoder
    from treatments import is_truncated

    eager = EagerDecoder(model, cache, config.model.attn_implementation)
    if device.type != "cuda" or not (graphs and config.rollout.cuda_graphs):
        return eager
    if config.eval.path and is_truncated(config):
        raise ConfigError(
            "rollout.cuda_graphs", True, "captured graphs draw from the whole softmax; set it to false, or leave out "
            "eval.top_p and eval.top_k here and score checkpoints with main.py evaluate",
        )  # fmt: skip
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

    def sample(prompts: Any, step: int, take: Any, sampling: Any) -> Any:
        return engine.generate(RolloutRequest(prompts, step, take), sampling)

    return sample


if __name__ == "__main__":
    status = main()
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        sys.modules["torch.distributed"].destroy_process_group()
    sys.exit(status)
