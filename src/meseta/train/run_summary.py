"""Summary of a finished run: summary.json and the report page."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Any

import torch

from meseta import checkpoint
from meseta.comm import World
from meseta.comm.world import UnknownCollectives
from meseta.report import write_report
from meseta.system.waits import track_activity
from meseta.telemetry.metrics_file import EvalLine
from meseta.telemetry.summary import (
    SUMMARY_FILE,
    BaselineSummary,
    BestEvaluation,
    GraphSummary,
    ImportanceSummary,
    RunSummary,
    SelectionRecord,
    TeacherSummary,
)
from meseta.train.evaluate import logit_shift
from meseta.train.evaluation_tracker import decisions_from_evaluations
from meseta.train.importance import measure_importance
from meseta.train.interop.lightgbm_baseline import measure_lightgbm
from meseta.train.setup.build import make_reader
from meseta.train.state import sum_clamped

if TYPE_CHECKING:
    from meseta.train.trainer import Trainer


def num_unknown_collectives() -> int:
    """Return the number of unknown collectives of this process so far."""
    return UnknownCollectives.count


def write_summary(
    trainer: Trainer, former: RunSummary | None, evaluations: Mapping[str, EvalLine], outside: dict[str, int]
) -> RunSummary:
    """Write summary.json and the report of a run whose steps are done. Collective.

    Args:
        trainer: Run that has ended.
        former: Summary of a previous start. Its timings are kept if that start did all steps.
        evaluations: Evaluation of the final weights by split.
        outside: Number of ids outside of their tables, by feature.
    """
    timed = _timings(trainer, former)
    summary = _build_summary(trainer, evaluations, outside, timed)
    trainer.world.run_on_rank_0(lambda: trainer.run_dir.write_json(SUMMARY_FILE, summary.to_dict()))
    if trainer.continued is not None:
        trainer.world.run_on_rank_0(lambda: trainer.continued.write_history(summary))
    trainer.world.run_on_rank_0(lambda: write_report(trainer.run_dir.path))
    return summary


def _timings(trainer: Trainer, former: RunSummary | None) -> dict[str, Any]:
    parts = trainer.pipeline.stage_times, trainer.world.transfers, trainer.reader.row_waits
    life = zip(*trainer.world.all_gather_object([part.lifetime_means() for part in parts]), strict=True)
    stages, transfers, waits = map(list, life)
    if any(stages):
        by_rank = {"transfers_by_rank": transfers, "row_waits_by_rank": waits}
        sent = {name: of_ranks for name, of_ranks in by_rank.items() if any(of_ranks)}
        return {"stages_s_by_rank": stages, **sent, "predicted": trainer.predicted_step}
    # All steps were done, and timed, by a previous start.
    return {} if former is None or former.num_steps != trainer.step else former.timings


def _peak_memory_bytes(world: World) -> int:
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # In KiB on Linux.


def _measure_importance(trainer: Trainer) -> ImportanceSummary | None:
    config, reader = trainer.config, trainer.eval_readers.get(trainer.evaluation_tracker.split)
    if reader is None or not config.report.importance:
        return None
    # Without the attempt of the run, a service treats the reader as that of another run, so it replaces no session.
    training_reader = make_reader(config, trainer.dataset, "train", trainer.world, in_order=True)
    return measure_importance(
        trainer.model,
        reader,
        trainer.world,
        seed=config.seed,
        logit_shift=logit_shift(config),
        training_reader=training_reader,
    )


def _measure_baseline(trainer: Trainer, splits: Sequence[str]) -> BaselineSummary | None:
    if trainer.config.report.baseline is None or not splits:
        return None
    with track_activity("measuring LightGBM"):
        return trainer.world.broadcast_from_rank_0(lambda: measure_lightgbm(trainer.config, trainer.dataset, splits))


def _build_summary(
    trainer: Trainer, evaluations: Mapping[str, EvalLine], outside: dict[str, int], timed: Mapping[str, Any]
) -> RunSummary:
    teacher, chosen = trainer.dataset.teacher, decisions_from_evaluations(trainer.config)
    parts: dict[str, Any] = {**evaluations, **timed}
    if chosen:
        parts["selected"] = SelectionRecord(split=trainer.evaluation_tracker.split, what=chosen)
    if trainer.world.size > 1:
        parts["overlap"] = asdict(trainer.overlap)
    if (graphs := trainer.pipeline.graphs) is not None:
        parts["graphs"] = GraphSummary(
            num_graphs=graphs.num_captured,
            num_replayed_steps=graphs.num_replayed,
            eager_steps=dict(graphs.eager_reasons),
        )
    if any(astuple(trainer.reader.excluded_rows)):
        parts["excluded_rows"] = asdict(trainer.reader.excluded_rows)
    if (importance := _measure_importance(trainer)) is not None:
        parts["importance"] = importance
    if (baseline := _measure_baseline(trainer, list(evaluations))) is not None:
        parts["baseline"] = baseline
    if trainer.continued is not None:
        parts["continued"] = trainer.continued.finish()
    parts["peak_memory_bytes_by_rank"] = trainer.world.all_gather_object(_peak_memory_bytes(trainer.world))
    best, newest = trainer.best_position, checkpoint.newest(trainer.run_dir.checkpoints)
    train_s = trainer.clock.train_s
    return RunSummary(
        best=BestEvaluation(
            **{key: value for key, value in trainer.early_stopping.get_state().items() if key != "num_stale"}
        ),
        teacher=None if teacher is None else TeacherSummary(auc=teacher.auc, ne=teacher.ne),
        num_steps=trainer.step,
        num_samples=trainer.num_samples,
        train_s=train_s,
        samples_per_s=trainer.num_samples / train_s if train_s else None,
        num_ranks=trainer.world.size,
        unknown_collectives=num_unknown_collectives() - trainer.num_unknown_collectives_before,
        num_clamped=sum_clamped(trainer.model.embeddings.num_clamped, trainer.world),
        ids_outside=outside,
        checkpoint=str(newest if best is None else trainer.run_dir.checkpoint_path(best[0])),
        **parts,
    )
