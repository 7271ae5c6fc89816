"""`meseta train [CONFIG] [--data FILE] [KEY=VALUE ...] [--nproc N]`: starts or resumes a training run."""

from __future__ import annotations

import json
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meseta.cli.evaluate import format_metrics
from meseta.cli.launch import is_nproc_rank, run_ranks
from meseta.cli.prepare import (
    BadRowsOption,
    BucketsOption,
    DenseOption,
    EncodingOption,
    IgnoreOption,
    LabelOption,
    MaxBadRowsOption,
    MultiValuedOption,
    QuietOption,
    RetireAfterOption,
    SchemaOption,
    SparseOption,
    SplitByOption,
    TestAfterOption,
    TestFilesOption,
    TestFractionOption,
    TimeColumnOption,
    TimeFeaturesOption,
    ValidAfterOption,
    ValidFilesOption,
    ValidFractionOption,
    VerboseOption,
    WithoutOption,
    bad_row_options,
    column_options,
    comma_list,
    run_prepare,
)
from meseta.cli.restarts import RestartPolicy, run_with_restarts
from meseta.errors import FormerNameWarning, MesetaError, format_value
from meseta.system.environment import check_extras
from meseta.system.ranks import is_distributed, is_first_rank
from meseta.telemetry.detail import CurrentDetail
from meseta.telemetry.formatting import format_decimal

if TYPE_CHECKING:
    from meseta.config import RunConfig
    from meseta.data import Dataset, PrepareOptions
    from meseta.telemetry.timeline import StepRange

_SettingsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="YAML config of the run, or the name of an example (`meseta config --example list`), and settings such as "
        "train.batch_size=4096.",
    ),
]
_RAW_FILES_PANEL = "Raw files, which are prepared before training"
_DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="FILE",
        help="Raw file or pattern, as for `meseta prepare`. May be repeated. Default run_dir without a config: "
        "runs/<file name>.",
        rich_help_panel=_RAW_FILES_PANEL,
    ),
]
_ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Start from scratch: delete the run in run_dir, and prepare data again if needed."),
]
_NprocOption = Annotated[int, typer.Option(help="Number of ranks on this machine. torchrun works as well.")]
_MaxRestartsOption = Annotated[
    int, typer.Option(help="Maximum number of automatic restarts after ranks of --nproc are lost.")
]
_FormerRestartsOption = Annotated[int | None, typer.Option("--restarts", hidden=True)]
_MinNprocOption = Annotated[
    int | None,
    typer.Option(help="Minimum number of ranks if restarts leave out killed ranks. Default: restarts use all ranks."),
]
_ReadersOption = Annotated[
    str,
    typer.Option(
        help="Number of reader processes on this machine, which decode rows for all ranks. auto: as many as training "
        "needs, up to the number of cores. 0: each rank decodes its own rows.",
    ),
]
MAX_READERS = 1024
"""Maximum number of readers on this machine."""
_ProfileOption = Annotated[
    bool,
    typer.Option("--profile", help="Write a timeline of all ranks in ten steps to timeline.json, for ui.perfetto.dev."),
]
_BaselineOption = Annotated[
    str | None,
    typer.Option(
        metavar="lightgbm",
        help="Learner that is fitted to the same training rows for comparison, as report.baseline. It needs "
        "the extra `lightgbm`.",
    ),
]
_ProfileStepsOption = Annotated[
    str | None,
    typer.Option(
        metavar="FIRST:LAST", help="Write the timeline of these steps instead of ten, at most 100. The first step is 1."
    ),
]
_NoTestOption = Annotated[
    bool, typer.Option("--no-test", help="Do not evaluate on the test split if the dataset has a validation split.")
]


