"""Packed checkpoints: mxfp4 loads as bf16, trains, and is saved as bf16 without the quantization entry."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Qwen3Config

from config import ModelConfig
from modeling.loading import check_quantization, loading_options
from policy import build_model

# The values of an FP4 code (E2M1, OCP Microscaling specification, table 5); a block of 32 shares a power of two.
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4 += [-value for value in FP4]
BLOCK = 32
BIAS = 127
CPU = torch.device("cpu")


def pack(shape: tuple[int, int, int], draw: random.Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random codes for a weight [E, in, out]: its blocks, scales and value, the value by plain arithmetic."""
    experts, width, outputs = shape
    blocks = torch.zeros(experts, outputs, width // BLOCK, BLOCK // 2, dtype=torch.uint8)
    scales = torch.zeros(experts, outputs, width // BLOCK, dtype=torch.uint8)
    value = torch.zeros(shape)
    for e in range(experts):
        for o in range(outputs):
            for block in range(width // BLOCK):
                exponent = draw.randint(-6, 1)
                scales[e, o, block] = exponent + BIAS
                codes = [draw.randrange(16) for _ in range(BLOCK)]
                for place, code in enumerate(codes):
                    blocks[e, o, block, place // 2] |= code << (4 * (place % 2))  # the low half first
                    value[e, block * BLOCK + place, o] = FP4[code] * 2.0**exponent
    return blocks, scales, value


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A tiny GPT-OSS with packed experts on disk, and the weights that they stand for."""
    shape = GptOssConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=32, num_local_experts=2, num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("packed")
    torch.manual_seed(0)
    GptOssForCausalLM(shape).bfloat16().save_pretrained(folder)
    tensors, values, draw = load_file(folder / "model.safetensors"), {}, random.Random(0)
    for name in ("gate_up_proj", "down_proj"):
        full = f"model.layers.0.mlp.experts.{name}"
        blocks, scales, values[full] = pack(tuple(tensors.pop(full).shape), draw)
        tensors |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder, values


def build(folder, **changes):
    return build_model(ModelConfig(path=str(folder), **changes), 0, CPU)


def test_g15_packed_weights_load_as_the_bf16_values_they_stand_for_and_take_gradients(packed):
    folder, values = packed
    shape = AutoConfig.from_pretrained(folder)
    check_quantization(shape)
    assert loading_options(shape, CPU)["quantization_config"].dequantize  # kernels for packed weights may be installed
    model = build(folder)
    for name, value in values.items():
        parameter = model.get_parameter(name)
        assert parameter.dtype == torch.bfloat16 and parameter.requires_grad
        assert torch.equal(parameter.float(), value)  # four bits times a power of two: bf16 holds them exactly


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="unpacks on a CUDA device")
def test_packed_weights_are_unpacked_on_the_device_to_the_same_bits(packed):
    device = torch.device("cuda", 0)
    there, here = (build_model(ModelConfig(path=str(packed[0])), 0, where).state_dict() for where in (device, CPU))
    assert all(torch.equal(there[name].cpu(), value) for name, value in here.items())
    assert {value.device for value in there.values()} == {device}


def test_packed_weights_are_unpacked_where_they_stay_and_others_are_mapped_from_the_file(packed, monkeypatch):
    """Else each rank of a host would hold a whole unpacked model in its memory."""
    load, asked = AutoModelForCausalLM.from_pretrained, []
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda path, **options: asked.append(options) or load(path, **options)
    )
    build(packed[0])
    assert [options["device_map"] for options in asked] == [{"": CPU}]
    fourth = torch.device("cuda", 3)
    assert loading_options(AutoConfig.from_pretrained(packed[0]), fourth)["device_map"] == {"": fourth}
    assert loading_options(Qwen3Config(), fourth) == {}


def test_g15_saved_without_the_entry_it_reloads_equal(packed, tmp_path):
    model = build(packed[0])
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "blocks" in name or "scales" in name]
    again = build(tmp_path).state_dict()
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


def test_random_weights_of_a_packed_checkpoints_shape_are_saved_without_the_entry_too(packed, tmp_path):
    build(packed[0], random_weights=True).save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_other_packings_are_refused_with_the_mend():
    with pytest.raises(ValueError, match=r"packed by gptq.*unquantized"):
        check_quantization(Qwen3Config(quantization_config={"quant_method": "gptq", "bits": 4}))
    check_quantization(Qwen3Config())
