"""Weights that cannot be read are one line that names the setting."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import main as program
from config import ConfigError, ModelConfig
from modeling.loading import build_model
from tests.support.policies import CPU

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(ROOT / "models/tiny_qwen3", tmp_path / "model"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def altered_header(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:20] + b"\xff" + content[21:])


def broken_index(path: Path) -> None:
    path.rename(path.with_name("model-00001-of-00001.safetensors"))
    path.with_name("model.safetensors.index.json").write_text('{"weight_map": {')


@pytest.mark.parametrize("damage", [cut, altered_header, broken_index, Path.unlink])
@pytest.mark.parametrize("name", ["model.path", "teacher.path"])
def test_weights_that_cannot_be_read_are_named_by_their_setting(folder, damage, name):
    damage(folder / "model.safetensors")
    with pytest.raises(
        ConfigError, match=rf"{name}='.*model': its weights cannot be read \(.*copy them anew"
    ) as error:
        build_model(ModelConfig(path=str(folder), dtype="float32"), 0, CPU, name=name)
    assert "\n" not in str(error.value)


def test_a_run_from_cut_weights_ends_in_one_line(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    cut(folder / "model.safetensors")
    words = ["--config", "configs/tiny_cpu.json", "--run-dir", str(tmp_path / "run"), "--set", f"model.path={folder}"]
    assert program.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: model.path='{folder}': its weights cannot") and said.count("\n") == 1
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_distilling_run_names_the_teacher_whose_weights_are_cut(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    cut(folder / "model.safetensors")
    teacher = ["loss.distill_weight=1.0", "teacher.source=model", f"teacher.path={folder}"]
    words = ["--config", "configs/tiny_cpu.json", "--run-dir", str(tmp_path / "run"), "--set", *teacher]
    assert program.main(words) == 2
    assert f"error: teacher.path='{folder}': its weights cannot be read" in capsys.readouterr().err
