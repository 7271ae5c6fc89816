"""`meseta eval RUN`: metrics of a run on a split or on raw files, and the options that `meseta predict` has too."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meseta.cli.launch import run_ranks
from meseta.cli.watch import load_time_limits
from meseta.errors import MesetaError
from meseta.system.ranks import is_distributed

if TYPE_CHECKING:
    from meseta.train.trained_model import TrainedModel


DEFAULT_SPLIT = "test"
RunsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN_DIR",
        help="Folder of a training run, or of several, whose predictions are averaged. The first one selects the rows.",
    ),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="DIR|FILE",
        help="Another prepared dataset with the same features, or raw files, folders, patterns or URLs, with or "
        "without labels. May be repeated. Default: the dataset of the run.",
    ),
]
EncodingOption = Annotated[
    str | None, typer.Option(help="Text encoding of raw files.", show_default="that of the earlier files")
]
UnseenOption = Annotated[
    bool, typer.Option("--allow-unseen", help="Accept raw rows even if training saw none of their values.")
]
AverageOption = Annotated[
    str, typer.Option(metavar="probability|logit", help="Predictions of several runs to average.")
]


def format_metrics(line: Mapping[str, Any]) -> str:
    """Format an entry of metrics.jsonl."""
    clamped = line.get("logloss_clamped")  # Missing in lines of older versions.
    return (
        f"AUC {_format_metric(line['auc'])}  NE {_format_metric(line['ne'])}  logloss "
        f"{_format_metric(line['logloss'])}{'' if clamped is None else f' (clamped {clamped:.4f})'}  "
        f"calibration {_format_metric(line['calibration'])}  ({line['num_samples']:,} samples)"
    )


def _format_metric(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"


def evaluate(
    run_dirs: RunsArgument,
    split: Annotated[
        str, typer.Option(help="Split to evaluate: train, test, or valid if the dataset has it.")
    ] = DEFAULT_SPLIT,
    data: DataOption = None,
    nproc: Annotated[int, typer.Option(help="Number of ranks on this machine.")] = 1,
    best: Annotated[
        bool,
        typer.Option(
            "--best",
            help="Use the checkpoint of the best evaluation. Default: the final weights of the run, see train.finish.",
        ),
    ] = False,
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Sparse feature by which metrics are segmented. May be repeated. Default: metrics.segments of the run."
        ),
    ] = None,
    storage_dir: Annotated[
        Path | None,
        typer.Option(help="Folder on a local disk in which all tables are stored. Default: the tiers of the run."),
    ] = None,
    encoding: EncodingOption = None,
    allow_unseen: UnseenOption = False,
    average: AverageOption = "probability",
) -> None:
    """Evaluate a checkpoint of a run, or the average of several runs, on all rows of a split or of raw files. Prints
    the metrics as JSON."""
    options = {"best": best, "storage_dir": storage_dir, **average_options(run_dirs, average)}
    options |= raw_row_options("eval", data, split, encoding=encoding, allow_unseen=allow_unseen)
    # Ranks that torchrun or the launcher has started run the command themselves.
    if nproc != 1 and not is_distributed():
        sys.exit(run_ranks(sys.argv[1:], nproc, load_time_limits(run_dirs[0])))

    from meseta.train.trained_model import open_for_raw_rows, open_trained

    is_raw = bool(data) and not is_dataset(data or ())
    opened: AbstractContextManager[TrainedModel[Any]] = (
        open_for_raw_rows(run_dirs[0], data or (), **options)
        if is_raw
        else open_trained(run_dirs[0], split, Path(data[0]) if data else None, **options)
    )
    with opened as trained:
        evaluation = trained.evaluate(by or ())
    if trained.world.rank == 0:
        runs: dict[str, Any] = {"run": str(run_dirs[0]), "step": trained.step}
        if len(run_dirs) > 1:
            steps = [trained.step, *(other.step for other in trained.others)]
            runs = {"runs": [str(run_dir) for run_dir in run_dirs], "steps": steps, "average": average}
        rows = {"data": data} if is_raw else {"split": split}
        print(json.dumps({**runs, **rows, **evaluation.to_dict(include_reliability=False)}, indent=1))


def is_dataset(data: Sequence[str]) -> bool:
    """Whether `data` is a single folder with a dataset.json. Any other folder holds raw files."""
    from meseta.data.dataset.dataset import DATASET_FILE
    from meseta.system.files import path_exists

    return len(data) == 1 and path_exists(Path(data[0]) / DATASET_FILE)


def raw_row_options(
    command: str, data: Sequence[str] | None, split: str, *, encoding: str | None, allow_unseen: bool
) -> dict[str, Any]:
    """Return the options of raw rows that are set. Raises MesetaError if `data` does not fit them or `split`.

    Errors begin with `command`.
    """
    options = ({} if encoding is None else {"encoding": encoding}) | ({"allow_unseen": True} if allow_unseen else {})
    if data and not is_dataset(data):
        if split != DEFAULT_SPLIT:
            raise MesetaError(f"{command}: raw files have no split {split!r}; omit --split to use all rows")
        return options
    for name in options:
        raise MesetaError(f"{command}: --{name.replace('_', '-')} needs raw files in --data; omit it")
    return {}


def average_options(run_dirs: Sequence[Path], average: str) -> dict[str, Any]:
    """Return the arguments of `open_trained` for several runs. Raises MesetaError if `average` is unknown."""
    from meseta.train.averages.runs import check_averaged

    check_averaged(average)
    return {"more_runs": run_dirs[1:], "averaged": average}
