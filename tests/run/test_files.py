"""A disk that takes no more is one line that names the file, and leaves what was there before."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import main as program
from config import parse_config
from evaluation.scores import write_results
from policy import init_distributed
from report.page import write_report
from run import files
from run.console import PlainConsole
from run.files import (
    InUseError,
    WriteError,
    append_line,
    complain,
    require_writable,
    say,
    sole_writer,
    whole_lines,
    write_whole,
)
from run.ranks import Ranks
from run.stretches import begin_stretch
from run.trackers import TensorBoard
from run.trajectories import write_step
from run.writers import RunWriter, open_writer
from startup import building
from tests.support.builders import record, scored
from tests.support.launch import ROOT, finished_run, metrics, numbers, run
from tests.support.policies import CPU
from tests.support.runs import metrics_row, write_run

FULL = Path("/dev/full")  # takes nothing: every write answers "No space left on device"
CONFIG = parse_config({"model": {"path": "m"}, "data": {"path": "d"}, "log": {"trackers": []}})


def block(path: Path) -> Path:
    """Makes the next whole writing of `path` meet a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".partial").symlink_to(FULL)
    return path


def trajectories(folder: Path) -> None:
    records = [record("PA")]
    write_step(folder, 1, records, scored(records, [1.0]), ["7"])


def page(folder: Path) -> None:
    write_run(folder / "run", [metrics_row(1)])
    write_report(folder / "run", None, str(folder / "page.html"), 10)


WHOLE = {
    "file": lambda folder: write_whole(folder / "file", "new"),
    "config.json": lambda folder: begin_stretch(folder, 1, CONFIG.to_json()),
    "settings.jsonl": lambda folder: begin_stretch(folder, 1, CONFIG.to_json()),
    "trajectories/step_1.parquet": trajectories,
    "evaluations/step_1.json": lambda folder: write_results(folder / "evaluations/step_1.json", {}),
    "page.html": page,
}


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_file_is_written_whole_or_stays_what_it_was(tmp_path, name):
    path = block(tmp_path / name)
    path.write_text("before")
    with pytest.raises(
        WriteError, match=rf"{name}: cannot be written \(No space left on device\); free space"
    ) as error:
        WHOLE[name](tmp_path)
    assert "\n" not in str(error.value)
    assert path.read_text() == "before" and not list(path.parent.glob("*.partial"))


def test_a_place_that_takes_no_file_is_known_before_there_is_one(tmp_path):
    (tmp_path / "file").write_text("before")
    for place, why in ((tmp_path / "file/below", "File exists|Not a directory"), (tmp_path, "Is a directory")):
        with pytest.raises(WriteError, match=rf"{place}: cannot be written \(({why})\); name another"):
            require_writable(place, "name another")
    for place in (tmp_path / "file", tmp_path / "new/file"):
        require_writable(place)
    assert (tmp_path / "file").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left, and no folder made"


def test_a_line_is_appended_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    append_line(path, "one")
    opened = type(path).open

    class Short:
        """A disk with room for three bytes more."""

        def __init__(self, file):
            self.file, self.room = file, 3

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def tell(self):
            return self.file.tell()

        def truncate(self, size):
            return self.file.truncate(size)

        def write(self, data):
            if not self.room:
                raise OSError(28, "No space left on device")
            self.room -= 3
            return self.file.write(data[:3])

    with monkeypatch.context() as patch:
        patch.setattr(type(path), "open", lambda *words, **named: Short(opened(*words, **named)))
        with pytest.raises(WriteError, match=r"metrics.jsonl: cannot be written \(No space left"):
            append_line(path, "two, which does not fit")
    assert path.read_text() == "one\n"
    append_line(path, "three")
    assert whole_lines(path) == ["one", "three"]


def test_a_last_line_that_a_crash_cut_short_is_not_read(tmp_path):
    (tmp_path / "x").write_text('{"step": 1}\n{"st')
    assert whole_lines(tmp_path / "x") == ['{"step": 1}']


def test_what_is_written_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    synced, fsync, replace = [], os.fsync, os.replace

    def sync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name, path.read_text()))
        fsync(descriptor)

    def rename(source, target):
        assert synced[-1][0] == source.name
        replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    write_whole(tmp_path / "x", "words")
    append_line(tmp_path / "lines", "one")
    assert synced == [("x.partial", "words"), ("lines", "one\n")]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for write in (
        lambda: write_whole(tmp_path / "file/page.html", "x"),
        lambda: RunWriter(tmp_path / "file", None, PlainConsole(1)),
        lambda: open_writer(CONFIG, tmp_path / "file/run", PlainConsole(1)),
    ):
        with pytest.raises(WriteError, match=r"file.*: cannot be written \((Not a directory|File exists)\)"):
            write()


