"""The teacher's pass: what it reads, where its weights are, and that nothing of it trains."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from config import DataConfig
from data import DataError, load_problems
from modeling.divergence import Measure
from policy import build_model
from startup import building
from tests.support.builders import record, scored
from tests.support.policies import CPU, assert_equal_gradients, gradients, step
from tests.support.taught import TINY, batches_of, leave_gradients, taught, train
from update.batch import ResponseTokenBatch
from update.teacher import Parked, Resident, RunningMean, privileged, with_prompts
from update.update import batch_loss

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = ["forward_kl", "reverse_kl", "jsd", "sampled"]


def batch_of(*spans: str) -> ResponseTokenBatch:
    records = [record(s, prompt=i, first_id=10 + 20 * i) for i, s in enumerate(spans)]
    return ResponseTokenBatch.from_rollout(records, [1.0] * len(records), [0.1] * len(records))


def test_other_prompts_keep_every_response_token_by_its_place_in_the_response():
    spans = ("PPAAOOA", "PA", "PPPAAAOAA")
    told = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]
    moved = with_prompts(batch_of(*spans), told)
    start = 0
    for row, (spans_of, prompt) in enumerate(zip(spans, told, strict=True)):
        response = record(spans_of, first_id=10 + 20 * row).token_ids[spans_of.index("A") :]
        whole = [*prompt, *response]
        length = len(whole) - 1
        assert moved.lengths[row] == length
        assert moved.input_ids[0, start : start + length].tolist() == whole[:-1]
        assert moved.position_ids[0, start : start + length].tolist() == list(range(length))
        mine = moved.rows == row
        places = (moved.predictors[mine] - start).tolist()
        assert [whole[place + 1] for place in places] == moved.targets[mine].tolist()  # each predicts its own target
        start += length
    assert sum(moved.lengths) == moved.input_ids.shape[1] == start


def test_the_policys_own_prompts_change_nothing():
    batch = batch_of("PPAAOOA", "PPPA")
    same = with_prompts(batch, [[10, 11], [30, 31, 32]])
    for field in dataclasses.fields(batch):
        before, after = getattr(batch, field.name), getattr(same, field.name)
        assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after, field.name


def test_privilege_holds_the_problems_answer_and_hint():
    problem = type("P", (), {"answer": "12", "hint": "add {them}"})
    assert privileged(" Known: {answer}. {hint} {other}", problem) == " Known: 12. add {them} {other}"


@pytest.mark.parametrize(("hint", "word"), [("add them", None), (3, "must be a string"), ("\\ud800", "surrogate")])
def test_hints_come_from_the_field_of_that_name(tmp_path, hint, word):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "1+1?", "answer": 2, "why": hint}).replace("\\\\", "\\"))
    config = DataConfig(path=str(path), hint_field="why")
    if word is None:
        assert load_problems(path, config)[0].hint == hint
    else:
        with pytest.raises(DataError, match=f"field 'why'.*{word}"):
            load_problems(path, config)
    assert load_problems(path, DataConfig(path=str(path)))[0].hint == ""


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_privilege_is_plain_self_distillation(kind):
    items = step()[::2]  # one of each prompt: siblings of the fixture have prompts of their own
    own = [list(s.record.token_ids[: s.record.turns[0].start]) for s in items]
    found = []
    for prompts in ((), own):
        policy, teacher = taught({"divergence": kind, "source": "base", "path": ""})
        train(policy, None, 1)  # away from the base
        found.append(leave_gradients(policy, teacher, batches_of(policy, items=items)[0], prompts))
    assert found[0] == found[1] != 0.0


def test_a_privileged_teacher_teaches_what_the_prompt_alone_does_not_say():
    policy, teacher = taught({"source": "live", "path": "", "privilege": "{answer}"})
    items = step()[::2]
    prompts = [[5, 6, 7, *s.record.token_ids[: s.record.turns[0].start]] for s in items]
    first, *_, last = train(policy, teacher, 8, prompts=prompts, items=items)
    assert first.teacher.divergence > 0.0
    plain = teacher.lessons([batches_of(policy, items=items)[0]], ())
    assert not torch.equal(
        plain[0][0].hidden, teacher.lessons([batches_of(policy, items=items)[0]], prompts)[0][0].hidden
    )
    assert last.teacher.divergence != first.teacher.divergence


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "sampled"])
def test_the_policy_as_its_own_teacher_has_nothing_to_learn(kind):
    policy, teacher = taught({"divergence": kind, "source": "base", "path": ""}, model={"random_weights": False})
    [batch] = batches_of(policy)[0]
    policy.train()
    batch = dataclasses.replace(batch, behaviour_logprobs=policy.frozen_logprobs(batch))
    assert leave_gradients(policy, teacher, [batch]) == 0.0
    assert all((g == 0).all() for g in gradients(policy).values())


def resized(tmp_path, rows: int) -> str:
    """The tiny model with a head of so many rows, the further ones random."""
    torch.manual_seed(rows)
    model = AutoModelForCausalLM.from_pretrained(TINY)
    model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(tmp_path / str(rows))
    return str(tmp_path / str(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_pad_the_policys_longer_head_are_read_and_are_no_lesson(kind, tmp_path):
    longer = resized(tmp_path, 352)
    policy, teacher = taught({"divergence": kind}, model={"path": longer, "random_weights": False})
    policy.model.base_model.norm.weight.data.mul_(1.1)
    spans = [("PPAAOOAAA", 20), ("PPAAAAAAA", 336)]  # ids 336 to 344, where the teacher has 0 to 338
    records = [record(text, sample=i, first_id=first) for i, (text, first) in enumerate(spans)]
    [batch] = batches_of(policy, items=scored(records, [1.0, -1.0]))[0]
    [[lesson]] = teacher.lessons([[batch]], ())
    out = policy.token_logprobs(batch, lesson if hasattr(lesson, "hidden") else None)
    value, columns = batch_loss(out, batch, out.logprobs.detach(), None, policy.config.loss, lesson)
    assert value.isfinite() and math.isfinite(teacher.gap(batch, ()))
    assert (batch.targets >= 339).sum() == 6
    assert torch.equal(columns.teacher_gap == 0.0, batch.targets >= 339)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_pad_the_teachers_longer_head_take_no_part(kind, tmp_path):
    found = []
    for path in (TINY, resized(tmp_path, 352)):
        policy, teacher = taught({"divergence": kind, "path": path}, model={"random_weights": False})
        batches = batches_of(policy)[0]
        found.append((leave_gradients(policy, teacher, batches), teacher.gap(batches[0], ())))
    assert found[0] == found[1]


@pytest.mark.parametrize(("placement", "kind"), [("offload", "jsd"), ("zero3", "jsd"), ("zero3", "sampled")])
def test_the_loss_is_bit_equal_wherever_the_weights_wait(placement, kind):
    found = []
    for place in ("gpu", placement):
        policy, teacher = taught({"divergence": kind, "placement": place})
        found.append((leave_gradients(policy, teacher, batches_of(policy)[0]), gradients(policy)))
    assert found[0][0] == found[1][0] != 0.0
    assert all(torch.equal(found[0][1][name], g) for name, g in found[1][1].items())


def test_a_teacher_that_zero_3_deals_out_leaves_the_policys_products_alone():
    """DeepSpeed's own choice is to put another `linear` in torch's place, for the whole process and for good."""
    before = torch.nn.functional.linear
    taught({"placement": "zero3"})
    assert torch.nn.functional.linear is before and before.__module__ != "deepspeed.runtime.zero.linear"


class Counted(nn.Module):
    """Two parameters that note where they are sent."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(2, 3, bias=False), nn.Linear(2, 2)

    def get_output_embeddings(self):
        return self.head


