"""What DeepSpeed is told."""

from __future__ import annotations

from typing import Any

from config import Config

BUCKET_ELEMENTS = 100_000_000  # of gradients that are reduced at once; DeepSpeed's default takes five times the memory


def deepspeed_settings(config: Config, world_size: int) -> dict[str, Any]:
    """Gradients are sums of parts that hold the global denominator, over micro-batches and ranks alike: DeepSpeed is
    told to sum over ranks where it would average, and divides by gradient_accumulation_steps, which says 1 whatever
    the number of micro-batches.
    """
    zero: dict[str, Any] = {"stage": config.train.zero_stage, "contiguous_gradients": True, "overlap_comm": False}
    zero |= {"reduce_bucket_size": BUCKET_ELEMENTS, "reduce_scatter": world_size > 1}  # one rank: fewer copies
    if config.train.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_allreduce_op": "sum",
        "gradient_clipping": config.train.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "hybrid_engine": {"enabled": True},
        "steps_per_print": 1 << 40,
    }
    if config.model.dtype == "bfloat16":
        # Without the last line micro-batches would be added up in bf16.
        # Stage 1 would add each micro-batch to the ones before once more, were they not taken at once.
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
