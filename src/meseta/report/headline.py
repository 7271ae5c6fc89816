"""The figures at the head of a run, from its summary or, while it has none, from the last lines of its metrics."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from meseta.report.record import RunRecord
from meseta.telemetry.formatting import is_drawable
from meseta.telemetry.metrics_file import EvalLine
from meseta.telemetry.splits import EVALUATED_SPLITS


@dataclass(frozen=True, kw_only=True)
class Headline:
    """None where a figure is not known."""

    is_done: bool
    """Whether the run has ended as its config says."""
    evaluation: EvalLine | None
    """The one at the end, or the newest so far."""
    samples_per_s: float | None
    """Over the whole training time; for a run that goes on, the median of its lines."""
    num_steps: int | None
    num_samples: int | None
    train_s: float | None
    """Without evaluations and checkpoints."""
    num_ranks: int | None


def headline(record: RunRecord, splits: Sequence[str] = EVALUATED_SPLITS) -> Headline:
    """What is known of a run; its evaluation is that of the first of `splits` that was evaluated."""
    summary, last = record.summary, record.train_lines[-1] if record.train_lines else None
    rates = [r for line in record.train_lines if (r := line.samples_per_s) is not None and is_drawable(r)]
    num_ranks = summary.num_ranks if summary else None
    if num_ranks is None and record.plan is not None:
        num_ranks = record.plan.num_ranks
    return Headline(
        is_done=summary is not None,
        evaluation=final_evaluation(record, splits),
        samples_per_s=summary.samples_per_s if summary else statistics.median(rates) if rates else None,
        num_steps=summary.num_steps if summary else last.step if last else None,
        num_samples=summary.num_samples if summary else last.num_samples if last else None,
        train_s=summary.train_s if summary else last.time_s if last else None,
        num_ranks=num_ranks,
    )


def final_evaluation(record: RunRecord, splits: Sequence[str] = EVALUATED_SPLITS) -> EvalLine | None:
    """Of the first of `splits` that was evaluated: the summary's, or, while that has none at all, the last one of the
    metrics; without `splits`, any other."""
    ended = {split: record.summary.evaluation(split) for split in EVALUATED_SPLITS} if record.summary else {}
    lines = ended if any(ended.values()) else {line.split: line for line in record.eval_lines}
    found = next((lines[split] for split in splits if lines.get(split)), None)
    return record.eval_lines[-1] if found is None and record.eval_lines and tuple(splits) == EVALUATED_SPLITS else found
