"""`meseta train [CONFIG.yaml] [--data FILE] [key=value ...] [--nproc N]`: a run, or the rest of one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meseta.cli.launch import is_launched, run_ranks
from meseta.cli.prepare import BadRows, MaxBadRows, bad_row_options, print_layout, print_summary, progress_bar
from meseta.spec import MesetaError

if TYPE_CHECKING:
    from meseta.data import Dataset, PrepareOptions

_FILES = "Raw files, prepared first if that was not done yet"
_Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="Raw file or pattern, as for `meseta prepare`; repeatable. Without a config, run_dir is runs/<its name>.",
        rich_help_panel=_FILES,
    ),
]
_TestFiles = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE", help="File or pattern whose rows make the test split; repeatable.", rich_help_panel=_FILES
    ),
]
_Label = Annotated[
    str | None, typer.Option(help="Column of the label.", show_default="by its name", rich_help_panel=_FILES)
]
_Schema = Annotated[Path | None, typer.Option(help="YAML file that says what the columns are.", rich_help_panel=_FILES)]


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="YAML config of the run, and settings such as train.batch_size=4096.",
        ),
    ] = None,
    data: _Data = None,
    test_files: _TestFiles = None,
    label: _Label = None,
    schema: _Schema = None,
    bad_rows: BadRows = "error",
    max_bad_rows: MaxBadRows = None,
    nproc: Annotated[int, typer.Option(help="Ranks on this machine. torchrun works too.")] = 1,
) -> None:
    """Train a model, evaluate it, and write a report; started again, go on from the newest checkpoint."""
    from meseta.config import check_document, read_document, set_default
    from meseta.train.raw_files import default_batch_size, default_run_dir

    config, overrides = _split(arguments or [])
    document = read_document(config, overrides)
    if data:
        set_default(document, "run_dir", default_run_dir(data))
        set_default(document, "data.dir", f"{document['run_dir']}/data")
    elif test_files or label or schema or bad_rows != "error" or max_bad_rows:
        raise MesetaError(
            "train: --test-files, --label, --schema, --bad-rows and --max-bad-rows say how raw files are prepared; "
            "give --data too"
        )
    elif not document:
        raise MesetaError("train: nothing to train on; give a config file, or raw files as --data FILE")
    settings = check_document(document, config)
    if nproc != 1 and not is_launched():
        sys.exit(run_ranks(sys.argv[1:], nproc))
    if data:
        from meseta.data import PrepareOptions

        options = PrepareOptions(
            sources=data,
            test_files=test_files or (),
            label=label,
            schema=schema,
            out=settings.data.dir,
            **bad_row_options(bad_rows, max_bad_rows),
        )
        set_default(document, "train.batch_size", default_batch_size(_prepared(options).splits["train"].num_rows))
        settings = check_document(document, config)

    from meseta.train.interruption import Stopped
    from meseta.train.session import session
    from meseta.train.trainer import Trainer

    try:
        with session(settings) as world:
            summary = Trainer(settings, world).run()
    except Stopped as stopped:
        raise typer.Exit(stopped.exit_code) from None
    if world.rank == 0:
        _print_result(summary, settings.run_dir)


def _split(arguments: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """The config, if the first argument is one, and the settings."""
    if arguments and ("=" not in arguments[0] or Path(arguments[0]).is_file()):
        return Path(arguments[0]), arguments[1:]
    return None, arguments


def _prepared(options: PrepareOptions) -> Dataset:
    """The dataset of `options`; of several ranks the first prepares it, and the others wait until it is there."""
    from meseta.data.prepare import load_prepared, prepare

    is_first = os.environ.get("RANK", "0") == "0"
    while (dataset := load_prepared(options)) is None:
        if is_first:
            start_s = time.perf_counter()
            show = partial(print_layout, given=bool(options.schema), command="`meseta prepare FILE --out DIR`")
            with progress_bar() as progress:
                dataset = prepare(options, progress, show)
            print_summary(dataset, options.out, time.perf_counter() - start_s)
            return dataset
        time.sleep(0.2)  # Where the first rank fails, its launcher ends this one too.
    return dataset


def _print_result(summary: dict[str, Any], run_dir: Path) -> None:
    test, teacher = summary["test"], summary["teacher"]
    print(f"test AUC {_number(test['auc'])}  NE {_number(test['ne'])}  logloss {_number(test['logloss'])}  "
          f"calibration {_number(test['calibration'])}  ({test['num_samples']:,} samples)")  # fmt: skip
    if teacher:
        print(f"best reachable: AUC {teacher['auc']:.4f}  NE {teacher['ne']:.4f}  (the teacher's, on the same rows)")
    speed = f"{summary['samples_per_s']:,.0f} samples/s" if summary["samples_per_s"] else "no step was left to do"
    print(f"{summary['num_samples']:,} samples in {summary['train_s']:.1f} s of training, {speed}, "
          f"{summary['num_ranks']} rank{'s' * (summary['num_ranks'] > 1)}")  # fmt: skip
    for what, outside in (("training", summary["ids_outside"]), ("the test split", test.get("ids_outside"))):
        if outside:
            counts = ", ".join(f"{feature} {count:,}" for feature, count in outside.items())
            print(f"ids outside their table in {what}, handled as embedding.id_policy says: {counts}")
    print(f"report: {run_dir / 'report.html'}")


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"