_START_PANEL = "Start from another run"
_StartFromOption = Annotated[
    str | None,
    typer.Option(
        metavar="RUN",
        help="Run folder or checkpoint whose weights and settings the run starts with.",
        rich_help_panel=_START_PANEL,
    ),
]
_LoadOption = Annotated[
    str | None,
    typer.Option(
        metavar="PARTS",
        help="Parts of it to load: tables, states, dense. Default: all.",
        rich_help_panel=_START_PANEL,
    ),
]
_ResetOption = Annotated[
    str | None,
    typer.Option(
        metavar="TABLES",
        help="Tables, by feature, that begin with initial rows, or `dense` for the dense part.",
        rich_help_panel=_START_PANEL,
    ),
]
_LikeOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Dataset or run with the encoding of a checkpoint that is in no run folder.",
        rich_help_panel=_START_PANEL,
    ),
]

_AgainOption = Annotated[
    bool,
    typer.Option("--again", help="Accept files that the chain was trained on before.", rich_help_panel=_START_PANEL),
]
_AllowUnseenOption = Annotated[
    bool,
    typer.Option(
        "--allow-unseen", help="Accept features whose values are almost all new.", rich_help_panel=_START_PANEL
    ),
]
_NoGrowOption = Annotated[
    bool,
    typer.Option("--no-grow", help="Keep its vocabularies. New values share row 0.", rich_help_panel=_START_PANEL),
]
_MaxCandidatesOption = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of rarer values to count per feature.",
        show_default="10,000,000",
        rich_help_panel=_START_PANEL,
    ),
]


