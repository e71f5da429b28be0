"""Checkpoints that are complete or absent, written while the next rollout runs.

A checkpoint is a folder `checkpoints/step_N`: the Hugging Face copy (config, weights, tokenizer, chat template), the
engine's state and the random state of every rank under `engine/`, checksums, and `state.json`, written last. It is
written under another name (`step_N.partial`) and renamed when every rank is done; `latest` names it only afterwards.

Every file is on the disk, not only in the system's memory, before the rename that makes it count: whole checkpoints
survive a loss of power.

`begin` hands the writing to a thread and returns; weights and optimizer state do not change until the next update, so
nothing is copied for it; call `finish` before that update. The thread makes no collective call: ranks meet in `begin`
and `finish` alone, so a rank that cannot write stops all.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from config import UserError
from run.files import say, sync_file, sync_folder

CHECKSUMS = "checksums_rank_{}.json"


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written or resumed from; one line with the folder or file and the fix."""


class SavablePolicy(Protocol):
    """The part of `policy.Policy` that a checkpoint uses. `save` and `save_pretrained` run in two threads at once;
    `save` returns the checksums that it knows of its files, by their names below `folder`."""

    world_size: int

    def save(self, folder: Path) -> Mapping[str, str]: ...
    def load(self, folder: Path) -> None: ...
    def load_weights(self, folder: Path) -> None: ...
    def save_pretrained(self, folder: Path) -> None: ...


class CheckpointStore:
    """The checkpoints of one run, seen from one rank."""

    def __init__(
        self,
        run_dir: Path,
        policy: SavablePolicy,
        save_tokenizer: Callable[[Path], Any],
        *,
        rank: int,
        gather: Callable[[Any], list[Any]],
        keep: int = 0,
    ):
        """gather: every rank's object, in rank order (collective). keep: newest checkpoints to keep, 0 for all."""
        self._folder = run_dir / "checkpoints"
        self._policy, self._save_tokenizer = policy, save_tokenizer
        self._rank, self._gather, self._keep = rank, gather, keep
        self._thread: threading.Thread | None = None
        self._step = 0
        self._state: dict[str, Any] = {}
        self._failure: str | None = None
        self.seconds = 0.0  # that writing the newest took, in the background

    def begin(self, step: int, state: dict[str, Any]) -> None:
        """Starts to write the state after `step` steps. Collective. state: JSON for `state.json`."""
        self.finish()
        self._step, self._failure = step, None
        self._state = state | {"step": step, "world_size": self._policy.world_size}
        if self._rank == 0:
            self._failure = _attempt(self._make_partial)
        self._raise_any()
        self._failure = "its writer did not finish"  # until it has
        self._thread = threading.Thread(target=self._write, name=f"checkpoint-{step}")
        self._thread.start()

    def finish(self) -> Path | None:
        """Waits for the writer and renames the checkpoint into place. Collective. None where nothing was begun.

        Raises CheckpointError on every rank where one failed; earlier complete ones stay.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        self._raise_any()
        if self._rank == 0:
            self._failure = _attempt(self._commit)
        self._raise_any()
        return self._folder / f"step_{self._step}"

    @property
    def _partial(self) -> Path:
        return self._folder / f"step_{self._step}.partial"

    def _make_partial(self) -> None:
        for left in self._folder.glob("step_*.partial"):  # left by a save that was killed, perhaps of another step
            shutil.rmtree(left, ignore_errors=True)
        self._partial.mkdir(parents=True)

    def _write(self) -> None:
        started = time.perf_counter()
        self._failure = _attempt(self._write_files)
        self.seconds = time.perf_counter() - started

    def _write_files(self) -> None:
        with ThreadPoolExecutor(1) as pool:  # a file system writes several files faster than one
            copy = pool.submit(self._write_copy)
            sums = dict(self._policy.save(self._partial)) | copy.result()
        names = _files_of(self._partial, self._rank)
        for path in [self._partial / name for name in names]:
            sync_file(path)
        for folder in {(self._partial / name).parent for name in names}:
            sync_folder(folder)
        sums = {name: sums.get(name) or checksum(self._partial / name) for name in names}
        _write_synced(self._partial / CHECKSUMS.format(self._rank), json.dumps(sums, indent=1) + "\n")

    def _write_copy(self) -> dict[str, str]:
        """The Hugging Face copy, by rank 0; checksums of its weights. Other files may be the engine's, unfinished."""
        if self._rank:
            return {}
        self._policy.save_pretrained(self._partial)
        self._save_tokenizer(self._partial)
        return {path.name: checksum(path) for path in self._partial.glob("*.safetensors")}

    def _commit(self) -> None:
        missing = [r for r in range(self._policy.world_size) if not (self._partial / CHECKSUMS.format(r)).exists()]
        if missing:
            raise FileNotFoundError(f"rank {missing[0]} left no checksums")
        final = self._folder / f"step_{self._step}"
        _write_synced(self._partial / "state.json", json.dumps(self._state, indent=1) + "\n")
        sync_folder(self._partial)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(self._partial, final)
        latest = self._folder / "latest.partial"
        _write_synced(latest, final.name + "\n")
        os.replace(latest, self._folder / "latest")
        sync_folder(self._folder)
        for old in _removable(self._folder, self._keep):
            failure = _attempt(partial(shutil.rmtree, old))
            if failure:  # open in another program, say; the new one is complete, and an old one does not end a run
                say(f"{old} could not be removed ({failure})")

    def _raise_any(self) -> None:
        failures = [f for f in self._gather(self._failure) if f]
        if failures:
            last = find_latest(self._folder.parent)
            kept = f"{last} is the last complete one" if last else "there is no complete one yet"
            again = "go on with --resume" if last else "start anew in another folder"
            raise CheckpointError(
                f"{self._folder / f'step_{self._step}'} could not be written ({failures[0]}); {kept}. "
                f"Free space or fix the disk, then {again}"
            )


