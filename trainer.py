"""The step and the run: sample, score, update, write.

Every rank samples its share of the step's prompts; the records are then gathered, sorted and scored on all ranks
alike, so that a step's numbers do not depend on the number of ranks or on how long tools took.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from config import TrainConfig
from data import ProblemStream, TrainingData
from evaluation import grading, scores
from reward import Grade, score
from rollout.records import RolloutRecord, SamplingConfig
from run import checkpoint
from run.badsteps import BadSteps, InfraError, check_sandbox
from run.files import say
from run.ranks import Ranks
from run.signals import Interruption, Request
from run.stretches import begin_stretch
from run.writers import RunWriter
from update import groups
from update.batch import by_trajectory
from update.minibatch import plan_updates, why_no_update
from update.update import UpdateStats, update

if TYPE_CHECKING:
    from startup.building import Parts


class Trainer:
    """Trains with the parts that main.py has built. One per rank."""

    def __init__(self, parts: Parts, run_dir: Path, writer: RunWriter | None):
        """writer: on rank 0; None on the others."""
        self.config, self.policy, self.chat = parts.config, parts.policy, parts.chat
        self.data, self.eval_data, self.run_dir = parts.data, parts.eval_data, run_dir
        self.ranks = Ranks()
        self.stream = ProblemStream(len(self.data.problems), self.config.train.seed, self.config.data.shuffle)
        self._parts, self._writer = parts, writer
        self._store = checkpoint.CheckpointStore(
            run_dir, parts.policy, parts.tokenizer.save_pretrained, rank=self.ranks.rank,
            gather=self.ranks.gather, keep=self.config.train.keep_checkpoints,
        )  # fmt: skip
        self._bad_steps = BadSteps(run_dir, self.ranks.rank, self.config.train.max_bad_steps)
        self._seconds: dict[str, float] = {}
        self._said_failure = False  # of reward.function

    def train(self, resume_from: Path | None, interruption: Interruption) -> None:
        """The whole run, from the checkpoint `resume_from` or from the start."""
        first, steps = self.resume(resume_from) if resume_from else 0, self.config.train.steps
        if self._writer and first >= steps:
            say(f"nothing left to do: {first} steps are done and train.steps={steps}")
        elif self._writer:
            begin_stretch(self.run_dir, first + 1, self.config.to_json())
        self.run(first, interruption)
        if self._writer and (self.run_dir / "metrics.jsonl").exists():
            say(f"the run is in {self.run_dir}; python main.py report {self.run_dir} shows it")

    def resume(self, folder: Path) -> int:
        """Continues from a checkpoint; returns the steps already taken."""
        state = checkpoint.load(folder, self.policy, self.ranks.rank, self.ranks.gather)
        if state.get("data") != self.data.digest():
            raise checkpoint.CheckpointError(
                f"{folder}: was written with other problems or prompts than these ({len(self.data.problems)} now), so "
                f"the data cursor would be wrong; restore them, or start a new run with model.path={folder}"
            )
        if self._writer:
            self.ranks.attempt(self._writer.rewind, state["step"])
        self.ranks.raise_any()
        return state["step"]

    def run(self, first_step: int, interruption: Interruption) -> None:
        """Runs steps `first_step` (from 0) to the last, or until a signal or train.max_minutes asks for an end.

        A checkpoint is written while the next rollout runs, and is complete before the next update.
        """
        steps, gather = self.config.train.steps, self.ranks.gather
        if self.eval_data and self.config.eval.at_start and first_step == 0 and not interruption.ends(gather):
            figures = self.evaluate(0)
            if self._writer:
                shown = ("eval_avg_at_k", "eval_avg_low", "eval_avg_high", "eval_cut", "eval_boxless")
                say("  ".join(["before training", *(f"{name} {figures[name]:.4g}" for name in shown)]))
        interruption.begin()
        if interruption.ends(gather):
            if self._writer:
                say("ended before the first step; there is nothing new to save")
            return
        for step in range(first_step, steps):
            row = self._step_or_last_checkpoint(step)
            done = step + 1
            if self.eval_data and due(done, self.config.eval.every, steps):
                row |= self.evaluate(done)
            if self._writer:
                self.ranks.attempt(self._writer.metrics, row)
            self.ranks.raise_any()
            if self._writer and step == first_step and self.policy.device.type == "cuda":
                say(self._parts.memory.against_peak())
            self._bad_steps.check(done)
            request = interruption.agreed(gather)
            if request or due(done, self.config.train.save_every, steps):
                self._store.begin(done, {"score": row.get("eval_avg_at_k"), "data": self.data.digest()})
            if request is Request.SAVE and self._writer:
                say(f"step {done} is being saved beside the next one")
            if request is Request.STOP:
                break
        saved = self._store.finish()
        if saved and self._writer and done < steps:
            say(f"ended after step {done} of {steps}; --resume goes on from {saved}")

    def _step_or_last_checkpoint(self, step: int) -> dict[str, Any]:
        """`train_step`; on an error that all ranks raise alike, finishes a pending checkpoint, then re-raises."""
        try:
            return self.train_step(step)
        except (InfraError, grading.RewardError):
            self._store.finish()
            raise

    def train_step(self, step: int) -> dict[str, Any]:
        """One step; the metrics row. `step` counts from 0, the row's "step" from 1."""
        started = time.perf_counter()
        self._seconds.clear()
        sampled = self._sample_groups(step)
        with self._clock("save"):
            saved = self._store.finish()
        stats = lessons = None
        with self._clock("update"):
            updates = plan_updates(sampled.trained, self.config, self.ranks.world_size)
            mine = [parts[self.ranks.rank] for parts in updates]
        if self._parts.teacher and mine:
            with self._clock("teacher"):
                privileged = self.data.teacher_prompts
                lessons = self._parts.teacher.lessons(
                    mine, [privileged[i] for i in sampled.indices] if privileged else ()
                )
        with self._clock("update"):
            if mine:  # else no group of the step has two different rewards
                stats = update(self.policy, mine, self.config.loss, learning_rate(step, self.config.train), lessons)
        with self._clock("write"):
            if self._writer:
                problems = [self.data.problems[index] for index in sampled.indices]
                own = self.config.reward.function or self.config.tool.has_own
                rows = [problem.row for problem in problems] if own else None
                known = by_trajectory(updates, stats.entropies) if stats else {}
                self.ranks.attempt(
                    self._writer.trajectories, step + 1, sampled.records, sampled.scored,
                    [problem.answer for problem in problems], known, rows,
                )  # fmt: skip
        if stats:
            self.ranks.attempt(self._bad_steps.watch, step + 1, mine, stats)
        self._seconds["total"] = time.perf_counter() - started
        beside = {"checkpoint_seconds": round(self._store.seconds, 4)} if saved else {}  # seconds_save is the wait
        return self._row(step, sampled, stats) | beside

    def _sample_groups(self, step: int) -> groups.SampledStep:
        """The step's groups; with rollout.max_refills, equal ones are replaced by those of further problems."""
        rollout = self.config.rollout
        sampled = groups.SampledStep()
        wanted = self.stream.indices(step, rollout.prompts_per_step)
        while wanted:
            first = len(sampled.indices)
            sampled.indices += wanted
            records, grades = self._rollout(
                step, self.data, sampled.indices, SamplingConfig.of(self.config), ("rollout", "reward"), first
            )
            with self._clock("reward"):
                sampled.reward_errors += self._reward_errors(step, records, grades)
                scored = score(records, grades, self.config)
            trained = groups.without_equal_groups(scored) if rollout.max_refills else scored
            stats = groups.over_ranks(self.ranks.gather(asdict(self._parts.engine.stats)))
            sampled.add(records, scored, trained, stats)
            if sampled.rounds > rollout.max_refills:
                break
            missing = rollout.prompts_per_step - len(groups.by_prompt(sampled.trained))
            wanted = self.stream.refill(step, sampled.rounds, missing, sampled.indices)
        check_sandbox(sampled.records)
        return sampled

    def _rollout(
        self, step: int, data: TrainingData, indices: Sequence[int], sampling: SamplingConfig,
        clocks: tuple[str, str], first: int = 0,
    ) -> tuple[list[RolloutRecord], list[Grade]]:  # fmt: skip
        """Every rank's records and their grades in (prompt, sample) order; ranks draw the work from one counter.

        indices: the problem of each prompt_index
        clocks: the phases of sampling and of grading
        first: prompts before it were sampled by an earlier round of the step, and only keep their places
        """
        self.policy.eval()
        samples = sampling.n_samples_per_prompt
        work = self.ranks.deal(f"{sampling.seed} {step} {first}", len(indices) * samples, first * samples)
        grader = self._parts.grader
        grader.expect([data.problems[i] for i in indices])
        with self._clock(clocks[0]):
            rows = [data.problems[i].row for i in indices]
            mine = self._parts.sample([data.prompts[i] for i in indices], step, work, sampling, rows)
        with self._clock(clocks[1]):  # each rank its own, once: a user's reward may draw or ask a judge
            graded = list(zip(mine, grader.grades(mine), strict=True))
        with self._clock(clocks[0]):
            found = [pair for part in self.ranks.gather(graded) for pair in part]
            found.sort(key=lambda pair: (pair[0].prompt_index, pair[0].sample_index))
        return [record for record, _ in found], [grade for _, grade in found]

    def _reward_errors(self, step: int, records: Sequence[RolloutRecord], grades: Sequence[Grade]) -> Counter[str]:
        """Failures of reward.function by exception; says the run's first. Raises RewardError for too many."""
        counts, first = grading.failures(records, grades, self.chat.answer, step + 1)
        if first and self._writer and not self._said_failure:
            say(first)
            self._said_failure = True
        return Counter(counts)

    def evaluate(self, step: int) -> dict[str, float]:
        """The policy after `step` steps on eval.path; training state is not touched.

        Rank 0 writes the whole result to evaluations/step_N.json; returned are the figures of the metrics line.
        """
        assert self.eval_data is not None
        problems = self.eval_data.problems
        records, grades = self._rollout(
            step, self.eval_data, range(len(problems)), scores.eval_sampling(self.config), ("eval", "eval")
        )
        name = "on" if self.config.tool.offered else "off"
        evaluated = {name: scores.Evaluation.of(records, grades, problems, self.chat.answer)}
        found = scores.results(self.config, evaluated, step)
        if self._writer:
            self.ranks.attempt(scores.write_results, self.run_dir / f"evaluations/step_{step}.json", found)
        self.ranks.raise_any()
        figures = scores.metrics(found["scores"][name]) | {"seconds": self._seconds.pop("eval")}
        return {f"eval_{name}": value for name, value in figures.items()}

    def _row(self, step: int, sampled_step: groups.SampledStep, stats: UpdateStats | None) -> dict[str, Any]:
        records, scored = sampled_step.records, sampled_step.scored
        count = max(len(scored), 1)
        calls = [call for r in records for turn in r.turns for call in turn.calls]
        seconds = {f"seconds_{name}": round(value, 4) for name, value in self._seconds.items() if name != "total"}
        sampled = sum(r.num_sampled for r in records)
        row = {
            "step": step + 1,
            "epoch": self.stream.epoch(step + 1, self.config.rollout.prompts_per_step),
            "reward": sum(s.reward for s in scored) / count,
            "correct": sum(s.correct for s in scored) / count,
            "trajectories": len(records),
            "equal_groups": groups.equal_share(scored),
            "kept_trajectories": len(sampled_step.trained),
            "refills": sampled_step.rounds - 1,
            "sampled_tokens": sampled,
            "length": sum(len(r.token_ids) for r in records) / max(len(records), 1),
            "turns": sum(len(r.turns) for r in records) / max(len(records), 1),
            "tool_calls": len(calls),
            "tool_error_rate": sum(call.status != "ok" for call in calls) / max(len(calls), 1),
            "learning_rate": learning_rate(step, self.config.train),
            "skipped": stats is None,
            "stops": dict(Counter(str(r.stop) for r in records)),
            "reasons": groups.count_reasons(records, scored, sampled_step.reward_errors.total()),
            "tool_statuses": dict(Counter(call.status for call in calls)),
        }
        if self.config.reward.function:
            row["reward_errors"] = dict(sampled_step.reward_errors)
        row |= stats.row(self.config.loss) if stats else {"nothing_trained": why_no_update(scored, self.config)}
        if stats:
            row["update_tokens_per_second"] = stats.tokens / self._seconds["update"]
        if torch.cuda.is_available():
            row["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        row["rollout_tokens_per_second"] = sampled / self._seconds["rollout"]
        row |= {"seconds": round(self._seconds["total"], 4), **seconds}
        return row | sampled_step.rollout_row()

    @contextmanager
    def _clock(self, phase: str):
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started


def due(done: int, every: int, steps: int) -> bool:
    """Whether something that happens `every` steps (0: only after the last) happens after `done` steps."""
    return done == steps or (every > 0 and done % every == 0)


def learning_rate(step: int, train: TrainConfig) -> float:
    """The rate of step `step` (from 0): linear warm-up, then constant or linear to zero at train.steps."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.learning_rate
    return train.learning_rate * (train.steps - step) / (train.steps - train.warmup_steps)
