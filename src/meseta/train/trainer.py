"""Training loop of a run: read, train, log, evaluate and save."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import islice
from typing import Any, Literal

import torch

from meseta import checkpoint
from meseta.comm import World
from meseta.comm.recording import publish_record
from meseta.config import RunConfig
from meseta.measure.threads import StepThreads
from meseta.optim.dense import set_learning_rates
from meseta.pipeline import StepResult
from meseta.pipeline.losses import SkippedUpdate
from meseta.spec import MesetaError
from meseta.telemetry.metrics_file import EvalLine, Line, TrainLine, TrialProgress
from meseta.train import resuming
from meseta.train.background_metrics import BackgroundMetrics
from meseta.train.dataset_checks import encoding_state, open_dataset
from meseta.train.evaluate import check_segments, evaluate, logit_shift
from meseta.train.evaluation_tracker import (
    EvaluationTracker,
    check_early_stopping,
    is_evaluation_due,
)
from meseta.train.interop.profile import ProfiledSteps, Profiler, choose_profiled_steps
from meseta.train.observers import RunObservers
from meseta.train.progress import RateDrops, TrainProgress
from meseta.train.run_dir import RunDir
from meseta.train.run_summary import RunSummary, num_unknown_collectives, write_summary
from meseta.train.running_metrics import RunningMetrics, TrainingClock
from meseta.train.saving import CheckpointManager
from meseta.train.setup.build import (
    count_steps,
    estimate_remaining_samples,
    make_average,
    make_pipeline,
    make_reader,
    place_model,
    plan_model,
    read_packed,
    start_attempt,
    task_weights,
)
from meseta.train.setup.specs import DENSE_DTYPE_KEY, bfloat16_note, resolve_dense_dtype
from meseta.train.state import (
    add_step_context,
    dense_tensors,
    random_state,
    restore,
    sum_out_of_range_ids,
)

REQUIRED_EVAL_FIELDS = {"auc", "ne", "logloss", "calibration", "num_samples"}
"""Fields that a logged evaluation needs to be reused at the end of a run."""


class Trainer:
    """One run of one config. Every rank creates a trainer and calls `run`."""

    def __init__(
        self, config: RunConfig, world: World, *, with_test: bool = True, profile: ProfiledSteps = False
    ) -> None:
        """Open the data, shard the tables, and resume from the newest checkpoint of run_dir if there is one.

        Raises MesetaError, on all ranks, if data, plan or checkpoint do not fit the config, bfloat16 is slow, or
        another run uses run_dir.

        Args:
            config: Config of the run.
            world: Ranks of the run.
            with_test: Whether to evaluate the test split even if there is a validation split.
            profile: Steps to write a timeline of. `True` selects some automatically.
        """
        torch.manual_seed(config.seed)
        self.num_unknown_collectives_before = num_unknown_collectives()
        with resuming.retry_reads(config), ExitStack() as held:  # Released when the run ends or is refused.
            self.config = config = resolve_dense_dtype(config, world)
            self.world, self.run_dir = world, RunDir(config.run_dir, config.checkpoint_location)
            self.dataset = open_dataset(config, world)
            self.dataset.check_has_labels()
            newest = world.broadcast_from_rank_0(lambda: resuming.find_newest_checkpoint(self.run_dir))
            resuming.check_dataset(self.run_dir, newest, self.dataset, world)
            self._attempt = start_attempt(config, world)
            self.reader = make_reader(self.config, self.dataset, "train", self.world, self._attempt)
            start_position = resuming.seek_reader(self.reader, newest)
            # Position of the reader after the last trained batch. The reader itself may be ahead.
            self._trained_position = self.reader.position
            self.step = 0
            self.num_samples = 0
            self.started_from: str | None = None
            """Checkpoint of the parent whose weights this start has loaded."""
            self.continued: Any = None
            """`NewRowMeasurements` of a run that starts from another one."""
            self.clock = TrainingClock()
            self.best_position: tuple[int, int] | None = None
            self._lr_factor = 1.0
            # Evaluations of the validation split after which a trial pauses. `None` does not pause.
            self._num_evaluations_left: int | None = None
            held.callback(self.run_dir.unlock)
            # Lock before reading, so that a refused run does not replace the running one at the dispatcher.
            self.world.run_on_rank_0(self.run_dir.lock)
            held.callback(lambda: self._batches.close())  # noqa: PLW0108  `resume` may replace the iterator.
            self._start_reading()  # Reads while the model is created.
            self._build(with_test)
            held.callback(self.checkpoint_manager.close)
            held.callback(self.observers.close)
            held.callback(self.background_metrics.close)  # Before an error, write the lines of completed steps.
            self._saved_optimizers = resuming.resume(self, newest, start_position)
            if self.continued is not None:
                self.background_metrics.epoch_metrics = self.continued.epoch_metrics
            self.num_steps = count_steps(config, self.reader, self.step)
            profiled = choose_profiled_steps(profile, self.step, self.num_steps, self._completion_reason())
            self.profiler = Profiler(profiled, self.run_dir, world, self.pipeline.stage_times, self.step, self.clock)
            self._resources = held.pop_all()
        self._last_logged = (self.step, self.num_samples)
        self.clock.start()

    def _build(self, with_test: bool) -> None:
        config, world = self.config, self.world
        planner, plan = plan_model(config, self.dataset, world)
        self.predicted_step = planner.predict(plan)
        self.model = place_model(planner, plan, world)
        self.overlap = planner.overlap
        self.pipeline = make_pipeline(config, self.dataset, self.model, self.overlap.hidden, world)
        self.optimizer = self.pipeline.optimizer
        self.average = make_average(config, self.dataset, self.pipeline, world)
        self._step_threads = StepThreads()
        self.evaluation_tracker = EvaluationTracker(
            config, [name for name, split in self.dataset.splits.items() if split.num_rows]
        )
        self.early_stopping = self.evaluation_tracker.early_stopping
        evaluated = self.evaluation_tracker.evaluated_splits(with_test=with_test)
        self.eval_readers = {
            split: make_reader(config, self.dataset, split, world, self._attempt) for split in evaluated
        }
        check_segments(self.dataset, config.metrics.segments)
        check_early_stopping(config.train.early_stopping, self.dataset)
        self.running_metrics = RunningMetrics(self.dataset.labels, task_weights(config, self.dataset), world)
        self.background_metrics = BackgroundMetrics(self.running_metrics, world)
        self.observers = RunObservers(config, self.run_dir, world)
        kept = config.checkpoint.model_copy(update={"keep_best": config.keeps_best})
        self.checkpoint_manager = CheckpointManager(
            kept, self.run_dir.checkpoints, world, on_saved=self.observers.add_checkpoint
        )

    def run(self) -> dict[str, Any]:
        """Train to the end, save, evaluate and write the report. Return the content of summary.json.

        Raises MesetaError, on all ranks and with the number of the step, if training fails. Raises TrainingInterrupt,
        on all ranks and after a checkpoint, if any rank receives SIGTERM or SIGINT.
        """
        with self._resources:
            return self._run().to_dict()

    def run_trial(self, num_evaluations: int | None = None) -> TrialProgress:
        """Train until the validation split has been evaluated `num_evaluations` times in total, or to the end. Save the
        weights, from which another call or `run` continues.

        Raises as `run` does.
        """
        split = self.evaluation_tracker.split

        def evaluations() -> list[EvalLine]:
            return [line for line in self.run_dir.evaluations() if line.split == split]

        with self._resources:
            self.world.run_on_rank_0(self._prepare_run_dir)
            if num_evaluations is not None:
                made = self.world.broadcast_from_rank_0(lambda: len(evaluations()))
                self._num_evaluations_left = num_evaluations - made
            with self._open_progress(trial=True) as progress:
                with self.checkpoint_manager.signal_listener:
                    self._train(progress)
                    if self.step > self.checkpoint_manager.saved_step:
                        self._save()
                    self.checkpoint_manager.wait()
                if self.checkpoint_manager.is_stopping:
                    raise self.checkpoint_manager.make_interrupt()
                if not self._is_paused:
                    self._get_evaluation(split, progress)
        lines = self.world.broadcast_from_rank_0(evaluations)
        return TrialProgress(evaluations=tuple(lines), num_samples=self.num_samples, is_finished=not self._is_paused)

    def save_initial_checkpoint(self, fill: Callable[[Any], None]) -> None:
        """Write the first checkpoint of a run, as modified by `fill`, from which `run` resumes. Nothing is written if
        `fill` raises an error."""
        with self._resources:
            fill(self.model)
            if not self.model.embeddings.step:
                self.average.reset()
            self.world.run_on_rank_0(self._prepare_run_dir)
            self._save()
            self.checkpoint_manager.wait()
            self.checkpoint_manager.sync_mirror()

    def _run(self) -> RunSummary:
        former = self.world.broadcast_from_rank_0(self.run_dir.read_summary)
        self.world.run_on_rank_0(self._prepare_run_dir)
        publish_record(self.run_dir.path, self.step)
        self.observers.begin(self.step, self.num_steps, self.num_samples)
        first = self.step
        with self._open_progress() as progress:
            if first:
                is_past_best = self.config.train.finish == "best" and self.early_stopping.best_step not in (None, first)
                other = f" (the last; the best so far is step {self.early_stopping.best_step})" if is_past_best else ""
                progress.print_line(f"resuming from step {first}{other}, {self.run_dir.checkpoints}")
            elif self.started_from is not None:
                progress.print_line(f"starting from {self.started_from}")
                progress.warn(self.continued.measure_first())
            if note := bfloat16_note(self.config, self.world):
                progress.print_line(note)
            with self.checkpoint_manager.signal_listener:
                self._train(progress)
                if self.step > self.checkpoint_manager.saved_step:
                    self._save()
                self.checkpoint_manager.wait()
            progress.warn(self.checkpoint_manager.pop_warnings())
            if self.checkpoint_manager.is_stopping:
                self.checkpoint_manager.sync_mirror()
                saved = checkpoint.latest_complete(self.run_dir.checkpoints)
                progress.print_result(
                    f"stopped after step {self.step}, saved in {saved}; the same command resumes from there"
                )
                progress.warn(self.observers.close("interrupted"))
                raise self.checkpoint_manager.make_interrupt()
            outside = self._sum_out_of_range_ids()
            with self.average.applied():
                evaluations = self._evaluate_final_weights(progress)
                progress.warn(self.observers.close("completed"))
                summary = write_summary(self, former, evaluations, outside)
        self.checkpoint_manager.sync_mirror()
        self.observers.end(self.step, self.num_samples)
        return summary

    def _open_progress(self, *, trial: bool = False) -> TrainProgress:
        num_left = estimate_remaining_samples(self.reader, self.config.train.epochs, self.num_steps - self.step)
        return TrainProgress(
            self.num_steps,
            self.num_samples + num_left,
            first_sample=self.num_samples,
            visible=self.world.rank == 0,
            trial=trial,
        )

    def _prepare_run_dir(self) -> None:
        """Write the files that are known before the first step, and truncate metrics.jsonl to that step. Only for rank
        0."""
        config, former, embeddings = self.config, self._saved_optimizers, self.model.embeddings
        tables, plan = embeddings.tables, embeddings.plan
        if former is not None:
            config = resuming.reconcile_config(self.run_dir, config, former, tables, self._completion_reason())
            if self._completion_reason() is None:
                resuming.report_topology_change(self.run_dir, plan)
        self.run_dir.begin(config, self.dataset, plan.to_dict(), str(self.world.device))
        self.run_dir.truncate_metrics(self.step, self.num_steps)

    def _evaluate_final_weights(self, progress: TrainProgress) -> dict[str, EvalLine]:
        """Return the evaluations of the final weights by split. These are the last weights, or the best evaluated
        ones."""
        if not self.eval_readers:
            return {}
        self._get_evaluation(self.evaluation_tracker.split, progress)
        if self.config.train.finish == "best" and self.early_stopping.best_step not in (None, self.step):
            path = self.run_dir.checkpoint_path(self.early_stopping.best_step)
            state = restore(path, self.model, None, self.world)  # Without moments, because training has ended.
            self.best_position = state["step"], state["num_samples"]
            progress.print_line(
                f"restored the best weights: {self.evaluation_tracker.split} {self.early_stopping.best_text}"
            )
        return {split: self._get_evaluation(split, progress) for split in self.eval_readers}

    @property
    def _position(self) -> tuple[int, int]:
        return self.best_position or (self.step, self.num_samples)

    def _get_evaluation(self, split: str, progress: TrainProgress) -> EvalLine:
        # After a resume, the current weights may have been evaluated already.
        made = self.world.broadcast_from_rank_0(lambda: self._logged_evaluations(split, self._position[0]))
        return made[0] if made else self._evaluate(split, progress)

    def _logged_evaluations(self, split: str, step: int) -> list[EvalLine]:
        lines = [line for line in self.run_dir.evaluations() if line.model_fields_set >= REQUIRED_EVAL_FIELDS]
        return [line for line in reversed(lines) if (line.split, line.step) == (split, step)]

    def _train(self, progress: TrainProgress) -> None:
        self._last_logged = (self.step, self.num_samples)
        self.clock.start()
        drops = RateDrops(self.config)
        batches = islice(self._batches, self.num_steps - self.step + self.config.pipeline.staleness)
        with closing(
            self.pipeline.steps(batches, schedule=self._set_learning_rates, votes=self.checkpoint_manager.flags)
        ) as steps:
            while self.step < self.num_steps and not (
                self._ends_early or self._is_paused or self.checkpoint_manager.is_stopping
            ):
                self.profiler.on_step(self.step, progress.print_line)
                self._record(self._run_step(steps))
                if drop := drops.poll(self.step, *self._learning_rates()):
                    progress.print_line(drop)
                if self.step % self.config.train.log_every_steps == 0 or self.step == self.num_steps:
                    self._log(progress)
                progress.step(self.step, self.num_samples)
                self.observers.add_step(self.step, self.num_samples)
                self._wait_for_callbacks("step")
                progress.warn([*self.checkpoint_manager.pop_warnings(), *self.observers.pop_warnings()])
                is_due = self.step < self.num_steps
                if is_due and self._is_evaluation_due():
                    with self.clock.pause():
                        self._evaluate(self.evaluation_tracker.split, progress)
                if self.observers.is_interrupted:  # The signal of the other process may arrive later.
                    self.checkpoint_manager.is_stopping = True
                if is_due and self.checkpoint_manager.is_due(
                    self.step, is_best=self.early_stopping.best_step == self.step
                ):
                    with self.clock.pause():
                        self._save()
            self._synchronize()
            self.pipeline.snapshot_prefetched()
        self.clock.lap()  # Of the steps after the last log line, if a run ends between two.
        self.clock.start()
        self.background_metrics.wait()
        self.profiler.close(self.step, progress.print_line)
        if self._ends_early and self.step < self.num_steps:
            reason = self.early_stopping if self.early_stopping.should_stop else "a callback returned True"
            progress.print_line(f"stopped at step {self.step}: {reason}")

    @property
    def _is_paused(self) -> bool:
        left = self._num_evaluations_left
        is_over = self.step == self.num_steps or self._ends_early
        return left is not None and left <= 0 and not is_over

    @property
    def _ends_early(self) -> bool:
        return self.early_stopping.should_stop or self.observers.should_stop

    def _wait_for_callbacks(self, kind: Literal["step", "train"]) -> None:
        if self.observers.waits_for(kind):
            with self.clock.pause():
                self.observers.wait(kind)

    def _set_learning_rates(self) -> float:
        falls = self.evaluation_tracker.num_reductions
        self._lr_factor = set_learning_rates(self.config, self.optimizer, self.step, self.num_steps, falls)
        return self._lr_factor

    def _learning_rates(self) -> tuple[float, float]:
        """Return the current learning rates of (tables, dense part)."""
        return self.config.embedding.optimizer.lr * self._lr_factor, self.optimizer.param_groups[0]["lr"]

    def _is_evaluation_due(self) -> bool:
        num_read = self.reader.num_batches_until(self._trained_position)
        return is_evaluation_due(self.config.train, self.step, num_read, self.reader.num_batches)

    def _run_step(self, steps: Iterator[StepResult]) -> StepResult:
        try:
            with self._step_threads:
                result = next(steps)
            self.checkpoint_manager.apply_flag_sums(result.votes)
            return result
        except MesetaError as error:
            raise self._add_step_context(error) from None

    def _synchronize(self) -> None:
        """Finish all pending updates. Raises MesetaError if a GPU skipped the last one."""
        try:
            self.pipeline.synchronize()
        except SkippedUpdate as error:
            raise self._add_step_context(error) from None

    def _add_step_context(self, error: MesetaError) -> MesetaError:
        self.checkpoint_manager.close()
        batch = self.pipeline.batch
        return add_step_context(error, self.step, batch, self.dataset, self.run_dir.checkpoints, self.world)

    def _record(self, result: StepResult) -> None:
        self.step += 1
        self.background_metrics.add(result.logits, result.batch, result.agreement)
        self.num_samples += result.num_samples
        self._trained_position = result.batch.position or self._trained_position

    def _log(self, progress: TrainProgress) -> None:
        self._synchronize()
        compute_metrics = self.background_metrics.start_line()
        # A metrics window restored from a checkpoint has samples from before this start. Only later ones are timed.
        first_step, first_sample = self._last_logged
        elapsed_s, num_steps = self.clock.lap(), self.step - first_step
        measured: dict[str, Any] = {}
        if outside := self._sum_out_of_range_ids():
            measured["ids_outside"] = outside
        if self.world.size > 1:
            measured["transfers"] = self.world.transfers.pop_means()
        measured |= self.running_metrics.pop_row_traffic(self.model.embeddings, num_steps)
        measured |= {"row_waits": waits} if (waits := self.reader.row_waits.pop_means(num_steps)) else {}
        rate_of_tables, rate_of_dense = self._learning_rates()
        measured |= {
            "step": self.step,
            "num_samples": self.num_samples,
            "time_s": self.clock.train_s,
            "samples_per_s": (self.num_samples - first_sample) / elapsed_s,
            "seconds_per_step": elapsed_s / max(num_steps, 1),
            "lr_dense": rate_of_dense,
            "lr_sparse": rate_of_tables,
            "stages_s": self.pipeline.stage_times.pop_means(),
        }
        self.background_metrics.write(
            lambda: self._write(TrainLine(kind="train", **measured, **compute_metrics()), progress)
        )
        if self.observers.waits_for("train"):
            self.background_metrics.wait()
            self._wait_for_callbacks("train")
        self._last_logged = (self.step, self.num_samples)
        self.clock.start()

    def _evaluate(self, split: str, progress: TrainProgress) -> EvalLine:
        self._synchronize()
        self.background_metrics.wait()
        start_s = time.perf_counter()
        with self.average.applied():
            evaluation = evaluate(
                self.model, self.eval_readers[split], self.world, self.config.metrics, logit_shift(self.config)
            )
        step, num_samples = self._position
        line = EvalLine(
            kind="eval",
            step=step,
            split=split,
            **evaluation.to_dict(),
            time_s=time.perf_counter() - start_s,
            num_samples_trained=num_samples,
        )
        self._write(line, progress)
        if self._num_evaluations_left is not None:
            self._num_evaluations_left -= split == self.evaluation_tracker.split
        self._track_evaluation(line)
        self.observers.wait("eval")
        return line

    def _track_evaluation(self, line: EvalLine) -> None:
        self.evaluation_tracker.update(line, scheduled=self._is_evaluation_due())

    def _write(self, line: Line, progress: TrainProgress) -> None:
        if self.world.rank == 0:
            self.run_dir.append_metrics(line)
            self.observers.add(line)
        progress.log(line)

    def _sum_out_of_range_ids(self) -> dict[str, int]:
        embeddings = self.model.embeddings
        return sum_out_of_range_ids(embeddings.features, embeddings.num_out_of_range, self.world)

    def _save(self) -> None:
        """Save a checkpoint from which training resumes bit for bit, also within an epoch or a metrics window."""
        embeddings = self.model.embeddings
        self._synchronize()
        self.background_metrics.wait()
        state = {
            "reader": self.reader.get_state(self._trained_position),
            "num_samples": self.num_samples,
            "embedding_step": embeddings.step,
            "ids_outside": self._sum_out_of_range_ids(),
            "train_s": self.clock.train_s + self.clock.lap_s,
            "dense_optimizer": type(self.optimizer).__name__,
            DENSE_DTYPE_KEY: self.config.dense.dtype,
            "learning_rates": {"embedding": self._lr_factor, "dense": self.optimizer.param_groups[0]["lr"]},
            "random": random_state(),
            **encoding_state(self.dataset),
            **self.evaluation_tracker.get_state(),
            **self.average.get_state(),
        }
        more = {**self.average.get_tensors(), **self.running_metrics.get_tensors()}
        more |= self.continued.epoch_metrics.get_tensors() if self.continued is not None else {}
        dense = dense_tensors(self.model, self.optimizer, self.world, more)
        is_last = self.step == self.num_steps or self._ends_early or self._is_paused
        prefetched = self.pipeline.snapshot_prefetched()
        prefetched_tensors = None if prefetched is None else prefetched.to_tensors()
        self.checkpoint_manager.save(
            self.step,
            embeddings,
            dense,
            state,
            self.early_stopping.best_step,
            is_last=is_last,
            prefetched=prefetched_tensors,
        )

    def restart_reading(self, position: Mapping[str, Any]) -> None:
        """Continue reading at a position of the reader."""
        self._batches.close()
        self.reader.set_state(position)
        self._trained_position = self.reader.position
        self._start_reading()

    def track_logged_evaluation(self) -> None:
        """Track the evaluation of the current step if a previous start has logged it."""
        split = self.evaluation_tracker.split
        for line in self.world.broadcast_from_rank_0(lambda: self._logged_evaluations(split, self.step)):
            self._track_evaluation(line)

    def _completion_reason(self) -> resuming.CompletionReason | None:
        return resuming.CompletionReason.find(self.config, self.step, self.num_steps, self.early_stopping)

    def _start_reading(self) -> None:
        # With stale embeddings, the reader is one batch ahead at the end.
        num_epochs = self.config.train.epochs + self.config.pipeline.staleness
        self._batches = read_packed(self.reader, num_epochs, self.world.device, self.config.train.accumulate_steps)
