"""vLLM over a scripted workload, as `bench_rollout.py` drives our engine.

    python benchmarks/peers/vllm_rollout.py --shape Qwen3-0.6B --workload retool_64 --repeat 3
    python benchmarks/peers/vllm_rollout.py --shape Qwen3-4B-Instruct-2507 --workload retool_64 --repeat 2
    python benchmarks/peers/vllm_rollout.py --shape Qwen3-0.6B --workload prompts_64 --repeat 3

Needs requirements/peers.txt in an environment of its own, and one GPU. vLLM runs at its best here: engine in its own
process, asynchronous scheduling, prefix caching, CUDA graphs, log-probs of the sampled tokens. Weights are random
(`load_format=dummy`), bf16. All trajectories are submitted at once. When a turn ends, its tool latency passes and the
whole sequence is submitted again with the tool result; the prefix cache holds what was read before. Seconds run from
the first submission to the last token. The prefix cache is emptied before each repetition.
Prints one JSON line a repetition.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.peers.shared import needed, prompts_and_results, shape_folder, stay_offline, versions, vocabulary_of
from benchmarks.workload import Row, load_workload

WARM_PROMPT, WARM_TOKENS = 64, 16


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen3-0.6B", help="a folder of models/shapes, or any with config.json")
    parser.add_argument("--workload", default="retool_64")
    parser.add_argument("--tools", choices=["latency", "instant"], default="latency")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=None, help="max_num_seqs; default: all trajectories")
    parser.add_argument("--context", type=int, default=8320, help="max_model_len")
    parser.add_argument("--step-tokens", type=int, default=8192, help="max_num_batched_tokens; 8192 is an H200's own")
    parser.add_argument("--memory", type=float, default=0.8, help="gpu_memory_utilization")
    parser.add_argument("--no-logprobs", action="store_true")
    parser.add_argument("--eager", action="store_true", help="no compiling and no CUDA graphs: a quick trial")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    if options.repeat < 1:
        parser.error(f"--repeat is {options.repeat}: use at least 1")
    return options


class Driver:
    """Runs trajectories through one `AsyncLLM`."""

    def __init__(self, engine: Any, options: argparse.Namespace):
        self._engine, self._options = engine, options
        self._tokens = 0

    def _sampling(self, count: int) -> Any:
        params = needed("vllm.sampling_params")
        return params.SamplingParams(
            temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=count, detokenize=False, flat_logprobs=True,
            logprobs=None if self._options.no_logprobs else 0, output_kind=params.RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    async def _turn(self, name: str, sequence: list[int], count: int) -> list[int]:
        """Ids of one turn of exactly `count` tokens."""
        last = None
        async for output in self._engine.generate({"prompt_token_ids": sequence}, self._sampling(count), name):
            last = output.outputs[0]
        if last is None or len(last.token_ids) != count:
            raise SystemExit(f"error: turn {name} has {last and len(last.token_ids)} tokens: {count} were scripted")
        if not self._options.no_logprobs and len(last.logprobs or ()) != count:
            raise SystemExit(f"error: turn {name} came without its log-probs: use --no-logprobs")
        self._tokens += count
        return list(last.token_ids)

    async def _trajectory(self, name: str, row: Row, prompt: list[int], results: list[list[int]]) -> None:
        sequence = list(prompt)
        for index, (turn, result) in enumerate(zip(row["turns"], results, strict=True)):
            sequence += await self._turn(f"{name}-{index}", sequence, turn["new_tokens"])
            if self._options.tools == "latency" and turn.get("tool_seconds"):
                await asyncio.sleep(turn["tool_seconds"])
            sequence += result

    async def sweep(self, name: str, rows: list[Row], tokens: list[tuple[list[int], list[list[int]]]]) -> float:
        """Seconds from the first submission to the last token of all trajectories."""
        self._tokens, started = 0, time.perf_counter()
        jobs = [self._trajectory(f"{name}-{i}", row, *tokens[i]) for i, row in enumerate(rows)]
        await asyncio.gather(*jobs)
        return time.perf_counter() - started

    async def warm_up(self, rows: list[Row], tokens: list[tuple[list[int], list[list[int]]]]) -> None:
        short = [row | {"turns": [{"new_tokens": WARM_TOKENS}]} for row in rows]
        await self.sweep("warm", short, [(prompt[:WARM_PROMPT], [[]]) for prompt, _ in tokens])

    async def forget(self) -> None:
        """Empties the prefix cache, which waits until no request holds a block."""
        for _ in range(50):
            if await self._engine.reset_prefix_cache():
                return
            await asyncio.sleep(0.1)
        raise SystemExit("error: the prefix cache cannot be emptied: end the process and try again")

    @property
    def tokens(self) -> int:
        """Sampled tokens of the last sweep."""
        return self._tokens


async def drive(options: argparse.Namespace, rows: list[Row], folder: Path) -> None:
    arguments = needed("vllm.engine.arg_utils").AsyncEngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", seed=options.seed,
        max_model_len=options.context, max_num_seqs=options.sequences or len(rows), enable_prefix_caching=True,
        max_num_batched_tokens=options.step_tokens, gpu_memory_utilization=options.memory, async_scheduling=True,
        enforce_eager=options.eager, generation_config="vllm", disable_log_stats=True,
    )  # fmt: skip
    engine = needed("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(arguments)
    tokens = prompts_and_results(rows, vocabulary_of(folder), options.seed + 1)
    driver = Driver(engine, options)
    try:
        await driver.warm_up(rows, tokens)
        for repetition in range(options.repeat):
            await driver.forget()
            seconds = await driver.sweep(f"r{repetition}", rows, tokens)
            print(json.dumps(line(options, driver.tokens, seconds) | {"repetition": repetition}), flush=True)
    finally:
        engine.shutdown()


def line(options: argparse.Namespace, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "benchmark": "rollout", "engine": "vllm", "shape": options.shape, "workload": options.workload,
        "tools": options.tools, "logprobs": not options.no_logprobs, "graphs": not options.eager,
        "seconds": round(seconds, 3), "sampled_tokens": tokens, "tokens_per_second": round(tokens / seconds),
        **versions("vllm", "torch", "transformers"),
    }  # fmt: skip


def main() -> None:
    options = parse()
    rows, _ = load_workload(options.workload, context=options.context)
    folder = shape_folder(options.shape)
    stay_offline()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    needed("vllm")
    asyncio.run(drive(options, rows, folder))


if __name__ == "__main__":  # the engine's process imports this file again
    main()
