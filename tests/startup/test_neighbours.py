"""The check sees a log-prob that depends on the sequences beside it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from startup.neighbours import compared, processor


def parts(logprobs, device="cpu", dtype="float32"):
    policy = SimpleNamespace(
        device=torch.device(device), token_logprobs=lambda batch: SimpleNamespace(logprobs=logprobs(batch))
    )
    return SimpleNamespace(policy=policy, config=SimpleNamespace(model=SimpleNamespace(dtype=dtype)))


def packed(records):
    return SimpleNamespace(count=len(records), behaviour_logprobs=torch.zeros(len(records)))


def test_equal_numbers_pass_and_others_name_the_processor():
    [(state, text)] = compared(parts(lambda batch: torch.zeros(batch.count)), packed, [1, 2])
    assert state == "ok" and processor() in text
    [(state, text)] = compared(parts(lambda batch: torch.full((batch.count,), 1e-7 * batch.count)), packed, [1, 2])
    assert state == "FAIL" and processor() in text and "train.num_threads=1" in text and "\n" not in text


def test_pieces_that_differ_fail_and_a_gross_mismatch_is_left_to_its_own_finding():
    for gap, state in ((1e-6, "FAIL"), (1.0, "ok")):
        assert compared(parts(lambda batch, gap=gap: torch.full((batch.count,), gap)), packed, [1, 2])[0][0] == state


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_nothing_is_promised_elsewhere(dtype):
    assert compared(parts(None, dtype=dtype), packed, [1]) == []
