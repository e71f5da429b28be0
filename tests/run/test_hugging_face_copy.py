"""The copy in a checkpoint is the trained policy: plain transformers, in a process of its own, decodes the same."""

from __future__ import annotations

import json
import subprocess
import sys

from rollout.records import SamplingConfig, Work
from tests.support.launch import ROOT, run
from tools import tool_schema
from trainer import Trainer

# Nothing of ours: what a user of the checkpoint would write.
STRANGER = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
asked, turns = json.load(sys.stdin), {}
for folder in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for text in asked["texts"]:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tools=asked["tools"], add_generation_prompt=True,
            return_tensors="pt", return_dict=False,
        )
        mask = torch.ones_like(prompt)
        out = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=asked["most"])
        turns.setdefault(folder, []).append([prompt[0].tolist(), out[0, prompt.shape[1]:].tolist()])
print(json.dumps({"turns": turns, "ours": sorted({"main", "policy", "modeling", "rollout"} & set(sys.modules))}))
"""


def test_the_saved_copy_decodes_greedily_what_the_live_weights_decode(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    live = {}
    inner = Trainer.run

    def then_decode(self, *words):
        inner(self, *words)
        greedy = SamplingConfig(
            max_new_tokens=30, temperature=0.0, n_samples_per_prompt=1, max_turns=1, context_length=160, seed=0
        )
        live["texts"] = [problem.prompt for problem in self._parts.data.problems[:12]]
        live["tools"] = [tool_schema(self.config.tool)]
        live["records"] = self._parts.sample(self._parts.data.prompts[:12], 0, Work(), greedy, ())

    monkeypatch.setattr(Trainer, "run", then_decode)
    assert run(tmp_path, "train.steps=2", "train.check=false", "train.learning_rate=2e-3") == 0
    asked = {"texts": live["texts"], "tools": live["tools"], "most": 30}
    copy, before = str(tmp_path / "checkpoints/step_2"), str(ROOT / "models/tiny_qwen3")
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, copy, before], cwd=tmp_path, input=json.dumps(asked), capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["ours"] == []
    ours = [[list(r.token_ids[: r.turns[0].start]), list(r.token_ids[r.turns[0].start :])] for r in live["records"]]
    assert found["turns"][copy] == ours
    assert found["turns"][before] != ours, "training must have changed what is decoded, or equality shows nothing"
