"""scripts/prepare_model.py: a GGUF file becomes a folder that computes the same, and what cannot is one line."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from scripts import prepare_model

gguf = pytest.importorskip("gguf", reason="gguf is not installed: requirements/models.txt")
LAYERS, HEADS, KEY_HEADS, WIDTH = 2, 4, 2, 8
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def interleaved(weight, heads):
    """GGUF's order of the rows of q and k."""
    return weight.reshape(heads, 2, WIDTH // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, words) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, *[1] * (len(words) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(LAYERS):
        for ours, theirs in NAMES.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(theirs)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", interleaved(weight, heads) if heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_model_computes_what_the_model_in_the_file_computes(tmp_path):
    words = ["<s>", "<|endoftext|>", *"abcdefghijklm", "ab"]
    shape = LlamaConfig(
        vocab_size=len(words), hidden_size=HEADS * WIDTH, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, tie_word_embeddings=True, rms_norm_eps=1e-6,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = LlamaForCausalLM(shape).eval()
    write_gguf(tmp_path / "tiny.gguf", model, words)
    prepare_model.convert(tmp_path / "tiny.gguf", tmp_path / "out", "float32")
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[2, 5, 9, 3]])
    torch.testing.assert_close(copy(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(words)
    assert "quantization_config" not in (tmp_path / "out/config.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.gguf", "--out", "new"], ["nothing.gguf", "no file", "smollm2-135m"]),
        (["nothing.gguf"], ["--out", "name the folder"]),
        (["smollm2-135m", "--out", "taken"], ["--out=taken", "already"]),
        (["broken.gguf", "--out", "new"], ["broken.gguf", "cannot be converted"]),
    ],
)
def test_what_cannot_be_prepared_is_one_line(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, but not really")
    assert prepare_model.main(arguments) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and all(word in message for word in words)
    assert not (tmp_path / "new").exists()