def test_trackers_on_a_full_disk_are_named(tmp_path):
    pytest.importorskip("tensorboard")
    board = TensorBoard(tmp_path)
    board._file.close()
    board._file = board._records._writer = FULL.open("ab", buffering=0)
    for write in (lambda w: w.metrics({"step": 1}), lambda w: w.rewind(0)):
        with pytest.raises(WriteError, match=r"events.out.tfevents.*: cannot be written \(No space left"):
            write(RunWriter(tmp_path, None, PlainConsole(1), [board]))


def test_one_ranks_failure_ends_all_and_stops_further_writing():
    init_distributed(CPU)
    ranks, written = Ranks(), []
    ranks.raise_any()
    ranks.attempt(written.append, 1)
    ranks.attempt(write_whole, Path("/dev/full/x"), "text")
    ranks.attempt(written.append, 2)
    assert written == [1]
    with pytest.raises(WriteError, match="/dev/full/x: cannot be written"):
        ranks.raise_any()
    other = Ranks()
    other.gather = lambda item: [item, "rank 1's words"]
    with pytest.raises(WriteError, match="rank 1's words"):
        other.raise_any()


@pytest.mark.parametrize("say", [say, complain])
def test_a_console_that_takes_no_more_is_dropped(say, monkeypatch):
    for stream in (FULL.open("w"), os.fdopen(os.dup(1), "w")):
        if stream.name != str(FULL):
            stream.close()
        monkeypatch.setattr(sys, "stdout" if say.__name__ == "say" else "stderr", stream)
        say("words")
        say("more words")
        stream.close()  # nothing is left that could not be written


def test_say_prints_where_there_is_room(capsys):
    say("words")
    assert capsys.readouterr().out == "words\n"


def fill_at_step_3(monkeypatch, run_dir: Path, name: str) -> None:
    """From step 3 on the disk takes no more of `name`."""
    inner = RunWriter.trajectories

    def trajectories(self, step, *words):
        if step == 3 and name == "metrics.jsonl":
            (run_dir / name).rename(run_dir / "kept")
            (run_dir / name).symlink_to(FULL)
        elif step == 3:
            block(run_dir / name)
        inner(self, step, *words)

    monkeypatch.setattr(RunWriter, "trajectories", trajectories)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("straight"), "train.check=false")


@pytest.mark.parametrize("name", ["metrics.jsonl", "trajectories/step_3.parquet"])
def test_a_run_that_met_a_full_disk_ends_with_one_line_and_resumes_exactly(
    straight, tmp_path, monkeypatch, capsys, name
):
    monkeypatch.chdir(ROOT)
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        fill_at_step_3(patch, run_dir, name)
        assert run(run_dir, "train.check=false") == program.USER_ERROR_STATUS
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{name}: cannot be written (No space left on device); free" in error
    assert (run_dir / "checkpoints/step_2/state.json").exists()
    if name == "metrics.jsonl":
        (run_dir / "kept").replace(run_dir / name)
    assert [row["step"] for row in metrics(run_dir)] == [1, 2]
    assert run(run_dir, "train.check=false", resume=True) == 0
    assert numbers(run_dir) == numbers(straight)


def test_a_run_folder_has_one_writer_at_a_time(tmp_path):
    with sole_writer(tmp_path / "run"):
        with pytest.raises(InUseError, match=rf"run: process {os.getpid()} on .* is writing into it; wait"):
            with sole_writer(tmp_path / "run"):
                pass
    with sole_writer(tmp_path / "run"):
        pass
    with pytest.raises(WriteError, match=r"never/lock: cannot be written"), sole_writer(Path("/dev/null/never")):
        pass


