"""The command line, and the only place that constructs things (with startup/building.py).

    main.py --config FILE [--set section.field=value ...] [--run-dir DIR] [--resume]

trains; `check`, `evaluate`, `audit`, `report`, `compare`, `replay` and `settings` are its subcommands. Whatever can
be refused is refused before anything is written, the model is built or the GPU is touched: settings, data, prompts,
batch maths. Errors are one line on standard error and exit status 2.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH

from config import Config, UserError, load_config, parse_config, require_cuda_where_needed
from configs.schema import listing
from run.files import OUT, complain, open_standard_streams, say, sole_writer
from run.signals import Interruption, Stopped
from startup import arguments, building, inputs, run_folder
from startup.building import Parts, built
from startup.launch import check_launch
from startup.toolbox import started_own, started_tools

USER_ERROR_STATUS = 2


def main(argv: Sequence[str] | None = None) -> int:
    open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        check_launch(os.environ)
        if words and words[0] in SUBCOMMANDS:
            return SUBCOMMANDS[words[0]](words[1:])
        if words and not words[0].startswith("-"):
            raise UserError(f"{words[0]}: no such subcommand; known: {', '.join(SUBCOMMANDS)}; --config FILE trains")
        return _train(words)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "deepspeed"):
            raise
        complain(f"error: {error.name} is not installed; run `source .venv/bin/activate` (scripts/demo.sh creates it)")
    except Stopped as stopped:
        if _leads():
            say(str(stopped))
        return 0
    except UserError as error:
        if error.of_one_rank or _leads():
            complain(f"error: {error}")
    return USER_ERROR_STATUS


def _leads() -> bool:
    """Whether this is rank 0, which writes and prints."""
    return os.environ.get("RANK", "0") == "0"


def _train(words: Sequence[str]) -> int:
    args = arguments.train_parser().parse_args(words)
    config = load_config(args.config, args.set)
    run_dir = Path(args.run_dir or config.log.run_dir or f"runs/{Path(args.config).stem}")
    with contextlib.ExitStack() as held:  # until the run ends
        interruption = held.enter_context(Interruption(config.train.max_minutes, starting=True))
        if _leads() and args.resume and run_dir.is_dir():  # or a run that still writes would share its GPU
            held.enter_context(sole_writer(run_dir))
        _refuse_what_needs_a_gpu(args.config, args.set)
        config = run_folder.with_first_date(config, run_dir) if args.resume else config
        checkpoint = run_folder.check_run_dir(config, run_dir, args.resume)
        from run.console import open_console
        from run.trackers import check_trackers
        from run.writers import open_writer
        from startup.forecast import naming_the_setting

        check_trackers(config.log)
        console = held.enter_context(contextlib.closing(open_console(config.train.steps))) if _leads() else None
        parts = held.enter_context(built(config, console.progress if console else None))
        held.enter_context(naming_the_setting(parts.config))
        if console and config.train.check and not interruption.ends(lambda own: [own]):  # of this rank alone
            _require_health(parts)
        if _leads() and not args.resume:
            held.enter_context(sole_writer(run_dir))
            run_folder.check_run_dir(config, run_dir, resume=False)  # another run may have come and gone meanwhile
        files = run_folder.user_files([*parts.own.files, *([parts.scorer.file] if parts.scorer else [])])
        if checkpoint:
            run_folder.check_code(config, run_dir, files)
        writer = held.enter_context(contextlib.closing(open_writer(config, run_dir, console))) if console else None
        if writer:
            run_folder.keep_code(run_dir, files)
        from trainer import Trainer

        Trainer(parts, run_dir, writer).train(checkpoint, interruption)
    return 0


def _refuse_what_needs_a_gpu(path: str, overrides: Sequence[str]) -> None:
    import torch

    if not torch.cuda.is_available():
        require_cuda_where_needed(path, overrides)


def _require_health(parts: Parts) -> None:
    """Runs and prints the check, without the long mask. Raises CheckError where something fails."""
    from startup.check import check, require_pass

    findings = check(parts)
    say("\n".join(str(found) for found in findings if found.name != "mask"))
    require_pass(findings)


def _check(words: Sequence[str]) -> int:
    from startup.check import check

    args = arguments.check_parser().parse_args(words)
    with built(load_config(args.config, args.set)) as parts:
        findings = check(parts) if parts.rank == 0 else []
    if findings:
        say("\n".join(map(str, findings)))
    return int(any(found.state == "FAIL" for found in findings))


def _settings(words: Sequence[str]) -> int:
    args = arguments.settings_parser().parse_args(words)
    say("\n".join(listing(Config, args.section)))
    return 0


def _evaluate(words: Sequence[str]) -> int:
    from evaluation.scores import table_lines, write_results
    from evaluation.treatments import Treatment, choose_checkpoint, run_treatments, treated
    from run.files import require_writable
    from run.ranks import Ranks

    args = arguments.evaluate_parser().parse_args(words)
    chosen = choose_checkpoint(args.config, args.set, args.checkpoint, args.run_dir, args.out)
    config, adapters = chosen.config, chosen.adapters
    config = run_folder.with_first_date(config, Path(args.run_dir)) if args.run_dir else config
    tokenizer, shape = inputs.load_tokenizer(config), inputs.check_model(config, adapters)
    configs = {name: treated(config, name) for name in args.tools}
    with contextlib.ExitStack() as held:
        own = held.enter_context(started_own(config, wanted=args.tools != ["off"]))
        chats = {name: inputs.load_chat(settings, tokenizer, own.schema) for name, settings in configs.items()}
        data = {name: inputs.load_data(configs[name], c, config.eval.path, once=True) for name, c in chats.items()}
        if _leads():
            require_writable(chosen.out, OUT)
            if chosen.out.exists():
                say(f"note: this replaces the evaluation in {chosen.out}; name another file with --out to keep it")
        scorer = held.enter_context(building.started_reward(config))
        tool = held.enter_context(started_tools(config, own, wanted="on" in args.tools))
        sample = building.build_samplers(configs, shape, building.device_of(config), chats, tool, adapters)
        found = run_treatments({
            name: Treatment(configs[name], data[name].problems, data[name].prompts, sample[name], chat.answer,
                            building.build_grader(chat, scorer))
            for name, chat in chats.items()
        }, chosen.step, Ranks())  # fmt: skip
    if _leads():
        if adapters:
            found["settings"]["adapters"] = str(adapters)
        say(f"scores of {config.model.path}" + (f" with the LoRA adapters of {adapters}" if adapters else ""))
        try:
            say("\n".join(table_lines(found)))
        finally:  # a full disk stops one of the two at most
            write_results(chosen.out, found, OUT)
        say(f"written to {chosen.out}")
    return 0


def _audit(words: Sequence[str]) -> int:
    from audit.audit import audit, calling, summary
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
        with contextlib.ExitStack() as held:
            own = held.enter_context(started_own(config, beside=run_dir))
            chat = inputs.load_chat(config, inputs.load_tokenizer(config), own.schema)
            tool = held.enter_context(started_tools(config, own, wanted=not args.no_tools))
            scorer = held.enter_context(building.started_reward(config, beside=run_dir))
            again = calling(scorer.score, chat.answer) if scorer else None
            for file in run_folder.user_files([*own.files, *([scorer.file] if scorer else [])]):
                if run_folder.has_changed(run_dir, file):
                    missing.append(f"note: {file.path} has changed since the run; what it gives now is compared")
            found = audit(run_dir, chat.answer, tool, stretch, again)
        counts.update(found[0])
        problems += found[1]
        missing += found[2]
    say("\n".join([*problems[:50], *missing, summary(counts, problems)]))
    return 1 if problems else 0


def _report(words: Sequence[str]) -> int:
    from report.page import write_report

    args = arguments.report_parser().parse_args(words)
    run_dir = run_folder.existing_run(args.run)
    tokenizer = inputs.load_tokenizer(load_config(run_dir / "config.json"))
    say(write_report(run_dir, tokenizer, args.out, args.trajectories))
    return 0


def _compare(words: Sequence[str]) -> int:
    from report.compare import compare

    args = arguments.compare_parser().parse_args(words)
    say(compare(Path(args.a), Path(args.b), args.last, args.out))
    return 0


def _replay(words: Sequence[str]) -> int:
    from audit import replay
    from modeling.loading import build_model
    from run.checkpoint import require_whole
    from run.stretches import settings_of

    args = arguments.replay_parser().parse_args(words)
    run_dir = run_folder.existing_run(args.run)
    row = replay.pick(run_dir, args.step, args.sample)
    config = parse_config(settings_of(run_dir, args.step))
    weights, adapters = replay.weights_before(config.model, run_dir, row["policy_step"])
    require_whole(adapters or Path(weights.path))
    tokenizer, shape = inputs.load_tokenizer(config), inputs.check_model(config, adapters)
    with started_own(config, beside=run_dir) as own, started_tools(config, own) as tool:
        chat = inputs.load_chat(config, tokenizer, own.schema)
        model = build_model(weights, config.train.seed, building.device_of(config), adapters)
        again = building.build_again(config, shape, model, chat, tool)
        result = replay.replay(row, again.sample, again.force, lambda ids: str(tokenizer.decode(list(ids))))
    say("\n".join(result.lines))
    return 0 if result.equal else 1


SUBCOMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "check": _check, "evaluate": _evaluate, "audit": _audit, "report": _report, "compare": _compare,
    "replay": _replay, "settings": _settings,
}  # fmt: skip


if __name__ == "__main__":
    status = main()
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        sys.modules["torch.distributed"].destroy_process_group()
    sys.exit(status)