def train(
    arguments: _SettingsArgument = None,
    data: _DataOption = None,
    test_fraction: TestFractionOption = None,
    test_files: TestFilesOption = None,
    test_after: TestAfterOption = None,
    valid_fraction: ValidFractionOption = None,
    valid_files: ValidFilesOption = None,
    valid_after: ValidAfterOption = None,
    split_by: SplitByOption = None,
    label: LabelOption = None,
    dense: DenseOption = None,
    sparse: SparseOption = None,
    multi_valued: MultiValuedOption = None,
    ignore: IgnoreOption = None,
    time_column: TimeColumnOption = None,
    time_features: TimeFeaturesOption = None,
    buckets: BucketsOption = None,
    schema: SchemaOption = None,
    encoding: EncodingOption = None,
    bad_rows: BadRowsOption = "error",
    max_bad_rows: MaxBadRowsOption = None,
    nproc: _NprocOption = 1,
    max_restarts: _MaxRestartsOption = 0,
    restarts: _FormerRestartsOption = None,
    min_nproc: _MinNprocOption = None,
    readers: _ReadersOption = "0",
    start_from: _StartFromOption = None,
    load: _LoadOption = None,
    reset: _ResetOption = None,
    like: _LikeOption = None,
    again: _AgainOption = False,
    allow_unseen: _AllowUnseenOption = False,
    no_grow: _NoGrowOption = False,
    retire_after: RetireAfterOption = None,
    max_candidates: _MaxCandidatesOption = None,
    without: WithoutOption = None,
    no_test: _NoTestOption = False,
    baseline: _BaselineOption = None,
    profile: _ProfileOption = False,
    profile_steps: _ProfileStepsOption = None,
    force: _ForceOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Train a model, evaluate it and write a report. If started again, resumes from the newest checkpoint."""
    parameters = locals()
    from meseta.config import read_config_document, validate_document
    from meseta.telemetry.timeline import StepRange

    CurrentDetail.choose("train", quiet=quiet, verbose=verbose)
    profiled = profile if profile_steps is None else StepRange.parse(profile_steps)
    config, overrides = _split_arguments(arguments or [])
    document = read_config_document(config, [*overrides, *_option_overrides(parameters)])
    said = _given_options(
        **{name: parameters[name] for name in (*_SPLIT_OPTIONS, "schema", "encoding")},
        **column_options(parameters),
        **bad_row_options(bad_rows, max_bad_rows),
    )
    _choose_folders(document, data or [], said)
    if document.get("start_from") is not None:
        from meseta.train.start.inherited_config import add_inherited

        add_inherited(document, from_scratch=force)
    settings = validate_document(document, config)
    # Before data are prepared, which may take hours.
    check_extras(settings.train.loggers, "train.loggers")
    check_extras(filter(None, [settings.report.baseline]), "report.baseline")
    with ExitStack() as stack:
        if not is_nproc_rank():
            if readers != "0":
                stack.enter_context(_run_local_readers(readers, data or [], settings))
            _launch_ranks(nproc, _current_max_restarts(max_restarts, restarts), min_nproc, settings)
        searched = None
        if data and settings.start_from is not None:
            _prepare_next(settings, sources=data, force=force, **said, **_growth_options(parameters))
        elif data:
            searched = _prepare_and_choose_settings(document, settings, sources=data, force=force, **said)
        settings = validate_document(document, config)
        _train(settings, with_test=not no_test, profile=profiled, from_scratch=force, searched=searched)


@contextmanager
def _run_local_readers(readers: str, data: Sequence[str], settings: RunConfig) -> Iterator[None]:
    """Context manager that runs local readers for all ranks. Raises MesetaError if `readers` does not suit."""
    from meseta.data.service.server.local_readers import local_readers
    from meseta.system.environment_variables import environ
    from meseta.system.processors import num_cores
    from meseta.train.setup.source import READERS_VARIABLE

    problem = None
    is_number = readers.isascii() and readers.isdigit() and 0 < int(readers) <= MAX_READERS
    if readers != "auto" and not is_number:
        problem = f"it must be auto, or a number up to {MAX_READERS}"
    elif is_distributed():
        problem = "torchrun starts a command per rank; start `meseta readers` separately, and set data.service.url"
    elif data:
        problem = "the ranks prepare raw files themselves; run `meseta prepare` first, and set data.dir"
    elif settings.data.dir is None:
        problem = "data.service.url already refers to readers; omit one of them"
    if problem is not None or settings.data.dir is None:
        raise MesetaError(f"train: --readers {format_value(readers)}: {problem}")
    least, most = (1, num_cores()) if readers == "auto" else (int(readers), int(readers))
    with local_readers(settings.data.dir, least, most) as url:
        # The launcher starts the readers once. Ranks find their URL in the environment.
        environ[READERS_VARIABLE] = url
        try:
            yield
        finally:
            del environ[READERS_VARIABLE]


def _current_max_restarts(max_restarts: int, restarts: int | None) -> int:
    """Return the number of restarts, which the former option `--restarts` may give."""
    if restarts is None:
        return max_restarts
    if max_restarts:
        raise MesetaError("--restarts is the former name of --max-restarts; remove --restarts")
    warnings.warn("option '--restarts' is now '--max-restarts'; rename it", FormerNameWarning, stacklevel=2)
    return restarts


def _launch_ranks(nproc: int, max_restarts: int, min_nproc: int | None, settings: RunConfig) -> None:
    """Launch the ranks and exit with their code. Returns if this process is a rank, or the only one without restart."""
    if is_distributed():
        if max_restarts or min_nproc is not None:
            raise MesetaError(
                "--max-restarts and --min-nproc are for --nproc; torchrun has --max-restarts and --nnodes"
            )
        return
    how = RestartPolicy.from_options(max_restarts, min_nproc, nproc, settings)
    if how.max_restarts:
        sys.exit(run_with_restarts(sys.argv[1:], nproc, how, settings))
    if nproc != 1:
        sys.exit(run_ranks(sys.argv[1:], nproc, settings.comm.time_limits, settings.run_dir))


def _prepare_and_choose_settings(
    document: dict[str, Any], settings: RunConfig, **options: Any
) -> tuple[Dataset, list[str]]:
    """Prepare the dataset and choose missing settings. Return the dataset, and the keys that a search may decide."""
    from meseta.data import PrepareOptions
    from meseta.data.prepare import with_training_defaults
    from meseta.train.interop.default_settings import choose_settings, find_free_keys
    from meseta.train.search.candidates import SEARCHED_KEYS

    assert settings.data.dir is not None  # Checked by `_choose_folders`.
    dataset = _ensure_prepared(with_training_defaults(PrepareOptions(out=settings.data.dir, **options)))
    free = find_free_keys(document, SEARCHED_KEYS)
    chosen = choose_settings(document, dataset)
    if chosen and is_first_rank() and not CurrentDetail.is_quiet():
        _print_chosen(chosen, dataset)
    return dataset, free


def _growth_options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of PrepareOptions for rows that continue those of a parent."""
    without = [name for entry in parameters["without"] or () for name in comma_list(entry)]
    return {
        "grow": not parameters["no_grow"],
        "retire_after": parameters["retire_after"],
        "without": without,
        **_given_options(max_candidates=parameters["max_candidates"]),
    }


def _prepare_next(settings: RunConfig, **options: Any) -> None:
    """Prepare the rows of a run with a parent like the parent's, with vocabularies that grow."""
    from meseta.checkpoint import newest
    from meseta.data import PrepareOptions
    from meseta.train.start.parent import find_encoding_folder

    assert settings.data.dir is not None  # Checked by `_choose_folders`.
    # A run with a checkpoint no longer needs its parent, which may have been deleted.
    has_begun = not options["force"] and newest(settings.checkpoint_location) is not None
    like = settings.data.dir if has_begun else find_encoding_folder(settings)
    _ensure_prepared(PrepareOptions(out=settings.data.dir, like=like, **options), checks_like=not has_begun)


def _choose_folders(document: dict[str, Any], data: Sequence[str], said: Mapping[str, Any]) -> None:
    """Set missing folders of a run on raw files in `document`. Raises MesetaError unless data has one source."""
    from meseta.config import set_default
    from meseta.config.load import get_value
    from meseta.train.interop.default_settings import default_run_dir

    if data:
        if (url := get_value(document, "data.service.url")) is not None:
            raise MesetaError(
                f"train: --data {data[0]!r} and data.service.url {url!r} cannot be combined; omit one of them"
            )
        set_default(document, "run_dir", default_run_dir(data))
        set_default(document, "data.dir", f"{document['run_dir']}/data")
    elif said:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in said)
        raise MesetaError(f"train: {options} needs raw files; add --data")
    elif not document:
        raise MesetaError("train: no training data; specify a config file, or raw files with --data FILE")


