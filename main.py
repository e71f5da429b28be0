"""The command line, and the only place that constructs things (with startup/building.py).

    main.py --config FILE [--set section.field=value ...] [--run-dir DIR] [--resume]

trains; `check`, `evaluate`, `audit`, `report`, `compare` and `replay` are its subcommands. Everything that can be
refused is refused before anything is written, before the model is built and before the GPU is touched: settings, data,
prompts, batch maths. Errors are one line on standard error and exit status 2.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from config import Config, UserError, load_config, parse_config
from run.files import OUT, say, sole_writer
from run.signals import Interruption
from startup import arguments, building, inputs, run_folder

USER_ERROR_STATUS = 2


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in SUBCOMMANDS:
            return SUBCOMMANDS[words[0]](words[1:])
        if words and not words[0].startswith("-"):
            raise UserError(f"{words[0]}: no such subcommand; known: {', '.join(SUBCOMMANDS)}; --config FILE trains")
        args = arguments.train_parser().parse_args(words)
        config = load_config(args.config, args.set)
        run_dir = Path(args.run_dir or config.log.run_dir or f"runs/{Path(args.config).stem}")
        # From here on signals are obeyed.
        with Interruption(config.train.max_minutes) as interruption, contextlib.ExitStack() as stack:
            _train(config, run_dir, args.resume, interruption, stack)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "deepspeed"):
            raise
        print(
            f"error: {error.name} is not installed; source .venv/bin/activate, which a script makes", file=sys.stderr
        )
        return USER_ERROR_STATUS
    except UserError as error:
        if error.of_one_rank or os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_STATUS
    return 0


def _train(
    config: Config, run_dir: Path, resume: bool, interruption: Interruption, stack: contextlib.ExitStack
) -> None:  # fmt: skip
    """stack: what the run holds open until it ends."""
    leads = os.environ.get("RANK", "0") == "0"
    if leads and resume and run_dir.is_dir():  # before a second model is put beside that of a run that goes on
        stack.enter_context(sole_writer(run_dir))
    resume_from = run_folder.check_run_dir(config, run_dir, resume)
    from run.console import open_console
    from run.stretches import begin_stretch
    from run.trackers import check_trackers
    from run.writers import open_writer
    from startup.forecast import naming_the_setting

    check_trackers(config.log)
    console = open_console(config.train.steps) if leads else None
    if console:
        stack.callback(console.close)
    parts = stack.enter_context(built(config, console.progress if console else None))
    stack.enter_context(naming_the_setting(parts.config))
    if console and config.train.check and not interruption.ends(lambda own: [own]):  # of this rank alone
        from startup.check import check, require_pass

        lines = check(parts)
        say("\n".join(str(line) for line in lines if line.name != "mask"))
        require_pass(lines)
    from trainer import Trainer

    if leads and not resume:
        stack.enter_context(sole_writer(run_dir))
        run_folder.check_run_dir(config, run_dir, resume)  # one that began after the first look may have ended since
    writer = open_writer(config, run_dir, console) if console else None
    if writer:
        stack.callback(writer.close)
    tell = partial(_print_peak, parts.memory) if console and parts.policy.device.type == "cuda" else None
    trainer = Trainer(
        parts.config, parts.policy, parts.sample, lambda: parts.engine.stats, parts.chat, parts.tokenizer,
        parts.data, parts.eval_data, run_dir, writer, tell, parts.teacher,
    )  # fmt: skip
    first = trainer.resume(resume_from) if resume_from else 0
    if console and first >= config.train.steps:
        say(f"nothing left to do: {first} steps are done and train.steps={config.train.steps}")
    elif writer:
        begin_stretch(run_dir, first + 1, config.to_json())
    trainer.run(first, interruption)
    if writer and (run_dir / "metrics.jsonl").exists():
        say(f"the run is in {run_dir}; python main.py report {run_dir} shows it")


def _print_peak(memory: Any) -> None:
    print(memory.against_peak(), flush=True)


def _check(words: Sequence[str]) -> int:
    from startup.check import check

    args = arguments.check_parser().parse_args(words)
    with built(load_config(args.config, args.set)) as parts:
        lines = check(parts) if parts.rank == 0 else []
    print("\n".join(map(str, lines)), end="\n" if lines else "")
    return int(any(line.state == "FAIL" for line in lines))


@contextlib.contextmanager
def built(config: Config, progress: Callable[[int, int, int, int], None] | None = None) -> Iterator[Any]:
    """The `Parts` of a run, each refused as early as it can be; the tool ends with the block.

    progress: see `rollout.engine.RolloutEngine`
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    inputs.check_batch(config, world_size)
    from startup.parts import Parts

    tokenizer = inputs.load_tokenizer(config)
    chat = inputs.load_chat(config, tokenizer)
    teacher_shape = inputs.check_teacher(config, tokenizer)
    data = inputs.load_data(config, chat, config.data.path)
    eval_data = inputs.load_data(config, chat, config.eval.path, once=True) if config.eval.path else None
    shape = inputs.check_model(config)
    data = inputs.add_teacher_prompts(config, chat, data, teacher_shape or shape)
    tool = building.start_tool(config, rank)
    try:
        device = building.device_of(config)
        policy, teacher, engine, kv_cache_bytes = building.build_policy(config, shape, device, chat, tool, progress)
        config, memory = building.plan_memory(config, shape, policy, kv_cache_bytes, teacher)
        yield Parts(
            config, shape, tokenizer, chat, data, eval_data, tool, policy, engine, building.sample_with(engine),
            memory, rank, world_size, teacher,
        )  # fmt: skip
    finally:
        if tool:
            tool.close()


