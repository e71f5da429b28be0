"""A few whole steps of a config by main.py with random weights, on a GPU of which only so much is left free.

    python benchmarks/bench_run.py --config configs/qwen3_4b_instruct_1gpu.json --cap 40 --set train.steps=3
        --set rollout.trajectories_per_step=16 --set rollout.max_new_tokens=1024 --set rollout.max_turns=2

The shipped tiny tokenizer and problems stand in for those that would have to be fetched. Random weights answer nothing
right, so grades alternate within a group: rollout, update and optimizer do the full work. A second process holds the
rest of the GPU's memory, so weights, cache, captured graphs and the libraries' own buffers all count against the cap.
Prints a JSON line: seconds of each phase, the most GPU memory in use, the most host memory, and of each checkpoint the
seconds and what it added to the process's own memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import checkpoint
import main as program
import trainer
from reward import Grade, Reason

STAND_INS = (
    "model.random_weights=true", "model.tokenizer_path=models/tiny_qwen3", "eval.path=",
    "data.path=models/tiny_qwen3/problems.jsonl",
)  # fmt: skip
# Holds all but `cap` bytes of the device, then watches what is free until its input ends; prints the least.
HOLDER = """
import sys, threading, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(float(sys.argv[1]) * 1e9)), dtype=torch.int8, device="cuda")
least = start = torch.cuda.mem_get_info()[0]
print(start, flush=True)
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
while not over.wait(0.02):
    least = min(least, torch.cuda.mem_get_info()[0])
print(start - least, flush=True)
"""


class HostWatch:
    """The most host memory in use while it runs: of the whole machine against its start, and of this process."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._start = self._least = _available()
        self._most = _resident()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            self._least = min(self._least, _available())
            self._most = max(self._most, _resident())

    def begin(self) -> float:
        """GB resident now, from which on the most is taken anew."""
        self._most = _resident()
        return self._most / 1e9

    @property
    def most(self) -> float:
        """GB resident at most since `begin`."""
        return self._most / 1e9

    def stop(self) -> dict[str, float]:
        self._over.set()
        self._thread.join()
        return {"host_used_gb": (self._start - self._least) / 1e9}


def _resident() -> int:
    """Bytes of this process's own; pages of mapped files do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024


def alternate_grades() -> None:
    """Every other trajectory counts as right, so that no group is equal."""
    turn = iter(range(1 << 60))

    def grade(*_: object) -> Grade:
        right = next(turn) % 2 == 0
        return Grade(right, Reason.CORRECT if right else Reason.NO_BOX)

    trainer.grade_trajectory = grade


def time_saves(host: HostWatch) -> list[dict[str, float]]:
    """Of each checkpoint the seconds of writing it, its checksums included, and the host memory before and at most
    meanwhile; filled, and printed, as they are written."""
    write, saves = checkpoint.CheckpointStore._write, []

    def timed(store: checkpoint.CheckpointStore) -> None:
        started, before = time.perf_counter(), host.begin()
        write(store)
        saves.append({"seconds": time.perf_counter() - started, "resident_gb": before, "most_gb": host.most})
        print(json.dumps({"save": saves[-1]}), flush=True)

    checkpoint.CheckpointStore._write = timed  # type: ignore[method-assign]
    return saves


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--run-dir", required=True, help="a new folder")
    parser.add_argument("--cap", type=float, default=None, help="GB of the GPU that are left free")
    options = parser.parse_args()
    holder = None
    if options.cap:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(options.cap)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout
        print(f"free on the GPU: {int(holder.stdout.readline()) / 1e9:.2f} GB", flush=True)
    alternate_grades()
    host, started = HostWatch(), time.perf_counter()
    saves = time_saves(host)
    words = [word for text in (*STAND_INS, *options.set) for word in ("--set", text)]
    status = program.main(["--config", options.config, "--run-dir", options.run_dir, *words])
    found = {"benchmark": "run", "config": options.config, "settings": options.set, "status": status, **host.stop()}
    found["seconds"] = time.perf_counter() - started
    if holder:
        found["gpu_used_gb"] = int(holder.communicate()[0]) / 1e9
    lines = (Path(options.run_dir) / "metrics.jsonl").read_text().splitlines() if status == 0 else []
    names = ("seconds", "seconds_rollout", "seconds_update", "seconds_save", "peak_memory_gb", "sampled_tokens")
    found["steps"] = [{name: json.loads(line).get(name) for name in names} for line in lines]
    checkpoints = [p for p in Path(options.run_dir).glob("checkpoints/*/**/*") if p.is_file()]
    found["saves"] = saves
    found["checkpoint_gb"] = sum(p.stat().st_size for p in checkpoints) / 1e9
    print(json.dumps(found), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
