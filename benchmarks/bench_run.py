"""A few whole steps of a config by main.py with random weights, on all ranks that a launcher starts.

    python benchmarks/bench_run.py --config configs/qwen3_4b_instruct_1gpu.json --run-dir RUN --cap 40
        --set train.steps=3 --set rollout.trajectories_per_step=16 --set rollout.max_new_tokens=1024
        --set rollout.max_turns=2
    PROGRAM=benchmarks/bench_run.py NUM_GPUS=8 bash scripts/qwen3_8b_8gpu.sh --run-dir RUN --cap 80
        --workload retool_256 --set train.steps=3 --set train.warmup_steps=0
    ... --run-dir RUN --workload retool_256 --set train.steps=4 --set train.warmup_steps=0 --resume --no-save
    ... --run-dir OTHER --workload retool_256 --like RUN --no-save        (on another number of ranks)

The shipped tiny tokenizer and problems replace those that would have to be fetched. Random weights answer nothing
right, so grades alternate within a group: rollout, update and optimizer do the full work. With --workload the
trajectories of a step are those of a file of benchmarks/workloads: its prompts, the lengths of its turns and the
latencies of its tool calls, whatever the policy samples. Without it they end where the random policy ends them.

--cap: on each rank's GPU a second process holds all other memory, so weights, cache, captured graphs and the
libraries' own buffers all count against the cap. --like: trains on the trajectories of another run, token for token,
and prints that run's losses and gradient norms beside its own.

Rank 0 prints a JSON line for each step and each checkpoint, and one for the whole.
Of each step: seconds of its phases (mean over ranks, and "slowest_"), seconds and tokens of the rollout on each rank,
its balance (the slowest rank over max(longest trajectory from its first draw, mean over ranks), the lower bound of any
distribution), maximum GPU memory so far and maximum host memory since the last checkpoint began on each rank, loss and
gradient norm. Of each checkpoint: seconds of each rank, and its host memory before and at most while it is written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import main as program
from benchmarks.machine import describe
from benchmarks.memory_watch import Cap, HostWatch
from benchmarks.run_watch import SaveWatch, StepWatch, alternate_grades, save_nothing, train_on
from benchmarks.scripted import ScriptedRun
from benchmarks.workload import Row, length_of, load_workload, scripted_ids, scripts_of
from config import Config, ConfigError
from data import Problem, TrainingData
from rollout.engine import RolloutEngine
from startup import inputs

STAND_INS = (
    "model.random_weights=true", "model.tokenizer_path=models/tiny_qwen3", "eval.path=",
    "data.path=models/tiny_qwen3/problems.jsonl",
)  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--run-dir", required=True, help="a new folder, or with --resume that of the run")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint; repeat the words")
    parser.add_argument("--workload", help="a file of benchmarks/workloads: the trajectories of a step")
    parser.add_argument("--shrink", type=int, default=1, help="the workload's lengths and latencies, divided by this")
    parser.add_argument("--like", type=Path, metavar="RUN", help="train on the trajectories of this run: no rollout")
    parser.add_argument("--no-save", action="store_true", help="no checkpoints: at 8B one takes 131 GB")
    parser.add_argument("--cap", type=float, default=None, help="GB of each GPU that are left free")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    return parser.parse_args()


def follow(rows: list[Row], samples: int) -> tuple[type[ScriptedRun], list[str]]:
    """Makes the trajectories those of the script. Returns its run type, and the settings that this needs."""

    def load_data(config: Config, *_: Any) -> TrainingData:
        longest, limit = max(map(length_of, rows)), config.rollout.context_length
        if longest > limit:
            fix = f"the workload has a trajectory of {longest} tokens; raise it, or --shrink the workload"
            raise ConfigError("rollout.context_length", limit, fix)
        lengths = {row["prompt"]: row["prompt_tokens"] for row in rows}
        problems = [Problem(f"scripted prompt {i}", "1", i + 1) for i in range(len(lengths))]
        return TrainingData(problems, [scripted_ids(lengths[i], i) for i in range(len(lengths))])

    inputs.load_data = load_data  # type: ignore[assignment]
    script = type("Run", (ScriptedRun,), {"scripts": scripts_of(rows)})
    RolloutEngine.run_type = script
    return script, [
        f"rollout.trajectories_per_step={len(rows)}", f"rollout.samples_per_prompt={samples}", "data.shuffle=false",
        "train.check=false",  # its probe is none of the script's trajectories
    ]  # fmt: skip


def main() -> int:
    options = parse()
    cap = Cap(options.cap) if options.cap else None
    alternate_grades()
    script, settings = None, [*STAND_INS, *options.set]
    if options.workload:
        script, needed = follow(*load_workload(options.workload, 1, options.shrink))
        settings += needed
    if options.like:
        train_on(options.like)
    host, started = HostWatch(), time.perf_counter()
    steps, saves = StepWatch(host, script, options.like), SaveWatch(host)
    if options.no_save:
        save_nothing()
    words = [word for text in settings for word in ("--set", text)]
    words += ["--resume"] if options.resume else []
    status = program.main(["--config", options.config, "--run-dir", options.run_dir, *words])
    found = {
        "benchmark": "run", "config": options.config, "workload": options.workload, "shrink": options.shrink,
        "settings": options.set, "status": status, **host.stop(), "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip
    report(found, options, steps, saves, cap)
    return status


def report(found: dict[str, Any], options: argparse.Namespace, steps: StepWatch, saves: SaveWatch, cap: Any) -> None:
    """Prints the JSON line of the whole run on rank 0. Collective if a step was taken and the run ended well."""
    mine = {"saves": saves.found, "gpu_free_gb": cap and cap.free_gb, "gpu_used_gb": cap and cap.used_gb()}
    parts = steps.ranks.gather(mine) if steps.ranks and found["status"] == 0 else [mine]
    if os.environ.get("RANK", "0") != "0":
        return
    if cap:
        found |= {name: [part[name] for part in parts] for name in ("gpu_free_gb", "gpu_used_gb")}
    checkpoints = [p for p in Path(options.run_dir).glob("checkpoints/*/**/*") if p.is_file()]
    saved = zip(*(part["saves"] for part in parts), strict=True)
    found |= {
        "ranks": int(os.environ.get("WORLD_SIZE", "1")), "like": options.like and str(options.like),
        "continued_after": steps.steps[0]["step"] - 1 if options.resume and steps.steps else None,
        "steps": steps.steps, "saves": [by_name(save) for save in saved],
        "checkpoint_gb": sum(p.stat().st_size for p in checkpoints) / 1e9,
        **describe(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    }  # fmt: skip
    print(json.dumps(found), flush=True)


def by_name(ranks: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Each figure of every rank, in rank order."""
    return {name: [round(one[name], 3) for one in ranks] for name in ranks[0]}


if __name__ == "__main__":
    code = main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(code)