def test_a_file_system_without_locks_is_said_and_any_other_trouble_is_an_error(tmp_path, monkeypatch, capsys):
    def flock(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    number = errno.ENOSYS
    with sole_writer(tmp_path):
        assert "lock: no lock (Function not implemented); see to it" in capsys.readouterr().out
    number = errno.EIO
    with pytest.raises(WriteError, match=r"lock: cannot be written \(Input/output error\)"), sole_writer(tmp_path):
        pass


def test_a_killed_writer_lets_go_though_processes_that_it_started_live_on(tmp_path):
    code = (
        "import subprocess, sys, time; from pathlib import Path; from run.files import sole_writer\n"
        "with sole_writer(Path(sys.argv[1])):\n"
        "    subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL); print('held', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    with pytest.raises(InUseError), sole_writer(tmp_path):
        pass
    process.kill()
    process.wait()
    with sole_writer(tmp_path):
        pass
    os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_a_folder_is_refused_while_the_first_goes_on(straight, tmp_path, monkeypatch, capsys, resume):
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "run"
    if resume:  # refused before it puts a second model on the GPU
        shutil.copytree(straight, folder)
        monkeypatch.setattr(building, "build_policy", None)
    with sole_writer(folder):
        before = sorted(folder.rglob("*"))
        assert run(folder, "train.check=false", "train.steps=6", resume=resume) == program.USER_ERROR_STATUS
        assert sorted(folder.rglob("*")) == before
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is writing into it" in error


def test_a_run_that_began_and_ended_while_another_was_being_built_is_not_written_over(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)

    inner = building.build_policy

    def build(*words):
        (tmp_path / "run").mkdir()
        (tmp_path / "run/metrics.jsonl").write_text("theirs")
        return inner(*words)

    monkeypatch.setattr(building, "build_policy", build)
    assert run(tmp_path / "run", "train.check=false") == program.USER_ERROR_STATUS
    assert "already holds a run" in capsys.readouterr().err
    assert (tmp_path / "run/metrics.jsonl").read_text() == "theirs"


@pytest.mark.parametrize("name", ["checkpoints", "trajectories"])
def test_a_part_of_the_run_folder_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(ROOT)
    (tmp_path / name).write_text("a file")
    assert run(tmp_path) == program.USER_ERROR_STATUS
    assert f"{name} is no folder that can be written to" in capsys.readouterr().err
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    allowed = os.access  # root may write everywhere, but not on a disk that is mounted read-only
    monkeypatch.setattr(os, "access", lambda path, *how: Path(path).name != name and allowed(path, *how))
    assert run(tmp_path) == program.USER_ERROR_STATUS
    assert f"{name} is no folder that can be written to" in capsys.readouterr().err


LOST_POWER = {  # what may lie behind the last checkpoint afterwards; steps 3 and 4 are taken again
    "trajectories/step_3.parquet": b"",
    "trajectories/step_4.parquet": b"PAR1 and nothing more",
    "metrics.jsonl": b"\0\0\0\0\n\xff\xfe\n",
}


def test_what_a_loss_of_power_left_behind_the_last_checkpoint_is_no_hindrance(straight, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    shutil.rmtree(run_dir / "checkpoints/step_4")
    for name, content in LOST_POWER.items():
        if name == "metrics.jsonl":
            lines = (run_dir / name).read_bytes().splitlines(keepends=True)
            content = b"".join(lines[:2]) + content
        (run_dir / name).write_bytes(content)
    assert run(run_dir, "train.check=false", resume=True) == 0
    assert numbers(run_dir) == numbers(straight)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("trajectories/step_1.parquet", b"", "cannot be read (Parquet file size is 0 bytes); remove it"),
        ("trajectories/step_2.parquet", b"x" * 100, "remove it to go on without"),
        ("metrics.jsonl", b'{"step": 1}\n\xff{"step": 2}\n', "line 2 is damaged"),
        ("metrics.jsonl", b"[1]\n", "line 1 is damaged"),
        ("settings.jsonl", b"", "is empty; remove it"),
        ("settings.jsonl", b'{"first_\n', "line 1 is damaged"),
    ],
)  # fmt: skip
def test_a_damaged_file_of_the_steps_that_stay_is_one_line(
    straight, tmp_path, monkeypatch, capsys, name, content, words
):
    monkeypatch.chdir(ROOT)
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    (run_dir / name).write_bytes(content)
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert run(run_dir, "train.check=false", "train.steps=5", resume=True) == program.USER_ERROR_STATUS
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{name}: " in error and words in error
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_folder_that_cannot_be_synced_is_said_once_and_trouble_stays_an_error(tmp_path, monkeypatch, capsys):
    numbers = iter([errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EIO])

    def fsync(descriptor):
        number = next(numbers)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(files, "_said", set())
    for _ in range(4):
        files.sync_folder(tmp_path)
    assert capsys.readouterr().out.count("does not sync folders (Invalid argument)") == 1
    with pytest.raises(OSError, match="Input/output error"):
        files.sync_folder(tmp_path)


def test_a_run_whose_folders_cannot_be_synced_saves_and_resumes(tmp_path, monkeypatch, capsys):
    fsync = os.fsync

    def files_alone(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(os, "fsync", files_alone)
    assert run(tmp_path / "run", "train.steps=1", "train.check=false") == 0
    assert run(tmp_path / "run", "train.steps=2", "train.check=false", resume=True) == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize("name", ["exp[1]", "parent [a-b]*?/run ü"])
def test_a_folder_with_the_characters_of_patterns_is_resumed(tmp_path, monkeypatch, name):
    monkeypatch.chdir(ROOT)
    assert run(tmp_path / name, "train.steps=1", "train.check=false") == 0
    assert run(tmp_path / name, "train.steps=2", "train.check=false", resume=True) == 0
    assert [row["step"] for row in metrics(tmp_path / name)] == [1, 2]
