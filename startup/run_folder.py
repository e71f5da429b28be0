"""The folder of a run: whether a run may start in it or resume from it.

A folder that holds a run is never overwritten, and a resume cannot change what a checkpoint fixes. Everything is
refused, with one line, before anything is written.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from config import Config, ConfigError, UserError, with_defaults
from configs.paths import located
from configs.schema import CODE, differences, read_json
from run.files import try_place, write_whole
from startup.inputs import from_hub, tell

if TYPE_CHECKING:
    from tools import UserFile

FIXED_BY_THE_CURSOR = (
    "data.path", "data.shuffle", "train.seed", "rollout.trajectories_per_step", "rollout.samples_per_prompt",
)  # fmt: skip
TRACES = ("metrics.jsonl", "checkpoints/step_*", "trajectories/step_*")  # of a step
SHAPE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_local_experts",
)  # fmt: skip
FIXED_BY_THE_OPTIMIZER = (
    "lora.rank", "model.dtype", "model.random_weights", "train.offload_optimizer", "train.zero_stage",
)  # fmt: skip


def check_run_dir(config: Config, run_dir: Path, resume: bool) -> Path | None:
    """The checkpoint to resume from; None where the run begins. Raises ConfigError or CheckpointError."""
    from run.checkpoint import CheckpointError, find_latest, newest

    _check_writable(run_dir)
    begun = any(True for trace in TRACES for _ in run_dir.glob(trace))
    if not resume:
        if begun:
            fix = "name another folder (or delete this one)"
            fix = f"; add --resume, or {fix}" if find_latest(run_dir) else f" without a complete checkpoint; {fix}"
            raise ConfigError("--run-dir", str(run_dir), f"already holds a run{fix}")
        return None
    latest = newest(run_dir)
    if latest:
        _check_changes(config, run_dir, latest)
        tell(f"resuming from {latest}")
    elif run_dir.is_dir() and not begun:  # ended before its first step
        tell(f"{run_dir} holds no step yet; the run starts with the first")
    else:
        fix = "start without --resume" + " in another folder" * begun
        raise CheckpointError(f"{run_dir}: no complete checkpoint to resume from; {fix}")
    return latest


def user_files(files: Sequence[UserFile]) -> list[UserFile]:
    """The user's files, each once. Raises ConfigError where the run folder could not keep two of one name."""
    found: dict[str, UserFile] = {}
    for file in files:
        other = found.setdefault(Path(file.path).name, file)
        if other.path != file.path:
            raise ConfigError("tool.functions", file.path, f"has the name of {other.path}; rename one")
    return list(found.values())


def check_code(config: Config, run_dir: Path, files: Sequence[UserFile]) -> None:
    """Before a resume: the user's files must be those that the run keeps. Raises ConfigError."""
    for file in files if not config.tool.accept_changed_code else ():
        if has_changed(run_dir, file):
            raise ConfigError(
                "tool.accept_changed_code", False, f"{file.path} (sha256 {file.sha256[:12]}) has changed since the "
                f"run began; put {_kept(run_dir, file)} back in its place, or set it to true",
            )  # fmt: skip


def has_changed(run_dir: Path, file: UserFile) -> bool:
    """Whether the run keeps another text of the file."""
    kept = _kept(run_dir, file)
    return kept.is_file() and kept.read_bytes() != file.text.encode("utf-8")


def _kept(run_dir: Path, file: UserFile) -> Path:
    return run_dir / CODE / Path(file.path).name


def keep_code(run_dir: Path, files: Sequence[UserFile]) -> None:
    """Writes the user's files, and their hashes, into the run folder. Raises WriteError."""
    for file in files:
        write_whole(_kept(run_dir, file), file.text)
    if files:
        hashes = {Path(file.path).name: {"path": file.path, "sha256": file.sha256} for file in files}
        write_whole(run_dir / CODE / "files.json", json.dumps(hashes, indent=1) + "\n")


def with_first_date(config: Config, run_dir: Path) -> Config:
    """The config with the date that the run's prompts began with, where its chat template asks for one."""
    path = run_dir / "config.json"
    first = read_json(path).get("model", {}).get("current_date") if path.is_file() else None
    if config.model.current_date or not first:
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, current_date=first))


def existing_run(name: str) -> Path:
    """The folder of a run that has begun, as the subcommands are given it. Raises UserError."""
    if not (Path(name) / "config.json").is_file():
        raise UserError(f"{name}: no config.json; name the folder of a run")
    return Path(name)


def _check_writable(run_dir: Path) -> None:
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError("--run-dir", str(run_dir), "is a file; name a folder")
    try:
        try_place(run_dir)
    except OSError as error:
        fix = f"cannot be written to ({error.strerror}); name another folder"
        raise ConfigError("--run-dir", str(run_dir), fix) from error
    for part in (run_dir / "checkpoints", run_dir / "trajectories"):  # or the first save would find out
        if part.exists() and not (part.is_dir() and os.access(part, os.W_OK)):
            raise ConfigError("--run-dir", str(run_dir), f"{part} is no folder that can be written to; fix that")


def _check_changes(config: Config, run_dir: Path, latest: Path) -> None:
    """Says what differs from the run's settings, and refuses what its checkpoints or its data cursor fix."""
    from update.teacher import TEACHER_MEAN

    changed = differences(located(with_defaults(read_json(run_dir / "config.json"))), json.loads(config.to_json()))
    adapters_alone = (latest / "adapter_config.json").exists()  # no run can start from them
    fix = "set it back, or start a new run " + ("from the base" if adapters_alone else f"with model.path={latest}")
    for name, (before, now) in changed.items():
        if name in FIXED_BY_THE_CURSOR:
            raise ConfigError(
                name, now, f"was {before!r} in the run to resume, and fixes which problems are done; {fix}"
            )
        decay_begins_or_ends = name == "train.weight_decay" and bool(before) != bool(now)
        scales_adapters = name == "lora.alpha" and config.lora.rank > 0
        if name in FIXED_BY_THE_OPTIMIZER or decay_begins_or_ends or scales_adapters:
            raise ConfigError(
                name, now, f"was {before!r} in the run to resume, and fixes what its checkpoints hold; {fix}"
            )
        if name == "model.path":
            _check_same_shape(config, latest, fix)
        tell(f"resuming with {name} changed from {before!r} to {now!r}")
    averages = config.loss.distill_weight > 0 and config.teacher.source == "ema"
    if averages and not (latest / "engine" / TEACHER_MEAN).exists():
        raise ConfigError("teacher.source", "ema", f"{latest} was written without a running mean of weights; {fix}")


def _check_same_shape(config: Config, checkpoint: Path, fix: str) -> None:
    """Refuses a model that the checkpoint's weights do not fit. A checkpoint of LoRA holds adapters alone."""
    from transformers import AutoConfig

    from modeling.loading import shape_source

    if not (checkpoint / "config.json").exists():
        return
    saved = read_json(checkpoint / "config.json")
    shape = from_hub("model.path", shape_source(config.model), AutoConfig).to_dict()
    for name in SHAPE:
        if name in saved and saved[name] != shape.get(name):
            now = f"has {name}={shape.get(name)!r}, and the checkpoints of the run to resume {saved[name]!r}; {fix}"
            raise ConfigError("model.path", config.model.path, now)