def _train(
    settings: RunConfig,
    *,
    with_test: bool,
    profile: StepRange | bool,
    from_scratch: bool,
    searched: tuple[Dataset, list[str]] | None,
) -> None:
    """Train a model to the end and print the result.

    With `from_scratch`, an existing run is deleted first. With `searched`, trials on the dataset decide its keys.
    """
    from meseta.system.interruption import TrainingInterrupt
    from meseta.train.run_dir import clear_run
    from meseta.train.search.search import search_settings
    from meseta.train.session import session
    from meseta.train.trainer import Trainer

    try:
        with session(settings) as world:
            if from_scratch:
                clear_run(settings, world)
            if searched is not None:
                dataset, keys = searched
                settings = search_settings(settings, dataset, keys, world, continues=not profile)
            summary = Trainer(settings, world, with_test=with_test, profile=profile).run()
    except TrainingInterrupt as stopped:
        raise typer.Exit(stopped.exit_code) from None
    if world.rank == 0:
        _print_result(summary, settings.run_dir)


_SPLIT_OPTIONS = (
    "test_fraction",
    "test_files",
    "test_after",
    "valid_fraction",
    "valid_files",
    "valid_after",
    "split_by",
)


def _option_overrides(parameters: Mapping[str, Any]) -> list[str]:
    """Return the overrides of config keys that are options."""
    keys = {"baseline": "report.baseline", "start_from": "start_from", "like": "start.like"}
    overrides = [
        f"{key}={json.dumps(str(parameters[name]))}" for name, key in keys.items() if parameters[name] is not None
    ]
    overrides += [f"start.{name}=true" for name in ("again", "allow_unseen") if parameters[name]]
    for name in ("load", "reset"):
        if (text := parameters[name]) is not None:
            overrides.append(f"start.{name}={json.dumps([one.strip() for one in text.split(',') if one.strip()])}")
    return overrides


def _given_options(**options: Any) -> dict[str, Any]:
    """Return the options of PrepareOptions that are set on the command line."""
    # 'error' is the default of --bad-rows.
    return {name: value for name, value in options.items() if value not in (None, [], "error")}


