"""`meseta train [CONFIG.yaml] [--data FILE] [key=value ...] [--nproc N]`: a run, or the rest of one."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meseta.cli.figures import figures
from meseta.cli.launch import is_rank, run_ranks
from meseta.cli.prepare import (
    BadRows,
    Dense,
    Ignore,
    Label,
    MaxBadRows,
    SchemaFile,
    Sparse,
    SplitBy,
    TestAfter,
    TestFiles,
    TestFraction,
    TextEncoding,
    TimeColumn,
    ValidAfter,
    ValidFiles,
    ValidFraction,
    bad_row_options,
    column_options,
)
from meseta.cli.prepare import run as prepare
from meseta.cli.restarts import Restarts, run_with_restarts
from meseta.errors import MesetaError, shown
from meseta.machine.ranks import is_first, is_launched

if TYPE_CHECKING:
    from meseta.config import RunConfig
    from meseta.data import Dataset, PrepareOptions
    from meseta.telemetry.timeline import StepRange

_Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...", help="YAML config of the run, and settings such as train.batch_size=4096."
    ),
]
_FILES = "Raw files, prepared first if that was not done yet"
_Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="FILE",
        help="Raw file or pattern, as for `meseta prepare`; repeatable. Without a config, run_dir is runs/<its name>.",
        rich_help_panel=_FILES,
    ),
]
_Force = Annotated[
    bool,
    typer.Option("--force", help="Begin anew: drop the run in run_dir, and prepare again what was prepared otherwise."),
]
_Nproc = Annotated[int, typer.Option(help="Ranks on this machine. torchrun works too.")]
_Restarts = Annotated[int, typer.Option(help="Go on by itself so often where ranks of --nproc are lost.")]
_MinNproc = Annotated[
    int | None, typer.Option(help="Go on without the ranks that were killed, on so many at least; else on all.")
]
_Readers = Annotated[
    str,
    typer.Option(
        help="Processes of this machine that decode the rows, for all ranks: so many, or auto, as many as keep "
        "training from waiting, of as many as there are cores; 0: each rank does."
    ),
]
MOST_READERS = 1024
"""Of one machine."""
_Profile = Annotated[
    bool,
    typer.Option("--profile", help="Write timeline.json, for ui.perfetto.dev: what every rank did in ten steps."),
]
_ProfileSteps = Annotated[
    str | None, typer.Option(metavar="FIRST:LAST", help="The same of these steps, counted from 1; 100 at most.")
]
_NoTest = Annotated[bool, typer.Option("--no-test", help="Leave the test split unread where there is a split valid.")]


def train(
    arguments: _Arguments = None,
    data: _Data = None,
    test_fraction: TestFraction = None,
    test_files: TestFiles = None,
    test_after: TestAfter = None,
    valid_fraction: ValidFraction = None,
    valid_files: ValidFiles = None,
    valid_after: ValidAfter = None,
    split_by: SplitBy = None,
    label: Label = None,
    dense: Dense = None,
    sparse: Sparse = None,
    ignore: Ignore = None,
    time_column: TimeColumn = None,
    schema: SchemaFile = None,
    encoding: TextEncoding = None,
    bad_rows: BadRows = "error",
    max_bad_rows: MaxBadRows = None,
    nproc: _Nproc = 1,
    restarts: _Restarts = 0,
    min_nproc: _MinNproc = None,
    readers: _Readers = "0",
    no_test: _NoTest = False,
    profile: _Profile = False,
    profile_steps: _ProfileSteps = None,
    force: _Force = False,
) -> None:
    """Train a model, evaluate it, and write a report; started again, go on from the newest checkpoint."""
    from meseta.config import check_document, read_document
    from meseta.telemetry.timeline import StepRange

    profiled = profile if profile_steps is None else StepRange.parse(profile_steps)
    config, overrides = _split(arguments or [])
    document = read_document(config, overrides)
    said = _said(
        test_fraction=test_fraction,
        test_files=test_files,
        test_after=test_after,
        valid_fraction=valid_fraction,
        valid_files=valid_files,
        valid_after=valid_after,
        split_by=split_by,
        **column_options(label=label, dense=dense, sparse=sparse, ignore=ignore, time=time_column),
        schema=schema,
        encoding=encoding,
        **bad_row_options(bad_rows, max_bad_rows),
    )
    _choose_folders(document, data or [], said)
    settings = check_document(document, config)
    with ExitStack() as stack:
        if not is_rank():
            if readers != "0":
                stack.enter_context(_reading(readers, data or [], settings))
            _launch(nproc, restarts, min_nproc, settings)
        tried_on = None
        if data:
            tried_on = _fill(document, settings, sources=data, force=force, **said)
            settings = check_document(document, config)
        _run(settings, with_test=not no_test, profile=profiled, anew=force, tried_on=tried_on)


@contextmanager
def _reading(readers: str, data: Sequence[str], settings: RunConfig) -> Iterator[None]:
    """Readers of this machine, which all ranks are told of. Raises MesetaError where these are not for this command."""
    from meseta.machine.processors import num_cores
    from meseta.machine.variables import variables
    from meseta.readers.local import local_readers
    from meseta.train.setup.source import READERS

    problem = None
    is_number = readers.isascii() and readers.isdigit() and 0 < int(readers) <= MOST_READERS
    if readers != "auto" and not is_number:
        problem = f"it is a number up to {MOST_READERS}, or auto"
    elif is_launched():
        problem = "torchrun starts a command for each rank; start `meseta readers` yourself, and name data.service.url"
    elif data:
        problem = "raw files are prepared by the ranks themselves; run `meseta prepare` first, and name data.dir"
    elif settings.data.dir is None:
        problem = "data.service.url names readers; leave one of the two out"
    if problem is not None or settings.data.dir is None:
        raise MesetaError(f"train: --readers {shown(readers)}: {problem}")
    least, most = (1, num_cores()) if readers == "auto" else (int(readers), int(readers))
    with local_readers(settings.data.dir, least, most) as url:
        variables[READERS] = url
        try:
            yield
        finally:
            del variables[READERS]


def _launch(nproc: int, restarts: int, min_nproc: int | None, settings: RunConfig) -> None:
    """Be the launcher of this command's ranks, where it has several or is started again; comes back where it has
    not."""
    if is_launched():
        if restarts or min_nproc is not None:
            raise MesetaError("--restarts and --min-nproc are for --nproc; torchrun has --max-restarts and --nnodes")
        return
    how = Restarts.of(restarts, min_nproc, nproc, settings)
    if how.most:
        sys.exit(run_with_restarts(sys.argv[1:], nproc, how, settings))
    if nproc != 1:
        sys.exit(run_ranks(sys.argv[1:], nproc, settings.comm.time_limits, settings.run_dir))


def _fill(document: dict[str, Any], settings: RunConfig, **options: Any) -> Dataset | None:
    """Prepare, and give the config what it leaves open; returns the dataset where the rate of the tables is to be found
    by trial."""
    from meseta.data import PrepareOptions
    from meseta.data.prepare import for_training
    from meseta.train.outside.raw_files import can_be_tried, choose_settings

    assert settings.data.dir is not None  # or `_choose_folders` has refused it
    dataset = _prepared(for_training(PrepareOptions(out=settings.data.dir, **options)))
    chosen = choose_settings(document, dataset)
    if chosen and is_first():
        _print_chosen(chosen, dataset)
    return dataset if "embedding.optimizer.lr" in chosen and can_be_tried(dataset) else None


def _choose_folders(document: dict[str, Any], data: Sequence[str], said: Mapping[str, Any]) -> None:
    """Where a run from raw files goes, unless its config says so. Raises MesetaError where nothing, or two things, say
    what to train on."""
    from meseta.config import set_default
    from meseta.config.load import value_at
    from meseta.train.outside.raw_files import default_run_dir

    if data:
        if (url := value_at(document, "data.service.url")) is not None:
            raise MesetaError(
                f"train: --data {data[0]!r} and data.service.url {url!r}: rows come from one of them; leave one out"
            )
        set_default(document, "run_dir", default_run_dir(data))
        set_default(document, "data.dir", f"{document['run_dir']}/data")
    elif said:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in said)
        raise MesetaError(f"train: {options} is for raw files that are prepared first; give --data too")
    elif not document:
        raise MesetaError("train: nothing to train on; give a config file, or raw files as --data FILE")


def _run(
    settings: RunConfig, *, with_test: bool, profile: StepRange | bool, anew: bool, tried_on: Dataset | None
) -> None:
    """Train to the end, from the first step on if `anew`, and print what came of it; on `tried_on`, the rate of the
    tables is found by trial first."""
    from meseta.machine.interruption import Stopped
    from meseta.train.run_dir import drop_run
    from meseta.train.session import session
    from meseta.train.sweep.trials import settle_table_rate
    from meseta.train.trainer import Trainer

    try:
        with session(settings) as world:
            if anew:
                drop_run(settings, world)
            if tried_on is not None:
                settings = settle_table_rate(settings, tried_on, world)
            summary = Trainer(settings, world, with_test=with_test, profile=profile).run()
    except Stopped as stopped:
        raise typer.Exit(stopped.exit_code) from None
    if world.rank == 0:
        _print_result(summary, settings.run_dir)


def _said(**options: Any) -> dict[str, Any]:
    """Those of PrepareOptions that the command line has."""
    return {name: value for name, value in options.items() if value not in (None, [], "error")}


def _split(arguments: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """The config, if the first argument is one, and the settings."""
    if arguments and ("=" not in arguments[0] or Path(arguments[0]).is_file()):
        return Path(arguments[0]), arguments[1:]
    return None, arguments


def _prepared(options: PrepareOptions) -> Dataset:
    """The dataset of `options`; of several ranks the first prepares it, and the others wait until it is there."""
    prepares = is_first()
    while (dataset := _load(options)) is None:
        if prepares:
            return prepare(options, command="`meseta prepare FILE --out DIR`")
        time.sleep(0.2)  # Where the first rank fails, its launcher ends this one too.
    return dataset


def _load(options: PrepareOptions) -> Dataset | None:
    """None where it has to be prepared, first or again."""
    from meseta.data.prepare import load_prepared

    try:
        return load_prepared(options)
    except MesetaError:
        if not options.force:
            raise
        return None


def _print_chosen(chosen: Mapping[str, Any], dataset: Dataset) -> None:
    values = {
        key: f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "") for key, value in chosen.items()
    }
    print(f"settings, chosen for {dataset.splits['train'].num_rows:,} rows of training:")
    print(textwrap.fill(" ".join(f"{key}={value}" for key, value in values.items()), 110, initial_indent="  ",
                        subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))  # fmt: skip
    print("to change one: KEY=VALUE behind the command; `meseta config` lists them")


def _print_result(summary: dict[str, Any], run_dir: Path) -> None:
    from meseta.telemetry.splits import EVALUATED, TEST, note_flattered

    teacher, chosen, ends = summary["teacher"], summary.get("chosen", {}), []
    for split in (split for split in EVALUATED if split in summary):
        line = summary[split]
        ends.append((f"the {split} split", line.get("ids_outside")))
        print(f"{split} {figures(line)}")
    if line["step"] != summary["num_steps"]:
        print(f"these are the best weights, of step {line['step']:,}; the last step was {summary['num_steps']:,}")
    if note := note_flattered(chosen.get("split"), chosen.get("what", ())):
        print(f"note: {note}")
    if teacher and TEST in summary:
        print(f"best reachable: AUC {teacher['auc']:.4f}  NE {teacher['ne']:.4f}  (the teacher's, on the same rows)")
    speed = f"{summary['samples_per_s']:,.0f} samples/s" if summary["samples_per_s"] else "no step was left to do"
    print(f"{summary['num_samples']:,} samples in {summary['train_s']:.1f} s of training, {speed}, "
          f"{summary['num_ranks']} rank{'s' * (summary['num_ranks'] > 1)}")  # fmt: skip
    for what, outside in (("training", summary["ids_outside"]), *ends):
        if outside:
            counts = ", ".join(f"{feature} {count:,}" for feature, count in outside.items())
            print(f"ids outside their table in {what}, handled as embedding.id_policy says: {counts}")
    print(f"report: {run_dir / 'report.html'}")
