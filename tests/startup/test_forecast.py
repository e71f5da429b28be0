"""The memory forecast against tensors that really exist."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from config import load_config
from decode.cache import PagedCache
from policy import BUCKET_ELEMENTS
from startup.building import plan_memory
from startup.forecast import (
    MOST_TOKENS,
    STEP,
    OutOfMemory,
    forecast,
    micro_batch_tokens,
    naming_the_setting,
    teacher_memory,
)  # fmt: skip
from tests.support.taught import taught

ROOT = Path(__file__).parents[2]
SETTINGS = ("train.max_tokens_per_micro_batch=8192", "model.gradient_checkpointing=true")
CONFIG = load_config(ROOT / "configs/qwen3_8b_8gpu.json", SETTINGS)
SHAPE = AutoConfig.from_pretrained(ROOT / "models/shapes/Qwen3-8B")
PARAMETERS = 8_190_735_360


def changed(**sections):
    return dataclasses.replace(
        CONFIG, **{name: dataclasses.replace(getattr(CONFIG, name), **values) for name, values in sections.items()}
    )


def test_model_states_are_those_of_zero_2_in_bf16():
    one, eight = (forecast(CONFIG, SHAPE, PARAMETERS, 0, ranks) for ranks in (1, 8))
    assert one.weights == eight.weights == 2 * PARAMETERS
    assert (one.gradients, one.optimizer) == (6 * PARAMETERS, 12 * PARAMETERS)
    assert eight.gradients == pytest.approx(one.gradients / 8, rel=1e-6)
    assert eight.optimizer == pytest.approx(one.optimizer / 8, rel=1e-6)
    assert one.device == one.weights + one.gradients + one.optimizer + one.update


def test_only_what_trains_has_gradients_and_moments():
    whole, adapters = (forecast(CONFIG, SHAPE, PARAMETERS, 0, 1, trained=count) for count in (None, 10**6))
    assert adapters.weights == whole.weights
    assert (adapters.gradients, adapters.optimizer) == (6 * 10**6, 12 * 10**6)


BESIDE = 3e9  # the CUDA context and captured graphs; bench_decode.py measured less


@pytest.mark.parametrize(
    ("config", "shape", "gigabytes", "spare"),  # spare: what torch's allocator and NCCL may take beside
    [("qwen3_8b_8gpu", "Qwen3-8B", 80, 7), ("gpt_oss_20b_8gpu", "gpt-oss-20b", 141, 2),
     ("gpt_oss_20b_gsm8k_8gpu", "gpt-oss-20b", 141, 2)],
)  # fmt: skip
def test_the_shipped_configs_for_eight_gpus_fit_those_the_readme_names(config, shape, gigabytes, spare):
    """All of it at once: states, cache, buckets of gradients, and one micro-batch of which no layer is kept."""
    settings = load_config(ROOT / f"configs/{config}.json")
    form = AutoConfig.from_pretrained(ROOT / f"models/shapes/{shape}")
    with torch.device("meta"):
        sizes = [p.numel() for p in AutoModelForCausalLM.from_config(form).parameters()]
    weights = 2 * sum(sizes)
    fp32_part = 4 * sum(sizes) / 8
    free = gigabytes * 1e9 - BESIDE - weights - fp32_part  # where `num_pages` measures it: the engine is built
    most = settings.rollout.trajectories_per_step * settings.rollout.context_length
    cache = min(settings.rollout.kv_memory_fraction * free, most * PagedCache.bytes_per_token(form, torch.bfloat16))
    buckets = 3 * 4 * BUCKET_ELEMENTS + 10 * max(sizes)  # as `Policy._gradient_bytes` counts them
    if settings.train.max_tokens_per_micro_batch == "auto":
        least = {"max_tokens_per_micro_batch": micro_batch_tokens(settings, form, room=0)}
        settings = dataclasses.replace(settings, train=dataclasses.replace(settings.train, **least))
    memory = forecast(settings, form, sum(sizes), int(cache), 8, room=0)
    assert memory.kept_layers == 0 and memory.weights == weights
    assert memory.device + buckets + BESIDE <= (gigabytes - spare) * 1e9


def test_offload_moves_the_optimizer_to_the_host():
    kept, moved = (forecast(changed(train={"offload_optimizer": o}), SHAPE, PARAMETERS, 0, 1) for o in (False, True))
    assert kept.device - moved.device == moved.host == 12 * PARAMETERS
    assert kept.host == 0


def test_checkpointing_and_smaller_micro_batches_save_activations():
    plain = forecast(changed(model={"gradient_checkpointing": False}), SHAPE, PARAMETERS, 0, 1).update
    saved = forecast(CONFIG, SHAPE, PARAMETERS, 0, 1).update
    more = forecast(changed(train={"max_tokens_per_micro_batch": 16384}), SHAPE, PARAMETERS, 0, 1).update
    assert saved < more < plain


def test_activations_of_a_layer_are_about_what_autograd_keeps():
    """Measured: bytes that autograd saves in a forward without checkpointing, on the tiny model."""
    folder = ROOT / "models/tiny_qwen3"
    config = load_config(ROOT / "configs/tiny_cpu.json")
    tokens = 512
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_tokens_per_micro_batch=tokens))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    seen: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model.base_model(torch.randint(0, 300, (1, tokens)), use_cache=False)
    assert kept is not None
    logits = 3 * 4 * tokens * model.config.vocab_size
    estimate = forecast(config, model.config, model.num_parameters(), 0, 1).update - logits
    assert estimate == pytest.approx(sum(seen.values()), rel=0.5)


def test_auto_takes_the_tokens_whose_activations_all_fit_and_one_row_at_least():
    auto = changed(train={"max_tokens_per_micro_batch": "auto"}, model={"gradient_checkpointing": "auto"})
    layers = SHAPE.num_hidden_layers
    counts = [micro_batch_tokens(auto, SHAPE, int(room * 1e9)) for room in (1, 20, 40, 80, 1000)]
    assert counts == sorted(counts)
    assert counts[0] == auto.rollout.context_length
    assert counts[-1] == MOST_TOKENS
    tokens = micro_batch_tokens(auto, SHAPE, 60 * 10**9)
    resolved = changed(train={"max_tokens_per_micro_batch": tokens}, model={"gradient_checkpointing": "auto"})
    memory = forecast(resolved, SHAPE, PARAMETERS, 0, 8, 60 * 10**9)
    assert memory.kept_layers == layers and 50e9 < memory.update <= 60e9


def test_auto_counts_on_the_memory_that_the_policy_finds_free():
    class Roomy:
        model, world_size = AutoModelForCausalLM.from_pretrained(ROOT / "models/tiny_qwen3").requires_grad_(False), 1

        def update_room(self) -> int:
            return 20 * 10**9

    auto = {"train": {"max_tokens_per_micro_batch": "auto"}, "model": {"gradient_checkpointing": "auto"}}
    config, memory = plan_memory(changed(**auto), SHAPE, Roomy(), 40 * 10**9)
    assert memory.weights > 0 == memory.gradients  # nothing of this model trains
    assert config.micro_batch_tokens == micro_batch_tokens(changed(**auto), SHAPE, 20 * 10**9)


SMALL = AutoConfig.from_pretrained(ROOT / "models/shapes/Qwen3-0.6B")
TEACHER = AutoConfig.from_pretrained(ROOT / "models/shapes/Qwen3-4B-Instruct-2507")
TAUGHT = 4_022_468_096  # its parameters
HEAD = 2 * 151_936 * 2560
NOTHING = {"resident": 0, "host": 0, "lent": 0, "kept": 0}


def teaches(ranks: int = 1, on_gpu: bool = True, rank: int = 0, **teacher):
    settings = {"teacher": {"path": "t"} | teacher, "lora": {"rank": rank}, "loss": {"distill_weight": 1.0}}
    return teacher_memory(changed(**settings), TEACHER, TAUGHT, ranks, on_gpu)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"placement": "gpu"}, {"resident": 2 * TAUGHT}),
        ({"placement": "offload"}, {"host": 2 * TAUGHT, "lent": 2 * TAUGHT, "kept": HEAD}),
        ({"placement": "offload", "on_gpu": False}, {"resident": 2 * TAUGHT}),
        ({"placement": "zero3", "ranks": 8}, {"resident": HEAD, "host": TAUGHT // 4, "lent": 2 * 10**9}),
        ({"source": "base", "path": ""}, {"host": 2 * TAUGHT, "lent": 2 * TAUGHT, "kept": HEAD}),
        ({"source": "base", "path": "", "rank": 4}, {}),
        ({"source": "live", "path": "", "privilege": "p"}, {"lent": HEAD, "kept": HEAD}),
        ({"source": "ema", "path": ""}, {"host": 4 * TAUGHT, "lent": 2 * TAUGHT, "kept": HEAD}),
        ({"source": "ema", "path": "", "placement": "gpu"},
         {"resident": 4 * TAUGHT, "lent": 2 * TAUGHT, "kept": HEAD}),
    ],
)  # fmt: skip
def test_a_teachers_weights_are_counted_where_they_wait_and_where_they_come_to(settings, parts):
    memory = teaches(**settings)
    assert {name: getattr(memory, name) for name in NOTHING} == NOTHING | parts


def test_a_teachers_pass_has_a_peak_of_its_own_beside_the_updates():
    config = load_config(ROOT / "configs/smoke_qwen3_0.6b.json", SETTINGS)
    plain = forecast(config, SMALL, 596_049_920, 0, 1)
    small, resident, lent = (forecast(config, SMALL, 596_049_920, 0, 1, teacher=t) for t in (
        dataclasses.replace(teaches(placement="gpu"), resident=0), teaches(placement="gpu"), teaches(),
    ))  # fmt: skip
    logits = small.update - plain.update  # a chunk of the teacher's beside the policy's
    assert 0 < logits < 0.5e9 and small.device == plain.device + logits
    assert resident.device == small.device + 2 * TAUGHT
    assert lent.update == small.update + HEAD
    states = lent.weights + lent.optimizer
    assert lent.teacher_pass > lent.update + lent.gradients
    assert lent.device == states + lent.teacher_pass and lent.host == 2 * TAUGHT
    assert dataclasses.replace(lent, kv_cache=10**9).device == lent.device + 10**9
    assert (
        f"teacher's weights 0.00 and 8.04 on the host, its pass before the update {lent.teacher_pass / 1e9:.2f}"
        in str(lent)
    )
    assert "teacher" not in str(plain)


@pytest.mark.parametrize("divergence", ["reverse_kl", "sampled"])
def test_a_teachers_pass_takes_about_what_it_took_on_an_h200(divergence):
    """17.9 GB at most, of a 4B teacher over micro-batches of 16,384 tokens: benchmarks/RESULTS.md."""
    words = ["train.max_tokens_per_micro_batch=16384", "rollout.kv_tokens=8192"]
    config = load_config(ROOT / "configs/smoke_qwen3_0.6b.json", words)
    memory = forecast(config, SMALL, 596_049_920, 0, 1, teacher=teaches(divergence=divergence))
    assert memory.weights + memory.optimizer + memory.teacher_pass == pytest.approx(17.9e9, rel=0.1)
    assert (memory.update == forecast(config, SMALL, 596_049_920, 0, 1).update) is (divergence == "sampled")


def test_auto_leaves_room_for_what_the_update_reads_of_a_teacher_and_for_its_pass():
    auto = changed(train={"max_tokens_per_micro_batch": "auto"}, model={"gradient_checkpointing": "auto"})
    room = 120 * 10**9

    def fits(tokens: int, teacher, more: int) -> bool:
        config = changed(train={"max_tokens_per_micro_batch": tokens}, model={"gradient_checkpointing": False})
        memory = forecast(config, SHAPE, PARAMETERS, 0, 8, room, teacher=teacher)
        return memory.update <= room and memory.teacher_pass <= room + more

    alone = micro_batch_tokens(auto, SHAPE, room)
    for lent, kept, more in ((8, 20, 0), (118, 1, 0), (119, 1, 1)):  # the update decides, then the pass
        teacher = dataclasses.replace(teaches(), lent=lent * 10**9, kept=kept * 10**9)
        tokens = micro_batch_tokens(auto, SHAPE, room, teacher, more * 10**9)
        assert auto.rollout.context_length < tokens < alone
        assert fits(tokens, teacher, more * 10**9) and not fits(tokens + STEP, teacher, more * 10**9)
    assert (
        micro_batch_tokens(auto, SHAPE, room, teaches(source="base", path="", rank=4, divergence="sampled")) == alone
    )


@pytest.mark.parametrize(
    ("teacher", "kept"),
    [({"placement": "offload"}, 4), ({"source": "ema", "path": ""}, 4), ({"placement": "zero3"}, None),
     ({"source": "live", "path": "", "privilege": "p"}, 0)],
)  # fmt: skip
def test_a_plan_counts_the_teacher_that_was_built(teacher, kept):
    policy, built = taught(teacher)
    config, memory = plan_memory(policy.config, policy.model.config, policy, 0, built)
    count = sum(parameter.numel() for parameter in policy.model.parameters())
    head = 4 * policy.model.get_output_embeddings().weight.numel()
    assert config == policy.config and memory.teacher_pass > 0
    if kept is None:
        assert (memory.teacher.host, memory.teacher.resident, memory.teacher.lent) == (4 * count, head, 4 * count)
    else:
        assert memory.teacher.resident == kept * count and memory.host == 0


def test_a_plan_for_a_gpu_takes_fewer_tokens_with_a_teacher_and_gives_its_pass_the_room_of_gradients():
    with torch.device("meta"):
        teacher, small = (SimpleNamespace(model=AutoModelForCausalLM.from_config(s)) for s in (SHAPE, SMALL))
    room, trained = 16_500_000_000, sum(p.numel() for p in small.model.parameters())
    policy = SimpleNamespace(model=small.model, world_size=1, device=torch.device("cuda", 0), update_room=lambda: room)
    auto = changed(
        train={"max_tokens_per_micro_batch": "auto"}, model={"gradient_checkpointing": "auto"},
        loss={"distill_weight": 1.0}, teacher={"path": "t"},
    )  # fmt: skip
    (alone, _), (both, memory) = (plan_memory(auto, SMALL, policy, 0, t) for t in (None, teacher))
    assert memory.teacher.lent == 2 * PARAMETERS
    assert auto.rollout.context_length < both.micro_batch_tokens < alone.micro_batch_tokens
    assert room < memory.teacher_pass <= room + 4 * trained and memory.update <= room


def test_fewer_layers_are_kept_in_less_room():
    config = changed(train={"max_tokens_per_micro_batch": 16384}, model={"gradient_checkpointing": "auto"})
    found = [forecast(config, SHAPE, PARAMETERS, 0, 8, int(room * 1e9)) for room in (0, 12, 30, 60, 100)]
    kept = [memory.kept_layers for memory in found]
    assert kept == sorted(kept) and kept[0] == 0 and kept[-1] == SHAPE.num_hidden_layers and len(set(kept)) == 5
    assert all(memory.update <= room * 1e9 for memory, room in zip(found[1:], (12, 30, 60, 100), strict=True))
    assert forecast(config, SHAPE, PARAMETERS, 0, 8).kept_layers == 0  # on CPU auto recomputes all


def test_a_full_gpu_is_one_line_that_names_what_to_lower():
    with pytest.raises(OutOfMemory) as raised, naming_the_setting(CONFIG):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
    message = str(raised.value)
    for part in ("train.max_tokens_per_micro_batch=8192", "rollout.kv_memory_fraction=0.", "out of memory", "offload"):
        assert part in message
    assert "\n" not in message and raised.value.of_one_rank
