"""The training run: read, step, log, evaluate, save; and go on where a run was cut off."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from meseta import checkpoint
from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset import Dataset
from meseta.data.reader import Reader, ReaderOptions
from meseta.optim.dense import make_dense_optimizer
from meseta.optim.schedule import learning_rate_factor
from meseta.pipeline import Step, TrainStep
from meseta.spec import MesetaError
from meseta.train.build import make_sharded_model
from meseta.train.evaluate import evaluate, gather_window
from meseta.train.metrics import MetricWindow
from meseta.train.progress import TrainProgress
from meseta.train.report import write_report
from meseta.train.run_dir import RunDir
from meseta.train.state import (
    dense_tensors,
    random_state,
    set_dense_tensors,
    set_random_state,
    window_state,
    window_tensors,
)


class Trainer:
    """One run of one config. Every rank builds one and calls `run`."""

    def __init__(self, config: RunConfig, world: World) -> None:
        """Open the data, place the tables, take up the newest checkpoint of run_dir if there is one.

        Raises MesetaError, on all ranks, for data, plans or checkpoints that do not fit the config.
        """
        torch.manual_seed(config.seed)
        self.config = config
        self.world = world
        self.run_dir = RunDir(config.run_dir)
        self.dataset = Dataset.load(config.data.dir)
        self.model = make_sharded_model(config, self.dataset, world)
        self.optimizer = make_dense_optimizer(config.dense.optimizer, self.model.parameters())
        self.train_step = TrainStep(self.model, self.optimizer, world)
        self.reader = Reader(self.dataset, "train", self._reader_options(), rank=world.rank, num_ranks=world.size)
        self.window = MetricWindow()
        self.step = 0
        self.num_samples = 0
        self.train_s = 0.0
        whole = config.train.epochs * self.reader.num_batches
        self.num_steps = min(whole, config.train.max_steps or whole)
        self._resume()
        self._log_from = (self.step, time.perf_counter())

    def run(self) -> dict[str, Any]:
        """Train to the end, evaluate, save, write the report; returns what summary.json holds."""
        if self.world.rank == 0:
            self.run_dir.begin(
                self.config, self.dataset.to_dict(), self.model.embeddings.plan.to_dict(), str(self.world.device)
            )
            self.run_dir.forget_after(self.step, self.num_steps)
            self.train_s = self.run_dir.train_s()
        self.world.barrier()
        first = self.step
        with TrainProgress(self.num_steps, first_step=first, shown=self.world.rank == 0) as progress:
            if first:
                progress.say(f"going on from step {first}, {self.run_dir.checkpoints}")
            self._train(progress)
            line = self._evaluate(progress)
            if self.step > first or checkpoint.latest(self.run_dir.checkpoints) is None:
                self._save()
        summary = self._summary(line)
        if self.world.rank == 0:
            self.run_dir.write_json("summary.json", summary)
            write_report(self.run_dir.path)
        return summary

    def _train(self, progress: TrainProgress) -> None:
        """The loop over steps."""
        every = self.config.train.eval_every_steps, self.config.checkpoint.every_steps
        self._log_from = (self.step, time.perf_counter())
        batches: Any = self.reader.epochs(self.config.train.epochs)
        while self.step < self.num_steps:
            self._set_learning_rates()
            with self.train_step.times.stage("data"):
                batch = next(batches)
            result = self.train_step(batch)
            self.step += 1
            self._record(result, batch.label.numpy())
            if self.step % self.config.train.log_every_steps == 0 or self.step == self.num_steps:
                self._log(progress)
            progress.step(self.step)
            eval_every, save_every = every
            if eval_every and self.step % eval_every == 0 and self.step < self.num_steps:
                self._off_the_clock(lambda: self._evaluate(progress))
            if save_every and self.step % save_every == 0 and self.step < self.num_steps:
                self._off_the_clock(self._save)
        batches.close()

    def _set_learning_rates(self) -> None:
        embedding, dense = self.config.embedding, self.config.dense
        self.model.embeddings.lr_factor = learning_rate_factor(embedding.schedule, self.step, self.num_steps)
        factor = learning_rate_factor(dense.schedule, self.step, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = dense.optimizer.lr * factor

    def _record(self, result: Step, labels: Any) -> None:
        self.window.add(result.logits.cpu().numpy(), labels)
        self.num_samples += result.num_samples

    def _log(self, progress: TrainProgress) -> None:
        """One line of metrics.jsonl over the samples since the last one."""
        metrics = gather_window(self.window, self.world).compute().to_dict()
        first_step, start_s = self._log_from
        elapsed_s, num_steps = time.perf_counter() - start_s, self.step - first_step
        self.train_s += elapsed_s
        line = {
            "kind": "train",
            "step": self.step,
            "num_samples": self.num_samples,
            "time_s": self.train_s,
            "loss": metrics["logloss"],
            "ne": metrics["ne"],
            "auc": metrics["auc"],
            "samples_per_s": metrics["num_samples"] / elapsed_s,
            "seconds_per_step": elapsed_s / max(num_steps, 1),
            "lr_dense": self.optimizer.param_groups[0]["lr"],
            "lr_sparse": self.config.embedding.optimizer.lr * self.model.embeddings.lr_factor,
            "stages_s": self.train_step.times.take(),
        }
        self.window.reset()
        self._write(line, progress)
        self._log_from = (self.step, time.perf_counter())

    def _evaluate(self, progress: TrainProgress) -> dict[str, Any]:
        """Metrics over the whole test split, one line of metrics.jsonl."""
        options = ReaderOptions(
            batch_size=self.config.train.eval_batch_size, prefetch_batches=self.config.data.prefetch_batches
        )
        start_s = time.perf_counter()
        reader = Reader(self.dataset, "test", options, rank=self.world.rank, num_ranks=self.world.size)
        metrics = evaluate(self.model, reader, self.world).to_dict()
        line = {"kind": "eval", "step": self.step, "split": "test", **metrics, "time_s": time.perf_counter() - start_s}
        line["num_samples_trained"] = self.num_samples
        self._write(line, progress)
        return line

    def _write(self, line: dict[str, Any], progress: TrainProgress) -> None:
        if self.world.rank == 0:
            self.run_dir.append_metrics(line)
        progress.log(line)

    def _off_the_clock(self, action: Any) -> None:
        """Do something whose time is not training time."""
        start_s = time.perf_counter()
        action()
        first_step, log_start_s = self._log_from
        self._log_from = (first_step, log_start_s + time.perf_counter() - start_s)

    def _save(self) -> None:
        """A checkpoint that goes on bit for bit, in the middle of an epoch and of a metric window too."""
        embeddings = self.model.embeddings
        window = gather_window(self.window, self.world).get_state()
        num_outside = embeddings.num_outside
        total = None if num_outside is None else self.world.all_reduce(num_outside.clone()).tolist()
        state = {
            "reader": self.reader.get_state(),
            "num_samples": self.num_samples,
            "embedding_step": embeddings.step,
            "num_outside": total,
            "learning_rates": {"embedding": embeddings.lr_factor, "dense": self.optimizer.param_groups[0]["lr"]},
            "random": random_state(),
        }
        checkpoint.save(
            self.run_dir.checkpoints,
            world=self.world,
            step=self.step,
            plan=embeddings.plan,
            shards=embeddings.shards,
            dense={**dense_tensors(self.model, self.optimizer), **window_tensors(window)},
            state=state,
        )
        if self.world.rank == 0:
            checkpoint.prune(self.run_dir.checkpoints, self.config.checkpoint.keep_last)

    def _resume(self) -> None:
        """Take up the newest checkpoint, if there is one."""
        path = checkpoint.latest(self.run_dir.checkpoints)
        path = self.world.gather_objects(path)[0]
        if path is None:
            return
        if self.config.checkpoint.resume == "never":
            raise MesetaError(
                f"run_dir {str(self.config.run_dir)!r} holds a checkpoint ({path.name}) and checkpoint.resume is "
                "'never'; choose another run_dir, delete this one, or set checkpoint.resume=auto"
            )
        state = restore(path, self.model, self.optimizer, self.world)
        self.step = state["step"]
        self.num_samples = state["num_samples"]
        self.reader.set_state(state["reader"])
        set_random_state(state["random"])
        if self.world.rank == 0:
            self.window.set_state(state["window"])
        if self.step > self.num_steps:
            raise MesetaError(
                f"run_dir {str(self.config.run_dir)!r} is at step {self.step}, beyond the {self.num_steps} that the "
                "config asks for; raise train.epochs or train.max_steps, or choose another run_dir"
            )

    def _summary(self, line: dict[str, Any]) -> dict[str, Any]:
        teacher = self.dataset.teacher
        return {
            "test": line,
            "teacher": None if teacher is None else {"auc": teacher.auc, "ne": teacher.ne},
            "num_steps": self.step,
            "num_samples": self.num_samples,
            "train_s": self.train_s,
            "samples_per_s": self.num_samples / self.train_s if self.train_s else None,
            "num_ranks": self.world.size,
            "checkpoint": str(checkpoint.latest(self.run_dir.checkpoints)),
        }

    def _reader_options(self) -> ReaderOptions:
        data = self.config.data
        return ReaderOptions(
            batch_size=self.config.train.batch_size,
            shuffle=data.shuffle,
            seed=self.config.seed,
            window_rows=data.shuffle_window_rows,
            prefetch_batches=data.prefetch_batches,
        )


def restore(path: Path, model: Any, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    """Fill model and optimizer from a checkpoint, under any plan; returns its state with `step` and `window`.

    Raises MesetaError, on all ranks, where the checkpoint is damaged or of another model.
    """
    loaded = checkpoint.load(path, world=world, shards=model.embeddings.shards)
    set_dense_tensors(model, optimizer, loaded.dense)
    embeddings = model.embeddings
    embeddings.step = loaded.state["embedding_step"]
    counts = loaded.state["num_outside"]
    if counts is not None and world.rank == 0:
        embeddings.num_outside = torch.tensor(counts, device=world.device)
    return {**loaded.state, "step": loaded.step, "window": window_state(loaded.dense)}