def _split_arguments(arguments: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """Return the config, if the first argument is one, and the settings."""
    # The name of a config file may contain '='.
    if arguments and ("=" not in arguments[0] or Path(arguments[0]).is_file()):
        return Path(arguments[0]), arguments[1:]
    return None, arguments


def _ensure_prepared(options: PrepareOptions, *, checks_like: bool = True) -> Dataset:
    """Return the dataset of `options`. The first rank prepares it if needed, and the other ranks wait for it."""
    prepares = is_first_rank()
    while (dataset := _load_prepared(options, checks_like=checks_like)) is None:
        if prepares:
            return run_prepare(options, command="`meseta prepare FILE --out DIR`", is_result=False)
        time.sleep(0.2)  # If the first rank fails, the launcher ends this one.
    return dataset


def _load_prepared(options: PrepareOptions, *, checks_like: bool) -> Dataset | None:
    """Return the prepared dataset, or `None` if it has to be prepared."""
    from meseta.data.prepare import load_prepared

    try:
        return load_prepared(options, checks_like=checks_like)
    except MesetaError:
        # With --force, a dataset that was prepared with other options is replaced.
        if not options.force:
            raise
        return None


def _print_chosen(chosen: Mapping[str, Any], dataset: Dataset) -> None:
    values = {
        key: f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "") for key, value in chosen.items()
    }
    print(f"settings chosen for {dataset.splits['train'].num_rows:,} training rows:")
    print(textwrap.fill(" ".join(f"{key}={value}" for key, value in values.items()), 110, initial_indent="  ",
                        subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))  # fmt: skip
    print("to change a setting, append KEY=VALUE to the command; `meseta config` lists all keys")


def _print_new_rows(continued: Mapping[str, Any]) -> None:
    """Print metrics on the new rows of a run with a parent."""
    for key, title in (("test_first", "new rows, by the parent:"), ("progressive", "new rows, before each update:")):
        record = continued.get(key) or {}
        if "total" in record:
            print(f"{title} {format_metrics(record['total'])}")
        for group in ("with_new_ids", "without_new_ids"):
            if (metrics := record.get(group)) and metrics["num_samples"]:
                ne = metrics.get("ne")
                print(f"  {group.replace('_', ' ')}: NE {format_decimal(ne, 4)}  ({metrics['num_samples']:,} samples)")


def _print_result(summary: dict[str, Any], run_dir: Path) -> None:
    from meseta.telemetry.metrics import EVALUATED_SPLITS, TEST, selection_on_test_warning

    teacher, chosen, ends = summary["teacher"], summary.get("selected", {}), []
    _print_new_rows(summary.get("continued", {}))
    for split in (split for split in EVALUATED_SPLITS if split in summary):
        line = summary[split]
        ends.append((f"the {split} split", line.get("ids_outside")))
        print(f"{split} {format_metrics(line)}")
        if baseline := summary.get("baseline", {}).get("splits", {}).get(split):
            print(f"{split} {format_metrics(baseline)}  (LightGBM with default parameters)")
    if ends and line["step"] != summary["num_steps"]:
        print(f"these are the best weights, of step {line['step']:,}; the last step was {summary['num_steps']:,}")
    if note := selection_on_test_warning(chosen.get("split"), chosen.get("what", ())):
        print(f"note: {note}")
    if teacher and TEST in summary:
        print(f"best reachable: AUC {teacher['auc']:.4f}  NE {teacher['ne']:.4f}  (by the teacher, on the same rows)")
    speed = f"{summary['samples_per_s']:,.0f} samples/s" if summary["samples_per_s"] else "no step was left to do"
    print(f"{summary['num_samples']:,} samples in {summary['train_s']:.1f} s of training, {speed}, "
          f"{summary['num_ranks']} rank{'s' * (summary['num_ranks'] > 1)}")  # fmt: skip
    for what, outside in (("training", summary["ids_outside"]), *ends):
        if outside:
            counts = ", ".join(f"{feature} {count:,}" for feature, count in outside.items())
            print(f"out-of-range ids in {what}, handled by embedding.id_policy: {counts}")
    print(f"report: {run_dir / 'report.html'}")
