"""Sends each step's metrics to TensorBoard (where installed), and to W&B or trackio (where the config names them).

Each library is imported only when its tracker is opened; a named one that is absent is refused before the run starts.
A resumed run goes on under the same name: a random id is kept in the run folder as `tracker_id`.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any, Protocol

from config import ConfigError, LogConfig
from run.files import write_whole, writing


class Tracker(Protocol):
    def log(self, row: dict[str, Any]) -> None:
        """row: a metrics row; its "step" counts from 1."""

    def rewind(self, step: int) -> None:
        """What was logged after `step` will be logged again: a service without a way back shows it twice, equal."""

    def close(self) -> None: ...


def check_trackers(log: LogConfig) -> None:
    """Raises ConfigError where a tracker that the config names is not installed."""
    for name in log.trackers:
        if not importlib.util.find_spec(name):
            raise ConfigError(
                "log.trackers", list(log.trackers),
                f"{name} is not installed; run `pip install -r requirements/report.txt`, or take it out",
            )  # fmt: skip


def open_trackers(log: LogConfig, run_dir: Path, settings: dict[str, Any]) -> list[Tracker]:
    """settings: the run's config as nested dictionaries. TensorBoard is used wherever it is installed."""
    opened: list[Tracker] = []
    if importlib.util.find_spec("tensorboard"):
        opened.append(TensorBoard(run_dir / "tensorboard"))
    for name in log.trackers:
        if name != "tensorboard":
            kind: Any = WeightsAndBiases if name == "wandb" else Trackio
            opened.append(kind(log.project, run_dir, _run_id(run_dir), settings))
    return opened


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """The row's numbers; counts by name become `stops/answered` and so on."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{key}": float(count) for key, count in value.items()}
        elif isinstance(value, (bool, int, float)):
            flat[name] = float(value)
    return flat


def _run_id(run_dir: Path) -> str:
    path = run_dir / "tracker_id"
    if not path.exists():
        write_whole(path, secrets.token_hex(4) + "\n")
    return path.read_text().strip()


class TensorBoard:
    """Event files in tensorboard's own record format: torch's writer would import all of tensorflow where that exists,
    and tensorboard's writes in a thread of its own, whose errors on a full disk are printed and come late."""

    def __init__(self, folder: Path):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2, summary_pb2
        self._path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        with writing(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        self._records = RecordWriter(self._file)
        self._add(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, row: dict[str, Any]) -> None:
        values = [self._summary.Summary.Value(tag=name, simple_value=v) for name, v in numbers(row).items()]
        summary = self._summary.Summary(value=values)
        self._add(self._event.Event(wall_time=time.time(), step=row["step"], summary=summary))

    def rewind(self, step: int) -> None:
        """A start mark makes TensorBoard drop what an earlier session wrote from this step on."""
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._add(self._event.Event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Any) -> None:
        with writing(self._path):
            self._records.write(event.SerializeToString())


class _Service(Tracker):
    """A tracker whose library gives a run."""

    _run: Any

    def close(self) -> None:
        self._run.finish()


class WeightsAndBiases(_Service):
    """The step travels as a value of its own: W&B's counter refuses to go back, and a resumed run does."""

    def __init__(self, project: str, run_dir: Path, run_id: str, settings: dict[str, Any]):
        import wandb

        name = f"{run_dir.name}-{run_id}"
        self._run = wandb.init(
            project=project, name=name, id=run_id, resume="allow", dir=str(run_dir), config=settings
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, row: dict[str, Any]) -> None:
        self._run.log(numbers(row))


class Trackio(_Service):
    def __init__(self, project: str, run_dir: Path, run_id: str, settings: dict[str, Any]):
        import trackio

        name = f"{run_dir.name}-{run_id}"
        self._run = trackio.init(project=project, name=name, resume="allow", config=settings, embed=False)

    def log(self, row: dict[str, Any]) -> None:
        values = numbers(row)
        del values["step"]  # a key that trackio keeps for itself
        self._run.log(values, step=row["step"])