def test_parked_weights_are_on_the_device_for_a_pass_alone():
    model = Counted()
    before = [p.data_ptr() for p in model.parameters()]
    parked = Parked(model, DEVICE)
    waiting = [p.data_ptr() for p in model.parameters()]
    with parked() as head:
        assert {p.device.type for p in model.parameters()} == {DEVICE.type}
        assert head.shape == (3, 2) and not head.requires_grad
    with pytest.raises(RuntimeError, match="within the pass"), parked():
        raise RuntimeError("within the pass")
    after = [p.data_ptr() for p in model.parameters()]
    assert len(set(after)) == len(before) and {p.device.type for p in model.parameters()} == {"cpu"}
    with parked():
        pass
    assert [p.data_ptr() for p in model.parameters()] == after  # nothing is copied back: always the same host memory
    assert DEVICE.type == "cuda" or after == waiting == before


def test_resident_weights_stay_where_they_are():
    model = Counted()
    with Resident(model)() as head:
        assert head.data_ptr() == model.head.weight.data_ptr()


def test_the_running_mean_moves_by_its_share_before_each_pass_and_survives_a_save():
    live, copy = Counted(), Counted()
    copy.load_state_dict(live.state_dict())
    start = live.head.weight.detach().clone()
    mean = RunningMean(copy, live, 0.75, CPU, CPU)
    live.head.weight.data.add_(8.0)
    expected = start.clone()
    for _ in range(3):
        with mean() as head:
            expected.lerp_(live.head.weight.detach(), 0.25)
            assert torch.equal(head, expected)
    saved = {name: value.clone() for name, value in mean.state_dict().items()}
    fresh = Counted()
    again = RunningMean(fresh, live, 0.75, CPU, CPU)
    again.load_state_dict(saved)
    with mean() as one, again() as other:
        assert torch.equal(one, other)


