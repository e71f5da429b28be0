"""Whole GRPO steps of TRL over a scripted workload of one turn, as `bench_run.py` takes ours.

    python benchmarks/peers/trl_step.py --generation vllm --tokenizer FOLDER
    python benchmarks/peers/trl_step.py --generation batching --tokenizer FOLDER

Needs requirements/peers.txt in an environment of its own, and one GPU. `vllm`: vLLM in the same process, on the same
GPU; `batching`: the continuous batching of transformers. Every sequence has the workload's lengths (stop tokens are
ignored), rewards are random, so no group is equal. Weights are random, bf16; they are written once, to --model.
A prompt is text that the tokenizer turns into exactly the scripted number of tokens.
Prints one JSON line a step: seconds of the whole, of generation (weight transfer included) and of the rest.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.peers.shared import needed, shape_folder, stay_offline, versions
from benchmarks.workload import Row, WorkloadError, load_workload


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generation", choices=["vllm", "batching"], required=True)
    parser.add_argument("--shape", default="Qwen3-0.6B", help="a folder of models/shapes, or any with config.json")
    parser.add_argument("--tokenizer", required=True, help="a folder with the shape's tokenizer")
    parser.add_argument("--model", type=Path, default=Path("runs/peers_model"), help="where random weights are kept")
    parser.add_argument("--workload", default="one_turn_64", help="one turn, all lengths alike")
    parser.add_argument("--steps", type=int, default=4, help="the first warms up")
    parser.add_argument("--micro", type=int, default=8, help="sequences of a forward and backward pass")
    parser.add_argument("--memory", type=float, default=0.4, help="the generator's share of GPU memory")
    parser.add_argument("--dtype", default="bfloat16", help="of the trained weights; TRL's own default is float32")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--keep-activations", action="store_true", help="no gradient checkpointing")
    parser.add_argument("--sleep", action="store_true", help="vLLM's sleep mode")
    return parser.parse_args(words)


def lengths_of(rows: list[Row]) -> tuple[int, int]:
    """Prompt and response tokens, the same for every trajectory."""
    found = {(row["prompt_tokens"], tuple(turn["new_tokens"] for turn in row["turns"])) for row in rows}
    [(prompt, turns), *others] = sorted(found)
    if others or len(turns) != 1:
        raise WorkloadError("turns", sorted(map(str, found))[:3], "TRL takes one turn and equal lengths: one_turn_64")
    return prompt, turns[0]


def now() -> float:
    torch = needed("torch")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def prompts(tokenizer: Any, count: int, tokens: int) -> list[dict[str, str]]:
    """Texts of random words that the tokenizer turns into exactly `tokens` tokens."""
    generator = random.Random(0)
    words = [tokenizer.decode([i]) for i in range(1000, 20000)]
    words = [word for word in words if word.startswith(" ") and word[1:].isalpha() and word.isascii()]
    found: list[dict[str, str]] = []
    while len(found) < count:
        text = "".join(generator.choice(words) for _ in range(2 * tokens))
        ids = tokenizer(text)["input_ids"][:tokens]
        text = tokenizer.decode(ids)
        if tokenizer(text)["input_ids"] == ids:
            found.append({"prompt": text})
    return found


def write_weights(folder: Path, shape: Path, tokenizer: Any) -> None:
    """Random weights of the shape in `folder`, unless they are there."""
    if (folder / "model.safetensors").is_file():
        return
    torch, transformers = needed("torch"), needed("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(shape)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def settings(options: argparse.Namespace, samples: int, batch: int, prompt: int, new: int) -> dict[str, Any]:
    """Words of `GRPOConfig`: on-policy, no KL term, token-level loss, one optimizer step a rollout."""
    cuda = needed("torch").cuda.is_available()
    common = {
        "output_dir": "runs/peers_trl", "per_device_train_batch_size": options.micro,
        "gradient_accumulation_steps": batch // options.micro, "num_generations": samples,
        "generation_batch_size": batch, "max_completion_length": new, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        "beta": 0.0, "loss_type": "dapo", "learning_rate": 1e-6, "optim": "adamw_torch_fused", "bf16": cuda,
        "use_cpu": not cuda, "max_steps": options.steps, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "gradient_checkpointing": not options.keep_activations, "seed": 0, "disable_tqdm": True,
        "model_init_kwargs": {"dtype": options.dtype, "attn_implementation": options.attention},
    }  # fmt: skip
    if options.generation == "vllm":
        return common | {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": options.memory,
            "vllm_max_model_length": prompt + new, "vllm_enable_sleep_mode": options.sleep,
            "generation_kwargs": {"ignore_eos": True},
        }  # fmt: skip
    return common | {
        "use_transformers_continuous_batching": True, "generation_kwargs": {"eos_token_id": -1},
        "transformers_continuous_batching_config": {"max_memory_percent": options.memory},
    }  # fmt: skip


def timed_trainer(figures: dict[str, Any]) -> type:
    """A `GRPOTrainer` that adds the seconds and lengths of its generations to `figures`."""

    class Timed(needed("trl").GRPOTrainer):
        def _generate(self, *words: Any, **named: Any) -> Any:
            started = now()
            result = super()._generate(*words, **named)
            figures["generation"] += now() - started
            return result

        def _generate_single_turn(self, *words: Any, **named: Any) -> Any:
            result = super()._generate_single_turn(*words, **named)
            figures["lengths"] += [len(ids) for ids in result[0]]
            return result

    return Timed


def clock(figures: dict[str, Any], options: argparse.Namespace) -> Any:
    """A callback that prints a line a step."""
    torch = needed("torch")

    class Clock(needed("transformers").TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            figures.update(generation=0.0, lengths=[], started=now())

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            seconds, lengths = now() - figures["started"], figures["lengths"]
            peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
            print(json.dumps({
                "benchmark": "step", "engine": f"trl-{options.generation}", "shape": options.shape,
                "workload": options.workload, "step": state.global_step, "seconds": round(seconds, 3),
                "generation": round(figures["generation"], 3), "rest": round(seconds - figures["generation"], 3),
                "trajectories": len(lengths), "shortest": min(lengths, default=0), "longest": max(lengths, default=0),
                "peak_allocated_gb": peak and round(peak, 1), **versions("trl", "torch", "transformers"),
            }), flush=True)  # fmt: skip

    return Clock()


def random_rewards(completions: list[Any], **_: Any) -> list[float]:
    return [random.random() for _ in completions]


def main() -> None:
    options = parse()
    rows, samples = load_workload(options.workload)
    prompt, new = lengths_of(rows)
    if options.micro < 1 or len(rows) % options.micro:
        raise SystemExit(f"error: --micro is {options.micro}: it must divide the {len(rows)} trajectories of a step")
    shape = shape_folder(options.shape)
    stay_offline()
    trl, transformers, datasets = needed("trl"), needed("transformers"), needed("datasets")
    if options.generation == "vllm":
        needed("vllm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.tokenizer)
    write_weights(options.model, shape, tokenizer)
    data = datasets.Dataset.from_list(prompts(tokenizer, len(rows) // samples * options.steps, prompt))
    config = trl.GRPOConfig(**settings(options, samples, len(rows), prompt, new))
    figures: dict[str, Any] = {"generation": 0.0, "lengths": []}
    trainer = timed_trainer(figures)(
        model=str(options.model), args=config, train_dataset=data, processing_class=tokenizer,
        reward_funcs=random_rewards, callbacks=[clock(figures, options)],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
