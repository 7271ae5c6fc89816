"""Main metrics and measurements of a run, from its summary, or from its metrics if it has not ended."""

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
    """Main metrics and measurements of a run. Unknown values are `None`."""

    is_done: bool
    """Whether the run was completed, and therefore has a summary."""
    evaluation: EvalLine | None
    """Final evaluation, or the newest one of an unfinished run."""
    samples_per_s: float | None
    """Mean speed over the training time. For an unfinished run, median of the logged speeds."""
    num_steps: int | None
    num_samples: int | None
    train_s: float | None
    """Seconds of training, without evaluations and checkpoints."""
    num_ranks: int | None


def headline(record: RunRecord, splits: Sequence[str] = EVALUATED_SPLITS) -> Headline:
    """Return the headline of a run. Its evaluation is that of the first split in `splits` that was evaluated."""
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
    """Return the final evaluation of the first split in `splits` that was evaluated, or `None`.

    If the summary has no evaluation, the newest one in the metrics is used. The default `splits` fall back to the last
    evaluation of any split.
    """
    ended = {split: record.summary.evaluation(split) for split in EVALUATED_SPLITS} if record.summary else {}
    lines = ended if any(ended.values()) else {line.split: line for line in record.eval_lines}
    final = next((lines[split] for split in splits if lines.get(split)), None)
    return record.eval_lines[-1] if final is None and record.eval_lines and tuple(splits) == EVALUATED_SPLITS else final