def test_a_running_mean_in_bf16_is_kept_in_fp32():
    live, copy = Counted().bfloat16(), Counted().bfloat16()
    copy.load_state_dict(live.state_dict())
    mean = RunningMean(copy, live, 0.999, CPU, CPU)
    live.head.weight.data.mul_(2.0)
    for _ in range(20):
        with mean():
            pass
    moved = mean.state_dict()["head.weight"] / (live.head.weight.float() / 2)
    torch.testing.assert_close(moved, torch.full_like(moved, 2 - 0.999**20), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("source", ["model", "base", "ema"])
def test_nothing_of_a_teacher_has_a_gradient_and_the_policys_checkpoint_has_nothing_of_it(source, tmp_path):
    policy, teacher = taught({"source": source, "path": ""} if source != "model" else None)
    train(policy, teacher, 1)
    assert not any(p.requires_grad for p in teacher.model.parameters())
    policy.save(tmp_path)
    names = {file.name for file in (tmp_path / "engine").iterdir()}
    assert ("teacher_mean.pt" in names) == (source == "ema")
    held = sum(t.numel() for t in torch.load(next((tmp_path / "engine").glob("*model_states.pt")), weights_only=False)
               ["module"].values())  # fmt: skip
    assert held == sum(t.numel() for t in policy.model.state_dict().values())


def test_the_teacher_of_random_weights_is_not_the_policy():
    policy, teacher = taught()
    same = build_model(policy.config.model, policy.config.train.seed, CPU)
    mine, theirs = policy.model.get_input_embeddings().weight, teacher.model.get_input_embeddings().weight
    assert torch.equal(mine, same.get_input_embeddings().weight) and not torch.equal(mine, theirs)


def test_the_measure_is_the_one_of_the_settings_at_the_rollouts_temperature_unless_told():
    _, told = taught({"divergence": "jsd", "beta": 0.3, "temperature": 0.7, "top_k": 5})
    assert told.measure == Measure("jsd", 0.3, 0.7, 5)
    _, plain = taught(rollout={"temperature": 0.9})
    assert plain.measure == Measure("reverse_kl", 0.5, 0.9, 0)


def test_without_a_weight_there_is_no_teacher():
    policy, teacher = taught(weight=0.0)
    assert teacher is None
    assert building.build_teacher(policy.config, policy, CPU) is None


def test_adapters_are_off_in_the_pass_of_their_own_base():
    pytest.importorskip("peft")
    policy, teacher = taught({"source": "base", "path": ""}, lora={"rank": 2})
    [first] = [x[0] for x in teacher.lessons([batches_of(policy)[0]], ())]
    train(policy, teacher, 1, rate=1e-2)
    for layer in policy.model.base_model.layers:
        layer.self_attn.q_proj.lora_B["default"].weight.data.add_(0.1)
    [second] = [x[0] for x in teacher.lessons([batches_of(policy)[0]], ())]
    assert torch.equal(first.hidden, second.hidden)
    assert_equal_gradients({"x": second.head}, {"x": first.head})
