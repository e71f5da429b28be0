"""The words that main.py understands: settings of a run, and the commands that look at one. Standard library only."""

from __future__ import annotations

import argparse

NAMES = ("audit", "report", "compare", "replay")


def train_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="main.py",
        description="Trains a tool-using language model with multi-turn GRPO, sampling from the weights it trains.",
        epilog="Start with: main.py --config configs/tiny_cpu.json (two minutes on a laptop, no download).",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="JSON settings, e.g. configs/tiny_cpu.json")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE",
        help="override one setting, e.g. --set train.steps=3; may be repeated",
    )  # fmt: skip
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is written; default: runs/<config name>")
    parser.add_argument("--resume", action="store_true", help="continue the run in DIR from its newest checkpoint")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it; we read LOCAL_RANK
    return parser


def look_parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="main.py", description="Looks at what a run left behind.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    audit = commands.add_parser(
        "audit", help="recompute what a run recorded",
        description="Recomputes a run's rewards, advantages and losses from its stored trajectories with separate "
        "code, and runs its tool calls again. Exit status 1 where anything differs.",
    )  # fmt: skip
    audit.add_argument("run", metavar="RUN", help="the run's folder")
    audit.add_argument("--no-tools", action="store_true", help="do not run the tool calls again")
    report = commands.add_parser(
        "report", help="one HTML file of a run",
        description="Writes one self-contained HTML file: curves, phases, rewards, evaluation, every trajectory.",
    )  # fmt: skip
    report.add_argument("run", metavar="RUN", help="the run's folder")
    report.add_argument("--out", metavar="FILE", help="default: report.html in the run's folder")
    report.add_argument(
        "--trajectories", type=int, default=10_000, metavar="N",
        help="most trajectories to carry; of a longer run evenly spaced steps are taken (default: %(default)s)",
    )  # fmt: skip
    compare = commands.add_parser(
        "compare", help="two runs side by side",
        description="Prints a paired table of two runs over their common steps, and writes it with curves as HTML.",
    )  # fmt: skip
    compare.add_argument("a", metavar="A", help="a run's folder")
    compare.add_argument("b", metavar="B", help="another's; differences are B - A")
    compare.add_argument(
        "--last", type=int, default=10, metavar="K", help="common steps to pair (default: %(default)s)"
    )
    compare.add_argument("--out", metavar="FILE", help="default: compare.html in B's folder")
    replay = commands.add_parser(
        "replay", help="sample one recorded trajectory again",
        description="Samples a recorded trajectory again from its checkpoint, with its tool calls, and compares. "
        "Where a draw differs, feeds the recorded ids to the model and shows the first differing draw and its margin. "
        "Exit status 1 where anything differs.",
    )  # fmt: skip
    replay.add_argument("run", metavar="RUN", help="the run's folder")
    replay.add_argument("--step", type=int, required=True, metavar="S", help="from 1, as in metrics.jsonl")
    replay.add_argument(
        "--sample", type=int, required=True, metavar="I", help="from 0: prompt x samples_per_prompt + sample"
    )  # fmt: skip
    return top
