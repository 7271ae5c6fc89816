"""The training run: read, step, log, evaluate, save; and go on where a run was cut off."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, astuple
from itertools import islice
from typing import Any

import torch

from meseta import checkpoint
from meseta.checkpoint.older import OlderCheckpoint
from meseta.checkpoint.store.names import checkpoint_path
from meseta.comm import World
from meseta.comm.dense_shards import sum_over_parts
from meseta.comm.listed import Unlisted
from meseta.comm.recording import show_record
from meseta.config import RunConfig
from meseta.data.dataset.encoding import Encoding
from meseta.data.read.batch_reader import Batches
from meseta.data.read.selection import calibration_shift
from meseta.machine.remote import Location
from meseta.measure.step_threads import StepThreads
from meseta.optim.dense import make_dense_optimizer
from meseta.pipeline import Pipeline, Step
from meseta.pipeline.agreement import LateNonFiniteLoss
from meseta.pipeline.carried import Carried
from meseta.report import write_report
from meseta.spec import MesetaError
from meseta.telemetry.lines import EvalLine, Line, TrainLine
from meseta.telemetry.splits import TEST
from meseta.telemetry.summary import SUMMARY_NAME, Best, Chosen, RunSummary, TeacherFigures, read_summary
from meseta.telemetry.timeline import StepRange
from meseta.train import resuming
from meseta.train.decisions import Decisions, chosen_by_evaluations, is_evaluation_due
from meseta.train.evaluate import check_segments, evaluate
from meseta.train.outside.profile import Profiler, choose_steps
from meseta.train.outside.tensorboard import TensorBoard
from meseta.train.progress import TrainProgress
from meseta.train.run_dir import RunDir
from meseta.train.running import RunningFigures, TrainingClock
from meseta.train.saving import Saver
from meseta.train.setup.build import (
    count_steps,
    make_clip,
    make_reader,
    place_model,
    plan_model,
    set_learning_rates,
    task_weights,
)
from meseta.train.setup.precision import STATE, note_bfloat16, settle_dense_dtype
from meseta.train.setup.source import source_of
from meseta.train.state import (
    dense_tensors,
    ids_outside,
    num_clamped,
    random_state,
    restore,
    set_random_state,
    told_of_step,
)
from meseta.train.stopping import check_stopping
from meseta.train.trained_on import STATE_KEY, check_encoding, check_rows, open_dataset

SHOWN_FIGURES = {"auc", "ne", "logloss", "calibration", "num_samples"}
"""Of an evaluation, at the end of a run."""


class Trainer:
    """One run of one config. Every rank builds one and calls `run`."""

    def __init__(
        self, config: RunConfig, world: World, *, with_test: bool = True, profile: StepRange | bool = False
    ) -> None:
        """Open the data, place the tables, take up the newest checkpoint of run_dir if there is one.

        Unless `with_test`, the test split is left alone where the data have a split valid, which then decides. Of some
        steps, where `profile` says so, a timeline is written.
        Raises MesetaError, on all ranks, for data, plans or checkpoints that do not fit the config, for a new run in
        bfloat16 where that does not pay, and for a run_dir in which another run is at work.
        """
        torch.manual_seed(config.seed)
        self._unlisted_before = Unlisted.count
        with resuming.repeated_reads(config), ExitStack() as held:  # released when the run ends or is refused
            self.config = config = settle_dense_dtype(config, world)
            self.world, self.run_dir = world, RunDir(config.run_dir, config.checkpoints)
            self.dataset = open_dataset(config, world)
            self.dataset.check_labels()
            self._meet(world.from_first(lambda: resuming.newest_of_run(self.run_dir)))
            self._attempt = source_of(config.data).attempt(config.run_dir, world)
            self.reader = make_reader(self.config, self.dataset, "train", self.world, self._attempt)
            self._read_from = resuming.seek(self.reader, self._met)
            self._trained_to = self.reader.position
            """Where the reader stands after the last batch that was trained; it may have read further."""
            self.step = 0
            self.num_samples = 0
            self.clock = TrainingClock()
            self._best_position: tuple[int, int] | None = None
            self._lr_factor = 1.0
            held.callback(self.run_dir.unlock)
            # Before anything is read: who is refused turns nobody away at the dispatcher.
            self.world.on_first(self.run_dir.lock)
            held.callback(lambda: self._batches.close())  # noqa: PLW0108  `_resume` may begin others
            self._batches = self._begin_to_read()  # while the model is made
            self._make_parts(with_test)
            held.callback(self.saver.close)
            if self.board is not None:
                held.callback(self.board.close)
            self._former_optimizers = self._resume()
            self.num_steps = count_steps(config, self.reader, self.step)
            profiled = choose_steps(profile, self.step, self.num_steps, self._why_over())
            self.profiler = Profiler(profiled, self.run_dir, world, self.pipeline.times, self.step, self.clock)
            self._held = held.pop_all()
        self._logged = (self.step, self.num_samples)
        self.clock.start()

    def _make_parts(self, with_test: bool) -> None:
        """Model, step, metrics, saver."""
        config, world = self.config, self.world
        planner, plan = plan_model(config, self.dataset, world)
        self._predicted = planner.predict(plan)
        self.model = place_model(planner, plan, world)
        over_parts = sum_over_parts(self.model.parameters(), world)
        self.optimizer = make_dense_optimizer(config.dense.optimizer, self.model.parameters(), over_parts)
        weights = task_weights(config, self.dataset)
        clip = make_clip(config, world, over_parts)
        self.overlap = planner.overlap
        self.pipeline = Pipeline(
            self.model,
            self.optimizer,
            world,
            task_weights=weights,
            clip=clip,
            accumulate_steps=config.train.accumulate_steps,
            overlap=self.overlap.hidden,
        )
        self.pipeline.num_masked_tasks = self.dataset.num_masked_tasks
        self.pipeline.stale = bool(config.pipeline.stale)
        self._step_threads = StepThreads()
        self.decisions = Decisions(config, [name for name, split in self.dataset.splits.items() if split.num_rows])
        self.best = self.decisions.best
        evaluated = dict.fromkeys([self.decisions.split, *([TEST] if with_test else [])])
        self.eval_readers = {
            split: make_reader(config, self.dataset, split, world, self._attempt) for split in evaluated
        }
        check_segments(self.dataset, config.metrics.segments)
        check_stopping(config.train.early_stopping, self.dataset)
        self.figures = RunningFigures(self.dataset.labels, weights, world)
        self.board = TensorBoard(self.run_dir.path / "tensorboard") if config.train.tensorboard else None
        kept = config.checkpoint.model_copy(update={"keep_best": config.keeps_best})
        self.saver = Saver(kept, self.run_dir.checkpoints, world)

    def run(self) -> dict[str, Any]:
        """Train to the end, save, evaluate, write the report; returns what summary.json holds.

        Raises MesetaError, on all ranks and naming the step, for what training meets: ids outside their table, a loss
        that is not finite, files that cannot be read or written; and Stopped, on all ranks and with everything saved,
        when SIGTERM or SIGINT came to any of them.
        """
        with self._held:
            return self._run().to_dict()

    def measure(self, *, best: bool) -> EvalLine:
        """Train to the end, and return the best or the last evaluation of the split that decides.

        For a trial: no weights are saved but those that the config asks for on the way. Raises as `run` does.
        """
        with self._held:
            self.world.on_first(self._begin)
            with TrainProgress(self.num_steps, first_step=self.step, shown=self.world.rank == 0) as progress:
                with self.saver.interruption:
                    self._train(progress)
                if self.saver.stopping:
                    raise self.saver.stop()
                line = self._evaluation(self.decisions.split, progress)
        step = self.best.step if best and self.best.step is not None else self.step
        lines = self.world.from_first(lambda: self._evaluations(self.decisions.split, step))
        return lines[0] if lines else line

    def begin_with(self, fill: Callable[[Any], None]) -> Location:
        """Write the first checkpoint of a run, of the model as `fill` leaves it; `run` goes on from there.

        Nothing is written where `fill` raises.
        """
        with self._held:
            fill(self.model)
            self.world.on_first(self._begin)
            self._save()
            self.saver.wait()
            self.saver.copy_all()
        return checkpoint_path(self.run_dir.checkpoints, self.step)

    def _run(self) -> RunSummary:
        former = self.world.from_first(lambda: read_summary(self.run_dir.path))
        self.world.on_first(self._begin)
        show_record(self.run_dir.path, self.step)
        first = self.step
        with TrainProgress(self.num_steps, first_step=first, shown=self.world.rank == 0) as progress:
            if first:
                is_past_best = self.config.train.finish == "best" and self.best.step not in (None, first)
                other = f" (the last; the best so far is step {self.best.step})" if is_past_best else ""
                progress.say(f"going on from step {first}{other}, {self.run_dir.checkpoints}")
            if note := note_bfloat16(self.config, self.world):
                progress.say(note)
            with self.saver.interruption:
                self._train(progress)
                if self.step > self.saver.saved_step:
                    self._save()
                self.saver.wait()
            progress.warn(self.saver.notes())
            if self.saver.stopping:
                self.saver.copy_all()
                saved = checkpoint.latest(self.run_dir.checkpoints)
                progress.say(f"stopped after step {self.step}, saved in {saved}; the same command goes on from there")
                raise self.saver.stop()
            outside = self._ids_outside()
            evaluations = self._finish(progress)
        parts = self.pipeline.times, self.world.transfers, self.reader.row_waits
        life = zip(*self.world.gather_objects([part.over_life() for part in parts]), strict=True)
        stages, transfers, waits = map(list, life)
        if any(stages):
            known = {"transfers_by_rank": transfers, "row_waits_by_rank": waits}
            sent = {name: of_ranks for name, of_ranks in known.items() if any(of_ranks)}
            timed: dict[str, Any] = {"stages_s_by_rank": stages, **sent, "predicted": self._predicted}
        else:  # all steps were done before, and timed then
            timed = {} if former is None or former.num_steps != self.step else former.timed
        summary = self._summary(evaluations, outside, timed)
        self.world.on_first(lambda: self.run_dir.write_json(SUMMARY_NAME, summary.to_dict()))
        self.world.on_first(lambda: write_report(self.run_dir.path))
        self.saver.copy_all()
        return summary

    def _begin(self) -> None:
        """What is known before the first step, and the metrics up to it."""
        config, former, embeddings = self.config, self._former_optimizers, self.model.embeddings
        tables, plan = embeddings.tables, embeddings.plan
        if former is not None:
            config = resuming.meet_changes(self.run_dir, config, former, tables, self._why_over())
            if self._why_over() is None:
                resuming.meet_layout(self.run_dir, plan)
        self.run_dir.begin(config, self.dataset, plan.to_dict(), str(self.world.device))
        self.run_dir.forget_after(self.step, self.num_steps)
        if self.board is not None:
            self.board.begin(self.run_dir.lines())

    def _finish(self, progress: TrainProgress) -> dict[str, EvalLine]:
        """The evaluations, by split, of the weights that the run ends with: the last, or the best that were
        evaluated."""
        self._evaluation(self.decisions.split, progress)
        if self.config.train.finish == "best" and self.best.step not in (None, self.step):
            path = checkpoint_path(self.run_dir.checkpoints, self.best.step)
            state = restore(path, self.model, None, self.world)  # training does not go on from there
            self._best_position = state["step"], state["num_samples"]
            progress.say(f"took the best weights: {self.decisions.split} {self.best.told}")
        return {split: self._evaluation(split, progress) for split in self.eval_readers}

    @property
    def _position(self) -> tuple[int, int]:
        """Steps and samples that the weights have learned from."""
        return self._best_position or (self.step, self.num_samples)

    def _evaluation(self, split: str, progress: TrainProgress) -> EvalLine:
        """Of the weights as they are: the line of metrics.jsonl, made now where it is not there."""
        made = self.world.from_first(lambda: self._evaluations(split, self._position[0]))
        return made[0] if made else self._evaluate(split, progress)

    def _evaluations(self, split: str, step: int) -> list[EvalLine]:
        """Lines of metrics.jsonl, the newest first, about the weights after `step` steps."""
        lines = [line for line in self.run_dir.evaluations() if line.model_fields_set >= SHOWN_FIGURES]
        return [line for line in reversed(lines) if (line.split, line.step) == (split, step)]

    def _train(self, progress: TrainProgress) -> None:
        """The loop over steps."""
        self._logged = (self.step, self.num_samples)
        self.clock.start()
        batches = islice(self._batches, self.num_steps - self.step + self.config.pipeline.stale)
        with closing(self.pipeline.steps(batches, schedule=self._set_rates, votes=self.saver.flags)) as steps:
            while self.step < self.num_steps and not (self.best.ends_training or self.saver.stopping):
                self.profiler.reach(self.step, progress.say)
                self._record(self._run_step(steps))
                if self.step % self.config.train.log_every_steps == 0 or self.step == self.num_steps:
                    self._log(progress)
                progress.step(self.step)
                progress.warn(self.saver.notes())
                is_due = self.step < self.num_steps
                if is_due and self._is_evaluation_due():
                    with self.clock.stopped():
                        self._evaluate(self.decisions.split, progress)
                if is_due and self.saver.is_due(self.step, is_best=self.best.step == self.step):
                    with self.clock.stopped():
                        self._save()
            self._settle()
            self.pipeline.carry()
        self.profiler.close(self.step, progress.say)
        if self.best.ends_training and self.step < self.num_steps:
            progress.say(f"stopped at step {self.step}: {self.best}")

    def _set_rates(self) -> float:
        """Those of the step that comes; returns what multiplies those of tables."""
        falls = self.decisions.num_falls
        self._lr_factor = set_learning_rates(self.config, self.optimizer, self.step, self.num_steps, falls)
        return self._lr_factor

    def _is_evaluation_due(self) -> bool:
        num_read = self.reader.num_batches_until(self._trained_to)
        return is_evaluation_due(self.config.train, self.step, num_read, self.reader.num_batches)

    def _run_step(self, steps: Iterator[Step]) -> Step:
        """One step; what goes wrong in it is told with its number and the way back."""
        try:
            with self._step_threads:
                result = next(steps)
            self.saver.apply_agreed(result.votes)
            return result
        except MesetaError as error:
            raise self._told_of_step(error) from None

    def _settle(self) -> None:
        """Put every update in place; raises MesetaError where a GPU has left out the last one."""
        try:
            self.pipeline.settle()
        except LateNonFiniteLoss as error:
            raise self._told_of_step(error) from None

    def _told_of_step(self, error: MesetaError) -> MesetaError:
        self.saver.close()
        batch = self.pipeline.batch
        return told_of_step(error, self.step, batch, self.dataset, self.run_dir.checkpoints, self.world)

    def _record(self, result: Step) -> None:
        self.step += 1
        self.figures.add(result.logits, result.batch, result.agreement)
        self.num_samples += result.num_samples
        self._trained_to = result.batch.position or self._trained_to

    def _log(self, progress: TrainProgress) -> None:
        """One line of metrics.jsonl over the samples since the last one."""
        self._settle()
        figures = self.figures.take()
        # A window that was taken up from a checkpoint is older than the clock.
        first_step, first_sample = self._logged
        elapsed_s, num_steps = self.clock.lap(), self.step - first_step
        if outside := self._ids_outside():
            figures["ids_outside"] = outside
        if self.world.size > 1:
            figures["transfers"] = self.world.transfers.take()
        figures |= self.figures.take_row_traffic(self.model.embeddings, num_steps)
        figures |= {"row_waits": waits} if (waits := self.reader.row_waits.take(num_steps)) else {}
        line = TrainLine(
            kind="train",
            step=self.step,
            num_samples=self.num_samples,
            time_s=self.clock.train_s,
            **figures,
            samples_per_s=(self.num_samples - first_sample) / elapsed_s,
            seconds_per_step=elapsed_s / max(num_steps, 1),
            lr_dense=self.optimizer.param_groups[0]["lr"],
            lr_sparse=self.config.embedding.optimizer.lr * self._lr_factor,
            stages_s=self.pipeline.times.take(),
        )
        self._write(line, progress)
        self._logged = (self.step, self.num_samples)
        self.clock.start()

    def _evaluate(self, split: str, progress: TrainProgress) -> EvalLine:
        """Metrics over a whole split, one line of metrics.jsonl."""
        start_s = time.perf_counter()
        self._settle()
        shift = calibration_shift(self.config.data.negative_keep)
        found = evaluate(self.model, self.eval_readers[split], self.world, self.config.metrics, shift)
        step, num_samples = self._position
        line = EvalLine(
            kind="eval",
            step=step,
            split=split,
            **found.to_dict(),
            time_s=time.perf_counter() - start_s,
            num_samples_trained=num_samples,
        )
        self._write(line, progress)
        self._decide(line)
        return line

    def _decide(self, line: EvalLine) -> None:
        """What follows from an evaluation after the steps done."""
        self.decisions.update(line, on_the_way=self._is_evaluation_due())

    def _write(self, line: Line, progress: TrainProgress) -> None:
        if self.world.rank == 0:
            self.run_dir.append_metrics(line)
            if self.board is not None:
                self.board.add(line)
        progress.log(line)

    def _ids_outside(self) -> dict[str, int]:
        """Of training, by feature, over all ranks. Collective."""
        embeddings = self.model.embeddings
        return ids_outside(embeddings.features, embeddings.num_outside, self.world)

    def _save(self) -> None:
        """A checkpoint that goes on bit for bit, in the middle of an epoch and of a metric window too."""
        embeddings = self.model.embeddings
        self._settle()
        state = {
            "reader": self.reader.get_state(self._trained_to),
            "num_samples": self.num_samples,
            "embedding_step": embeddings.step,
            "ids_outside": self._ids_outside(),
            "train_s": self.clock.train_s + self.clock.lap_s,
            "dense_optimizer": type(self.optimizer).__name__,
            STATE: self.config.dense.dtype,
            "learning_rates": {"embedding": self._lr_factor, "dense": self.optimizer.param_groups[0]["lr"]},
            "random": random_state(),
            STATE_KEY: Encoding.of(self.dataset).to_dict(),
            **self.decisions.get_state(),
        }
        dense = {**dense_tensors(self.model, self.optimizer, self.world), **self.figures.tensors()}
        is_last = self.step == self.num_steps or self.best.ends_training
        answers = self.pipeline.carry()
        carried = None if answers is None else answers.tensors()
        self.saver.save(self.step, embeddings, dense, state, self.best.step, is_last=is_last, carried=carried)

    def _meet(self, path: Location | None) -> None:
        """Raise MesetaError, on all ranks, where the checkpoint that is to be gone on with is of other data."""
        self._met = path
        if self._met is not None:
            check_encoding(self.run_dir, self._met, self.dataset, self.world)
            check_rows(self.run_dir, self.dataset, self.world)

    def _resume(self) -> dict[str, Any] | None:
        """Take up the newest checkpoint, if there is one; returns the row optimizers that tables had there."""
        self.world.on_first(self.saver.fetch)
        path = self.world.from_first(lambda: checkpoint.newest(self.run_dir.checkpoints))
        if path is None:
            return None
        resuming.check_resume(self.config, path)
        if path != self._met:  # a mirror had it, or it is an older one
            self._meet(path)
        since_whole = self.saver.marks_since_whole
        try:
            state = restore(path, self.model, self.optimizer, self.world, marks_since_whole=since_whole)
        except OlderCheckpoint as damaged:
            resuming.go_back(self.config, damaged, self.world)
            return self._resume()
        resuming.check_model(self.run_dir, self.config, self.world)
        self.step = self.saver.take_up(state)
        self.num_samples = state["num_samples"]
        self.clock.train_s = state["train_s"]
        if state["reader"] != self._read_from:  # another checkpoint than was met first, or it is refused here
            self._batches.close()
            self.reader.set_state(state["reader"])
            self._trained_to = self.reader.position
            self._batches = self._begin_to_read()
        if self.config.pipeline.stale and state["carried"] is not None:
            self.pipeline.carried = Carried.of_tensors(path, state["carried"], self.model.embeddings)
        set_random_state(state["random"])
        self.figures.set_tensors(state["dense"])
        self.decisions.set_state(state)
        for line in self.world.from_first(lambda: self._evaluations(self.decisions.split, self.step)):
            self._decide(line)  # the one that ended the run which goes on from here
        if self.config.train.finish == "best":
            resuming.check_best(self.run_dir, self.best.step, self.step, self.world)
        return dict(state["optimizers"])

    def _why_over(self) -> resuming.Over | None:
        return resuming.Over.of(self.config, self.step, self.num_steps, self.best)

    def _begin_to_read(self) -> Batches:
        """The batches of the run; where lookups are one update late, and one more."""
        return self.reader.epochs(self.config.train.epochs + self.config.pipeline.stale)

    def _summary(
        self, evaluations: Mapping[str, EvalLine], outside: dict[str, int], timed: Mapping[str, Any]
    ) -> RunSummary:
        teacher, chosen = self.dataset.teacher, chosen_by_evaluations(self.config)
        parts: dict[str, Any] = {**evaluations, **timed}
        if chosen:
            parts["chosen"] = Chosen(split=self.decisions.split, what=chosen)
        if self.world.size > 1:
            parts["overlap"] = asdict(self.overlap)
        if any(astuple(self.reader.left_out)):
            parts["rows_left_out"] = asdict(self.reader.left_out)
        best, newest = self._best_position, checkpoint.newest(self.run_dir.checkpoints)
        return RunSummary(
            best=Best(**{key: value for key, value in self.best.get_state().items() if key != "num_stale"}),
            teacher=None if teacher is None else TeacherFigures(auc=teacher.auc, ne=teacher.ne),
            num_steps=self.step,
            num_samples=self.num_samples,
            train_s=self.clock.train_s,
            samples_per_s=self.num_samples / self.clock.train_s if self.clock.train_s else None,
            num_ranks=self.world.size,
            unlisted=Unlisted.count - self._unlisted_before,
            clamped=num_clamped(self.model.embeddings.clamped, self.world),
            ids_outside=outside,
            checkpoint=str(newest if best is None else checkpoint_path(self.run_dir.checkpoints, best[0])),
            **parts,
        )