def _evaluate(words: Sequence[str]) -> int:
    from evaluation.scores import table_lines, write_results
    from evaluation.treatments import Treatment, choose_checkpoint, run_treatments, treated
    from run.files import require_writable
    from run.ranks import Ranks

    args = arguments.evaluate_parser().parse_args(words)
    chosen = choose_checkpoint(args.config, args.set, args.checkpoint, args.run_dir, args.out)
    config, adapters = chosen.config, chosen.adapters
    tokenizer, shape = inputs.load_tokenizer(config), inputs.check_model(config, adapters)
    rank = int(os.environ.get("RANK", "0"))
    configs = {name: treated(config, name) for name in args.tools}
    chats = {name: inputs.load_chat(settings, tokenizer) for name, settings in configs.items()}
    data = {name: inputs.load_data(configs[name], chat, config.eval.path, once=True) for name, chat in chats.items()}
    if rank == 0:
        require_writable(chosen.out, OUT)
        if chosen.out.exists():
            say(f"note: this replaces the evaluation in {chosen.out}; name another file with --out to keep it")
    tool = building.start_tool(config, rank) if "on" in args.tools else None
    try:
        sample = building.build_samplers(configs, shape, building.device_of(config), chats, tool, adapters)
        found = run_treatments({
            name: Treatment(configs[name], data[name].problems, data[name].prompts, sample[name], chat.answer)
            for name, chat in chats.items()
        }, chosen.step, Ranks())  # fmt: skip
    finally:
        if tool:
            tool.close()
    if rank == 0:
        if adapters:
            found["settings"]["adapters"] = str(adapters)
        say(f"scores of {config.model.path}" + (f" with the LoRA adapters of {adapters}" if adapters else ""))
        try:
            say("\n".join(table_lines(found)))
        finally:  # a full disk takes one of the two at most
            write_results(chosen.out, found, OUT)
        say(f"written to {chosen.out}")
    return 0


def _audit(words: Sequence[str]) -> int:
    from audit.audit import audit, summary
    from report.runs import read_metrics
    from run.stretches import stretches

    args = arguments.audit_parser().parse_args(words)
    run_dir = run_folder.existing_run(args.run)
    read_metrics(run_dir)  # refuses a run that took no step
    counts: Counter[str] = Counter()
    problems: list[str] = []
    missing: list[str] = []
    for stretch in stretches(run_dir):  # each with its own chat format and tool
        config = parse_config(stretch.config)
        chat = inputs.load_chat(config, inputs.load_tokenizer(config))
        tool = None if args.no_tools else building.start_tool(config, rank=0)
        try:
            found = audit(run_dir, chat.answer, tool, stretch)
        finally:
            if tool:
                tool.close()
        counts.update(found[0])
        problems += found[1]
        missing += found[2]
    print("\n".join([*problems[:50], *missing, summary(counts, problems)]))
    return 1 if problems else 0


def _report(words: Sequence[str]) -> int:
    from report.page import write_report

    args = arguments.report_parser().parse_args(words)
    run_dir = run_folder.existing_run(args.run)
    tokenizer = inputs.load_tokenizer(load_config(run_dir / "config.json"))
    print(write_report(run_dir, tokenizer, args.out, args.trajectories))
    return 0


def _compare(words: Sequence[str]) -> int:
    from report.compare import compare

    args = arguments.compare_parser().parse_args(words)
    print(compare(Path(args.a), Path(args.b), args.last, args.out))
    return 0


def _replay(words: Sequence[str]) -> int:
    from audit import replay
    from modeling.loading import build_model
    from run.checkpoint import require_whole
    from run.stretches import settings_of
    from trainer import sampling_of

    args = arguments.replay_parser().parse_args(words)
    run_dir = run_folder.existing_run(args.run)
    row = replay.pick(run_dir, args.step, args.sample)
    config = parse_config(settings_of(run_dir, args.step))
    weights, adapters = replay.weights_before(config.model, run_dir, row["policy_step"])
    require_whole(adapters or Path(weights.path))
    tokenizer, shape = inputs.load_tokenizer(config), inputs.check_model(config, adapters)
    chat, tool = inputs.load_chat(config, tokenizer), building.start_tool(config, rank=0)
    try:
        model = build_model(weights, config.train.seed, building.device_of(config), adapters)
        again = building.build_again(config, shape, model, chat, tool, sampling_of(config))
        result = replay.replay(row, again.sample, again.force, tokenizer.decode)
    finally:
        if tool:
            tool.close()
    print("\n".join(result.lines))
    return 0 if result.equal else 1


SUBCOMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "check": _check, "evaluate": _evaluate, "audit": _audit, "report": _report, "compare": _compare,
    "replay": _replay,
}  # fmt: skip


if __name__ == "__main__":
    status = main()
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        sys.modules["torch.distributed"].destroy_process_group()
    sys.exit(status)
