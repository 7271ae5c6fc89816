"""Chain of runs in which each run continues from the previous one: the lines of history.jsonl."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from meseta.data.dataset.dataset import Dataset
from meseta.spec import MesetaError
from meseta.system.files import path_exists
from meseta.telemetry.continued import ContinuedSummary, HistoryLine, SourceRecord
from meseta.telemetry.history import read_history
from meseta.telemetry.metrics import EVALUATED_SPLITS
from meseta.telemetry.metrics_file import EvalMetrics
from meseta.telemetry.summary import RunSummary, read_summary


def checksum_sources(dataset: Dataset) -> tuple[SourceRecord, ...]:
    """Return the raw files of a dataset with the SHA-256 of each that is a local file.

    Raises MesetaError if a file cannot be read.
    """
    return tuple(
        SourceRecord(path=source.path, num_rows=source.num_rows, sha256=_checksum(Path(source.path)))
        for source in dataset.sources
    )


def _checksum(path: Path) -> str | None:
    if not path_exists(path):  # A URL, or a file that was deleted after preparation.
        return None
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise MesetaError(f"source {str(path)!r} cannot be read: {error.strerror}; make it readable") from None


def find_trained_source(history: Sequence[HistoryLine], sources: Sequence[SourceRecord]) -> tuple[str, str] | None:
    """Return (path, name of the run) of the first source with which a run of the chain was trained, by checksum."""
    runs = {one.sha256: line.run for line in history for one in line.sources if one.sha256 is not None}
    return next(((one.path, runs[one.sha256]) for one in sources if one.sha256 in runs), None)


def parent_history(run_dir: Path) -> tuple[HistoryLine, ...]:
    """Return the history of a parent. A run that continues from no other run has a single line, made from its summary.

    Raises MesetaError if history.jsonl or dataset.json is invalid.
    """
    history = read_history(run_dir)
    if history:
        return history
    summary = read_summary(run_dir) or RunSummary()
    line = make_line(run_dir.resolve().name, Dataset.load(run_dir), summary)
    evaluations = [one for split in EVALUATED_SPLITS if (one := summary.evaluation(split)) is not None]
    if evaluations:
        fields = evaluations[0].to_dict()
        metrics = {name: fields[name] for name in EvalMetrics.model_fields if name in fields and name != "reliability"}
        line = line.model_copy(update={"evaluation": EvalMetrics.model_validate(metrics)})
    return (line,)


def make_line(
    run: str,
    dataset: Dataset,
    summary: RunSummary,
    *,
    data: str | None = None,
    sources: Sequence[SourceRecord] = (),
    finished_at: str | None = None,
) -> HistoryLine:
    """Return the line of a run. Fields without a value are left out of the file.

    Args:
        run: Name of the run folder.
        dataset: Description of the training rows.
        summary: Summary of the run, with its measurements on new rows if it has any.
        data: Folder of the dataset.
        sources: Raw files. The default are those of the dataset, without checksums.
        finished_at: UTC time at which the run ended.
    """
    split = dataset.splits.get("train")
    named = tuple(SourceRecord(path=one.path, num_rows=one.num_rows) for one in dataset.sources)
    continued = summary.continued or ContinuedSummary(parent="")
    fields = {
        "run": run,
        "data": data,
        "sources": tuple(sources) or named,
        "num_rows": None if split is None else split.num_rows,
        "num_steps": summary.num_steps,
        "seconds": summary.train_s,
        "finished_at": finished_at,
        "test_first": continued.test_first,
        "progressive": continued.progressive,
        "drift": continued.drift,
    }
    return HistoryLine.model_validate({name: value for name, value in fields.items() if value not in (None, ())})