def newest(run_dir: Path) -> Path | None:
    """`find_latest`, for resuming: raises CheckpointError where a newer one cannot be read, since its steps would be
    taken again and their files replaced."""
    latest = find_latest(run_dir)
    unread = [path for path in (run_dir / "checkpoints").glob("step_*") if _step(path) >= 0 and path.is_dir()]
    unread = [path for path in unread if not latest or _step(path) > _step(latest)]
    if unread:
        raise _damage(max(unread, key=_step), "state.json")
    return latest


def find_latest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint, or None. A folder without `state.json` does not count."""
    return max(_complete(run_dir / "checkpoints"), key=_step, default=None)


def load(folder: Path, policy: SavablePolicy, rank: int, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """Restores the policy and returns the state that `begin` was given. Collective.

    On another number of ranks the weights carry over and the optimizer starts anew: its shards belong to ranks.
    Raises CheckpointError on every rank where a file of any rank is missing, truncated or altered.
    """
    state = json.loads((folder / "state.json").read_text())
    damaged = [] if _fits(state, folder) else ["state.json"]
    ranks = range(rank, state.get("world_size", 0), policy.world_size)
    damaged += [name for r in ranks for name in _damaged(folder, r)]
    damaged = [name for part in gather(damaged) for name in part]
    if damaged:
        raise _damage(folder, damaged[0])
    if state["world_size"] == policy.world_size:
        policy.load(folder)
    else:
        policy.load_weights(folder)
        if rank == 0:
            say(
                f"resuming on {policy.world_size} ranks from {state['world_size']}: weights and data carry over, "
                "Adam's moments and the fp32 copies of bf16 weights do not and start anew"
            )
    return state


def require_whole(folder: Path) -> None:
    """Raises as `load` does, for reading the Hugging Face copy alone: skips the engine's state, which is larger.
    A folder with neither state nor checksums is no run's checkpoint, and passes."""
    path = folder / "state.json"
    if not path.exists() and not any(folder.glob(CHECKSUMS.format("*"))):
        return
    own = _reads(path) and (_step(folder) < 0 or _fits(json.loads(path.read_text()), folder))  # or a copy's, renamed
    damaged = _damaged(folder, 0, left_out=("engine/",)) if own else [path.name]
    if damaged:
        raise _damage(folder, damaged[0])


def _damage(folder: Path, name: str) -> CheckpointError:
    older = max((p for p in _complete(folder.parent) if _step(p) < _step(folder)), key=_step, default=None)
    instead = f"; {older} is older" if older else ""
    return CheckpointError(
        f"{folder / name}: is missing or differs from its checksum; remove {folder} and resume again{instead}"
    )


def checksum(path: Path) -> str:
    from run import tensorfiles  # imports torch, which a refused start does without

    return tensorfiles.checksum(path)


def _fits(state: dict[str, Any], folder: Path) -> bool:
    """Whether a state belongs to its folder. It is written last, so no checksum covers it."""
    shards = len(list(folder.glob(CHECKSUMS.format("*"))))
    return state.get("step") == _step(folder) and state.get("world_size", 0) >= max(shards, 1)


def _attempt(action: Callable[[], None]) -> str | None:
    """What went wrong, as one line. Every kind of error: each library reports a full disk by its own."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _files_of(folder: Path, rank: int) -> list[str]:
    """Files that `rank` wrote, relative to the checkpoint: its own shards, and for rank 0 all files of no rank."""
    names = [p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file()]
    names = [name for name in names if not name.startswith("checksums_rank_") and name != "state.json"]
    own = (f"zero_pp_rank_{rank}_mp", f"random_rank_{rank}.")
    ranked = {name for name in names if any(part in name for part in ("zero_pp_rank_", "random_rank_"))}
    return [name for name in names if (any(part in name for part in own) if name in ranked else rank == 0)]


def _damaged(folder: Path, rank: int, left_out: tuple[str, ...] = ()) -> list[str]:
    path = folder / CHECKSUMS.format(rank)
    try:
        sums = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return [path.name]
    names = [name for name in sums if not name.startswith(left_out)]
    return [name for name in names if not (folder / name).exists() or checksum(folder / name) != sums[name]]


def _write_synced(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync_file(path)


def _complete(folder: Path) -> list[Path]:
    return [path.parent for path in folder.glob("step_*/state.json") if _step(path.parent) >= 0 and _reads(path)]


def _reads(path: Path) -> bool:
    try:
        return "step" in json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return False


def _removable(folder: Path, keep: int) -> Sequence[Path]:
    """Checkpoints older than the newest `keep` complete ones, except the one with the best evaluation; and what a
    killed removal left of older ones."""
    if keep == 0:
        return []
    complete = sorted(_complete(folder), key=_step)
    scores = {path: json.loads((path / "state.json").read_text()).get("score") for path in complete}
    rated = [path for path in complete if scores[path] is not None]
    best = max(rated, key=lambda path: (scores[path], _step(path)), default=None)
    oldest = min(map(_step, complete[-keep:]))
    return [path for path in folder.glob("step_*") if 0 <= _step(path) < oldest and path != best]


def _step(folder: Path) -> int:
    name = folder.name.removeprefix("step_")
    return int(name) if name.isdigit() else -1
