"""File size, writing time and loading time of the report.

    python benchmarks/bench_report.py --run RUN                  an existing run
    python benchmarks/bench_report.py --trajectories 10000       synthetic trajectories of --tokens tokens each

Prints one JSON line: seconds to write the page, its megabytes, and in headless Chromium the seconds until the first
group of trajectories is shown and until another step's is (median over 10 steps). Synthetic tokens follow Zipf's law
over the tokenizer's vocabulary and log-probabilities are mostly near 0; real text compresses better.
Needs Playwright and Debian's chromium (`pip install playwright`, `apt-get install chromium`).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from transformers import AutoTokenizer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from config import load_config  # noqa: E402
from report.page import write_report  # noqa: E402
from rollout.records import RolloutRecord, Scored, StopReason, ToolCall, Turn  # noqa: E402
from run.trajectories import write_step  # noqa: E402

PER_STEP, PER_PROMPT, TURNS = 128, 8, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="an existing run's folder")
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1000, help="of one trajectory, half of them sampled")
    parser.add_argument("--tokenizer", default=str(ROOT / "models/tiny_qwen3"))
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        run = args.run or make_run(Path(scratch), args.trajectories, args.tokens, len(tokenizer))
        out = Path(scratch) / "report.html"
        started = time.perf_counter()
        write_report(run, tokenizer, str(out), 10_000)
        written = time.perf_counter() - started
        figures = {"write_s": round(written, 2), "file_mb": round(out.stat().st_size / 1e6, 2)} | open_page(out)
    print(json.dumps({"run": str(args.run or f"{args.trajectories} x {args.tokens} tokens")} | figures))


def make_run(folder: Path, trajectories: int, tokens: int, vocabulary: int) -> Path:
    (folder / "trajectories").mkdir()
    config = load_config(ROOT / "configs/tiny_cpu.json")
    (folder / "config.json").write_text(config.to_json())
    draw = random.Random(0)
    ids = draw.choices(range(vocabulary), weights=[1 / (rank + 3) for rank in range(vocabulary)], k=1 << 20)
    lines = []
    for step in range(1, -(-trajectories // PER_STEP) + 1):
        records = [make_record(draw, ids, tokens, i) for i in range(PER_STEP)]
        scored = [Scored(record=r, reward=1.0, reason="correct", advantage=draw.gauss(0, 1)) for r in records]
        write_step(folder, step, records, scored, ["7"] * PER_STEP)
        row = {"step": step, "correct": draw.random(), "reward": draw.random(), "trajectories": PER_STEP,
               "reasons": {"correct": PER_STEP}, "seconds": 1.0}  # fmt: skip
        lines.append(json.dumps(row) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def make_record(draw: random.Random, ids: list[int], tokens: int, index: int) -> RolloutRecord:
    """TURNS turns of equal length, with prompt and tool results between them."""
    start = draw.randrange(len(ids) - tokens)
    part = tokens // (2 * TURNS)
    code = "".join(draw.choices("abcdefgh =+()\n", k=200))
    call = ToolCall(name="python", arguments={"code": code}, status="ok", text=code[:60], seed=1, wall_s=0.01)
    turns = tuple(
        Turn(start=(2 * i + 1) * part, end=(2 * i + 2) * part, ended=True, calls=(call,)) for i in range(TURNS)
    )
    sampled = [place // part % 2 == 1 and place < 2 * TURNS * part for place in range(tokens)]
    logprobs = [-(draw.random() ** 6) * 3 if drawn else 0.0 for drawn in sampled]
    return RolloutRecord(
        prompt_index=index // PER_PROMPT, sample_index=index % PER_PROMPT, policy_step=0,
        token_ids=tuple(ids[start : start + tokens]), sampled=tuple(sampled), logprobs=tuple(logprobs), turns=turns,
        stop=StopReason.ANSWERED,
    )  # fmt: skip


def open_page(path: Path) -> dict[str, float]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        started = time.perf_counter()
        page.goto(f"file://{path}")
        page.wait_for_selector(".trajectory")
        loaded = time.perf_counter() - started
        switches = []
        for step in page.locator("#step option").evaluate_all("all => all.map((one) => one.value)")[:10]:
            started = time.perf_counter()
            page.select_option("#step", step)
            page.wait_for_function(
                "(s) => document.querySelector('#found').textContent.startsWith(`step ${s}:`)", arg=step
            )
            switches.append(time.perf_counter() - started)
        browser.close()
    return {"load_s": round(loaded, 2), "other_step_s": round(statistics.median(switches), 3)}


if __name__ == "__main__":
    main()
