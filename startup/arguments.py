"""What the command line accepts: one parser for each subcommand of main.py. Standard library only."""

from __future__ import annotations

import argparse

from config import VERSION


def train_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="main.py",
        description="Trains a tool-using language model with multi-turn GRPO, sampling from the weights it trains.",
        epilog="Start with: main.py --config configs/tiny_cpu.json (a minute on a laptop, no download). "
        "Subcommands, each with --help: check, evaluate, audit, report, compare, replay, settings.",
    )
    parser.add_argument("--version", action="version", version=f"agentic-grpo {VERSION}")
    _add_config(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is written; default: runs/<config name>")
    parser.add_argument("--resume", action="store_true", help="continue the run in DIR from its newest checkpoint")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it; we read LOCAL_RANK
    return parser


def check_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="main.py check",
        description="Builds a run and checks it: prompt, mask, stop tokens, grading, tool, memory, time, "
        "log-probabilities. Nothing is trained or written. Exit status 1 where a line fails.",
    )
    _add_config(parser)
    return parser


def evaluate_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="main.py evaluate",
        description="Scores a checkpoint on eval.path with intervals over problems, with the tool on, off (none in "
        "the prompt, one turn) and broken (every call fails), and compares the first with the others.",
    )
    _add_config(parser, required=False)
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="model folder, or one of LoRA adapters; default: model.path"
    )
    parser.add_argument(
        "--run-dir", metavar="RUN", help="take the newest checkpoint of RUN and, without --config, its config"
    )
    parser.add_argument("--tools", nargs="+", choices=["on", "off", "broken"], default=["on"], help="default: on")
    parser.add_argument(
        "--out", metavar="FILE", help="default: evaluations/step_N_tools.json in RUN, or runs/evaluation.json"
    )
    return parser


def audit_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="main.py audit",
        description="Recomputes a run's rewards, advantages and losses from its stored trajectories with separate "
        "code, and runs its tool calls again. Exit status 1 where anything differs.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("--no-tools", action="store_true", help="do not run the tool calls again")
    return parser


def report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="main.py report",
        description="Writes one self-contained HTML file: curves, phases, rewards, evaluation, every trajectory.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("--out", metavar="FILE", help="default: report.html in the run's folder")
    parser.add_argument(
        "--trajectories", type=_count, default=10_000, metavar="N",
        help="most trajectories to carry; of a longer run evenly spaced steps are taken (default: %(default)s)",
    )  # fmt: skip
    return parser


def compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="main.py compare",
        description="Prints a paired table of two runs over their common steps, and writes it with curves as HTML.",
    )
    parser.add_argument("a", metavar="A", help="a run's folder")
    parser.add_argument("b", metavar="B", help="another's; differences are B - A")
    parser.add_argument(
        "--last", type=_count, default=10, metavar="K", help="common steps to pair (default: %(default)s)"
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="default: compare.html in B's folder")
    return parser


def replay_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="main.py replay",
        description="Samples a recorded trajectory again from its checkpoint, with its tool calls, and compares. "
        "Where a draw differs, feeds the recorded ids to the model and shows the first differing draw and its margin. "
        "Exit status 1 where anything differs.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("--step", type=int, required=True, metavar="S", help="from 1, as in metrics.jsonl")
    parser.add_argument(
        "--sample", type=int, required=True, metavar="I", help="from 0: prompt x samples_per_prompt + sample"
    )  # fmt: skip
    return parser


def settings_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="main.py settings",
        description="Prints every setting on one line: name, default, what it does and the values it takes.",
    )
    parser.add_argument("section", nargs="?", metavar="SECTION", help="of this section alone, e.g. rollout")
    return parser


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1")
    return int(word)


def _add_config(parser: argparse.ArgumentParser, required: bool = True) -> None:
    parser.add_argument("--config", required=required, metavar="FILE", help="settings, e.g. configs/tiny_cpu.json")
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="SECTION.FIELD=VALUE",
        help="override settings, e.g. --set train.steps=3 train.seed=1; may be repeated",
    )  # fmt: skip
