"""Launch scripts: one a config, the right launcher for each kind of machine, further arguments passed on."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess

import pytest

from tests.support.launch import ROOT, SMALL, trajectories
from tests.support.shell import environment

CONFIGS = sorted(p.stem for p in (ROOT / "configs").glob("*.json"))
BUILDER = r"python (?:-m scripts\.|scripts/)(?!forward)\w+(?:\.py)?"


def dry_run(script: str, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        ["bash", f"scripts/{script}.sh", *arguments], cwd=ROOT, env=environment(DRY_RUN="1", **variables),
        capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_a_mistyped_word_is_one_line_with_several_processes_too():
    done = subprocess.run(
        ["bash", "scripts/tiny_cpu.sh", "--set", "train.stepz=2"], cwd=ROOT,
        env=environment(NUM_GPUS="2", SKIP_INSTALL="1"), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: train.stepz") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_has_a_launch_script_that_passes_arguments_on(name):
    words = dry_run(name, "--set", "train.steps=3", NUM_GPUS="1").split()
    assert words == ["python", "main.py", "--config", f"configs/{name}.json", "--set", "train.steps=3"]


def test_several_gpus_go_through_torchrun():
    words = dry_run("qwen3_8b_8gpu", NUM_GPUS="8")
    assert words.startswith("torchrun --standalone --nproc-per-node 8 main.py --config configs/qwen3_8b_8gpu.json")


def test_a_hostfile_goes_through_the_deepspeed_launcher(tmp_path):
    (tmp_path / "hosts").write_text("first slots=8\n")
    words = dry_run("qwen3_8b_8gpu", HOSTFILE=str(tmp_path / "hosts"), NUM_GPUS="8")
    assert words.startswith(f"deepspeed --hostfile {tmp_path}/hosts --num_gpus 8 main.py --config")


def test_another_program_is_started_by_the_same_command():
    other, ours = (dry_run("qwen3_8b_8gpu", NUM_GPUS="8", **v) for v in ({"PROGRAM": "benchmarks/bench_run.py"}, {}))
    assert other == ours.replace("main.py", "benchmarks/bench_run.py") != ours


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PROGRAM", "no_such.py"),
        ("NUM_GPUS", "abc"),
        ("NUM_GPUS", "0"),
        ("NNODES", "two"),
        ("HOSTFILE", "no_such_file"),
    ],
)
def test_a_machine_setting_that_cannot_be_meant_is_refused(name, value):
    assert f"error: {name}={value}: " in dry_run("qwen3_8b_8gpu", **({"NUM_GPUS": "1"} | {name: value}))


def test_several_machines_meet_by_torchruns_variables():
    words = dry_run("qwen3_8b_8gpu", NUM_GPUS="4", NNODES="2", NODE_RANK="1", MASTER_ADDR="first", MASTER_PORT="1234")
    assert words.startswith(
        "torchrun --nnodes 2 --node-rank 1 --master-addr first --master-port 1234 --nproc-per-node 4 main.py"
    )


@pytest.mark.parametrize("missing", ["NODE_RANK", "MASTER_ADDR"])
def test_a_missing_rendezvous_variable_is_named(missing):
    variables = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "first", "NUM_GPUS": "1"}
    del variables[missing]
    assert f"{missing}: set" in dry_run("qwen3_8b_8gpu", **variables)


def test_a_bad_setting_is_refused_before_a_teacher_and_a_student_are_made(tmp_path):
    for name in ("config.py", "configs", "run", "scripts", "startup"):  # without main.py
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        ["bash", str(tmp_path / "scripts/tiny_opsd_cpu.sh"), "--set", "train.steps=4"], env=environment(),
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: train.warmup_steps=") and done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_without_torch_a_dry_run_asks_for_the_number_of_gpus(tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = dry_run("smoke_qwen3_0.6b", PATH=path)
    if not (ROOT / ".venv").exists():  # else the script puts that first
        assert said == "error: NUM_GPUS=: without torch the GPUs cannot be counted; set it, e.g. NUM_GPUS=1\n"
    assert dry_run("smoke_qwen3_0.6b", PATH=path, NUM_GPUS="1").startswith("python main.py")


def test_what_a_script_builds_with_starts_in_a_clean_clone():
    commands = {c for file in (ROOT / "scripts").glob("*.sh") for c in re.findall(BUILDER, file.read_text())}
    assert commands
    for command in commands:
        bare = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
        subprocess.run([*command.split(), "--help"], cwd=ROOT, env=bare, check=True, stdout=subprocess.DEVNULL)


def test_two_agents_on_loopback_train_as_two_machines_would(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    sets = [word for setting in (*SMALL, "train.steps=1") for word in ("--set", setting)]
    agents = [
        subprocess.Popen(
            ["bash", "scripts/tiny_cpu.sh", "--run-dir", str(tmp_path), *sets], cwd=ROOT, text=True,
            env=environment(NNODES="2", NODE_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NUM_GPUS="1"),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert len(trajectories(tmp_path, 1)) == 16


def test_deepspeeds_launcher_trains_on_cpu(tmp_path):
    sets = [word for setting in (*SMALL, "train.steps=1") for word in ("--set", setting)]
    arguments = ["--config", "configs/tiny_cpu.json", "--run-dir", str(tmp_path), *sets]
    done = subprocess.run(
        ["deepspeed", "--num_gpus", "1", "main.py", *arguments], cwd=ROOT, env=environment(DS_ACCELERATOR="cpu"),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(trajectories(tmp_path, 1)) == 16


def test_an_old_python_is_refused_before_it_makes_an_environment(tmp_path):
    """pip's word for it is that versions of dependencies conflict, and the environment would stay."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/_venv.sh", tmp_path / "scripts")
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit\n[ "$1" = -c ] && exit 1\nexit 3\n')
    old.chmod(0o755)
    env = {name: value for name, value in environment().items() if name != "SKIP_INSTALL"} | {"PYTHON": str(old)}
    command = ["bash", "-c", "source scripts/_venv.sh; install requirements.txt"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / ".venv").exists()
    assert done.stderr == f"error: PYTHON={old}: is Python 3.9.2, and 3.11 or later is needed; name one\n"
