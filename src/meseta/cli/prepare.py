"""`meseta prepare`: converts raw click logs to a dataset."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meseta.errors import MesetaError
from meseta.telemetry.detail import CurrentDetail, Detail, LifeSignTimer, can_redraw

if TYPE_CHECKING:
    from rich.console import Console

    from meseta.data.dataset.dataset import Dataset
    from meseta.data.dataset.statistics import UnseenValues
    from meseta.data.prepare.first_pass import Progress
    from meseta.data.prepare.options import PrepareOptions
    from meseta.data.schema.layout import RawLayout

MAX_SHOWN_SHARES = 10
"""Maximum number of features to list in a table or in warnings."""
COLUMN_ARGUMENTS = ("label", "dense", "sparse", "multi_valued", "ignore", "time_column", "time_features", "buckets")
"""Arguments of commands that name columns."""
_COLUMNS_PANEL, _SPLITS_PANEL, _LIKE_PANEL = "Column types", "Splits", "Rows like earlier ones"
TestFractionOption = Annotated[
    float | None,
    typer.Option(
        help="Share of rows in the test split, from 0 to 1.", show_default="0.1", rich_help_panel=_SPLITS_PANEL
    ),
]
TestFilesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--test-files",
        metavar="FILE",
        help="File or pattern of the rows in the test split. May be repeated.",
        rich_help_panel=_SPLITS_PANEL,
    ),
]
TestAfterOption = Annotated[
    str | None,
    typer.Option(
        help="Time from which on rows belong to the test split, such as 2026-01-31.", rich_help_panel=_SPLITS_PANEL
    ),
]
ValidFractionOption = Annotated[
    float | None,
    typer.Option(
        help="Share of rows in the validation split, from 0 to 1.",
        show_default="none; of train --data, 0.1",
        rich_help_panel=_SPLITS_PANEL,
    ),
]
ValidFilesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--valid-files",
        metavar="FILE",
        help="File or pattern of the rows in the validation split. May be repeated.",
        rich_help_panel=_SPLITS_PANEL,
    ),
]
ValidAfterOption = Annotated[
    str | None,
    typer.Option(
        help="Time from which on rows belong to the validation split, until the test split.",
        rich_help_panel=_SPLITS_PANEL,
    ),
]
SplitByOption = Annotated[
    str | None,
    typer.Option(
        help="Rule by which rows are assigned to splits. time: the last rows. group: complete groups.",
        show_default="rows drawn by seed",
        rich_help_panel=_SPLITS_PANEL,
    ),
]
LabelOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Label column, several columns such as a,b, or a condition such as 'rating >= 4'.",
        show_default="by its name",
        rich_help_panel=_COLUMNS_PANEL,
    ),
]
DenseOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Dense (numeric) columns or patterns, such as age,I*. Other columns are inferred.",
        rich_help_panel=_COLUMNS_PANEL,
    ),
]
SparseOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Sparse (categorical) columns or patterns. A column may be both dense and sparse.",
        rich_help_panel=_COLUMNS_PANEL,
    ),
]
MultiValuedOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN[=CHAR]",
        help="Sparse columns or patterns whose text has several values, separated by CHAR. Without CHAR, the separator "
        "is inferred.",
        rich_help_panel=_COLUMNS_PANEL,
    ),
]
IgnoreOption = Annotated[
    list[str] | None, typer.Option(help="Columns or patterns to ignore.", rich_help_panel=_COLUMNS_PANEL)
]
TimeColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        "--time",
        help="Column of timestamps, to which --test-after and --valid-after refer.",
        show_default="by its name",
        rich_help_panel=_COLUMNS_PANEL,
    ),
]
TimeFeaturesOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Columns of times, or patterns, whose hour, weekday and age become features. none: no features.",
        show_default="the column of --time",
        rich_help_panel=_COLUMNS_PANEL,
    ),
]
BucketsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Columns of numbers, or patterns, whose 20 buckets of equal size become features too. NAME=N: N buckets. "
        "none: no features.",
        show_default="none; all numbers for raw data of `meseta train`",
        rich_help_panel=_COLUMNS_PANEL,
    ),
]
SchemaOption = Annotated[
    Path | None, typer.Option(help="YAML file with the types of all columns.", rich_help_panel=_COLUMNS_PANEL)
]
EncodingOption = Annotated[
    str | None,
    typer.Option(
        "--encoding",
        help="Text encoding of the files, such as cp1252.",
        show_default="UTF-8, or UTF-16",
        rich_help_panel=_COLUMNS_PANEL,
    ),
]
_PrintSchemaOption = Annotated[
    bool,
    typer.Option("--print-schema", help="Print the inferred schema as YAML and exit.", rich_help_panel=_COLUMNS_PANEL),
]

_SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Files, folders, URLs or patterns of CSV or other text, JSON lines, libsvm, libffm, Criteo TSV or "
        "Parquet.",
    ),
]
_BAD_ROWS_PANEL = "Invalid rows"
BadRowsOption = Annotated[
    str,
    typer.Option(
        help="Handling of rows that cannot be parsed. error: stop. skip: omit and count them.",
        rich_help_panel=_BAD_ROWS_PANEL,
    ),
]
MaxBadRowsOption = Annotated[
    str | None,
    typer.Option(
        help="With --bad-rows skip, the maximum number of invalid rows, or their share such as 0.01 or 1%.",
        show_default="1%",
        rich_help_panel=_BAD_ROWS_PANEL,
    ),
]

QuietOption = Annotated[bool, typer.Option("--quiet", help="Print only errors, warnings and results.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="Print more lines of progress, also in logs.")]
_LikeOption = Annotated[
    Path | None,
    typer.Option(
        "--like",
        metavar="DATASET|RUN",
        help="Encode the rows like those of this dataset, or of the dataset of this run. They may lack labels.",
        rich_help_panel=_LIKE_PANEL,
    ),
]
_AsOption = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="test|train",
        help="With --like, split of the rows. train: the next training rows, which options may split further.",
        show_default="test",
        rich_help_panel=_LIKE_PANEL,
    ),
]
_GrowOption = Annotated[
    bool,
    typer.Option(
        "--grow",
        help="With --like, add frequent values of the rows to the vocabularies. Implies --as train.",
        rich_help_panel=_LIKE_PANEL,
    ),
]
_RecountOption = Annotated[
    bool,
    typer.Option(
        "--recount",
        help="With --like, count vocabularies from these rows alone. Implies --as train.",
        rich_help_panel=_LIKE_PANEL,
    ),
]
RetireAfterOption = Annotated[
    int | None,
    typer.Option(
        help="With --grow, free the rows of values without an occurrence in this number of parts.",
        show_default="never",
        rich_help_panel=_LIKE_PANEL,
    ),
]
_MaxCandidatesOption = Annotated[
    int, typer.Option(help="With a vocabulary, maximum number of rarer values to count per feature, for --grow.")
]
WithoutOption = Annotated[
    list[str] | None,
    typer.Option(
        help="With --like and --as train, columns or features of the earlier dataset to leave out.",
        rich_help_panel=_LIKE_PANEL,
    ),
]
_HashRowsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Number of hashed rows per feature: N, or NAME=N for one feature. May be repeated.", show_default="100000"
    ),
]
_RecipeOnlyOption = Annotated[
    bool,
    typer.Option(
        "--recipe-only", help="Write no rows, only a recipe by which readers encode the raw files on the fly."
    ),
]
_LIKE_OPTIONS = {
    *("sources", "out", "like", "as_split", "force", "encoding", "bad_rows", "max_bad_rows", "quiet", "verbose"),
}
"""Options that may be combined with --like if it makes a test split."""
_TRAIN_OPTIONS = {
    *("test_fraction", "test_files", "test_after", "valid_fraction", "valid_files", "valid_after", "split_by"),
    *("dense", "sparse", "multi_valued", "schema", "without", "max_candidates", "label"),
}
"""Options that may be combined with --like if it makes training rows."""


def prepare(
    sources: _SourcesArgument,
    out: Annotated[Path, typer.Option(help="Folder to create.")],
    like: _LikeOption = None,
    as_split: _AsOption = None,
    grow: _GrowOption = False,
    recount: _RecountOption = False,
    retire_after: RetireAfterOption = None,
    without: WithoutOption = None,
    test_fraction: TestFractionOption = None,
    test_files: TestFilesOption = None,
    test_after: TestAfterOption = None,
    valid_fraction: ValidFractionOption = None,
    valid_files: ValidFilesOption = None,
    valid_after: ValidAfterOption = None,
    split_by: SplitByOption = None,
    seed: Annotated[int, typer.Option(help="Random seed of splits and hashes.")] = 0,
    hash_rows: _HashRowsOption = None,
    vocabulary: Annotated[bool, typer.Option("--vocabulary", help="Map frequent values to rows, no hashing.")] = False,
    min_count: Annotated[int, typer.Option(help="With --vocabulary, minimum number of occurrences of a value.")] = 10,
    max_candidates: _MaxCandidatesOption = 10_000_000,
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
    print_schema: _PrintSchemaOption = False,
    bad_rows: BadRowsOption = "error",
    max_bad_rows: MaxBadRowsOption = None,
    recipe_only: _RecipeOnlyOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing dataset in the folder.")] = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Convert raw click logs to a dataset for `meseta train`: Parquet files and a dataset.json."""
    arguments = locals()
    CurrentDetail.choose("prepare", quiet=quiet, verbose=verbose)
    trains = _check_as_split(as_split, like, is_counted=grow or recount)
    if like is not None and not trains:
        _check_like_options(arguments)
        _prepare_like(sources, out, like, force, {"encoding": encoding, **bad_row_options(bad_rows, max_bad_rows)})
        return
    from meseta.data.prepare.options import PrepareOptions

    rows, rows_by_feature = _read_hash_rows(hash_rows or [])
    options = PrepareOptions(
        sources=sources,
        out=out,
        test_files=test_files or (),
        test_fraction=test_fraction,
        test_after=test_after,
        valid_files=valid_files or (),
        valid_fraction=valid_fraction,
        valid_after=valid_after,
        split_by=split_by,
        seed=seed,
        hash_rows=rows,
        hash_rows_by_feature=rows_by_feature,
        vocabulary=vocabulary,
        min_count=min_count,
        max_candidates=max_candidates,
        like=like,
        grow=grow,
        recount=recount,
        retire_after=retire_after,
        without=[name for entry in without or () for name in comma_list(entry)],
        **column_options(arguments),
        schema=schema,
        encoding=encoding,
        recipe_only=recipe_only,
        force=force,
        **bad_row_options(bad_rows, max_bad_rows),
    )
    (_print_schema if print_schema else run_prepare)(options)


def _check_as_split(as_split: str | None, like: Path | None, *, is_counted: bool) -> bool:
    """Whether rows like earlier ones are training rows. Raises MesetaError if the options exclude each other."""
    if as_split not in (None, "test", "train"):
        raise MesetaError(f"prepare: --as must be test or train, got {as_split!r}")
    if as_split is not None and like is None:
        raise MesetaError("prepare: --as needs an earlier dataset; add --like DATASET|RUN")
    if as_split == "test" and is_counted:
        raise MesetaError("prepare: --as test excludes --grow and --recount, which need training rows; omit one")
    return as_split == "train" or is_counted


def _check_like_options(chosen: Mapping[str, Any]) -> None:
    """Raise MesetaError if `chosen`, the arguments of `prepare`, has options that the earlier dataset determines."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(prepare).parameters.items()}
    # An option with its default value counts as not set.
    names = [name for name, value in chosen.items() if value not in (defaults[name], None, [])]
    if excluded := sorted({*names} - _LIKE_OPTIONS):
        options = ", ".join(f"--{name.removesuffix('_column').replace('_', '-')}" for name in excluded)
        hint = ", or make training rows with --as train" if {*excluded} <= _TRAIN_OPTIONS else ""
        raise MesetaError(
            f"prepare: {options} cannot be combined with --like, which determines the encoding; omit one{hint}"
        )


def _prepare_like(sources: list[str], out: Path, like: Path, force: bool, chosen: dict[str, Any]) -> None:
    from meseta.data.prepare.prepare_like import PrepareLikeOptions, prepare_like

    options = PrepareLikeOptions(sources=sources, out=out, like=like, force=force, **chosen)
    start_s = time.perf_counter()
    with progress_bar() as progress:
        dataset, unseen = prepare_like(options, partial(progress, "read"))
    print_summary(dataset, options.out, time.perf_counter() - start_s)
    print_unseen(unseen)


def print_unseen(unseen: UnseenValues) -> None:
    """Print the share of values per feature that training did not see, largest first, and warnings."""
    if not CurrentDetail.is_quiet():
        _print_unseen_shares(unseen)
    warnings = unseen.warnings()
    for line in warnings[:MAX_SHOWN_SHARES]:
        typer.echo(f"warning: {line}", err=True)
    if len(warnings) > MAX_SHOWN_SHARES:
        typer.echo(f"warning: and {len(warnings) - MAX_SHOWN_SHARES} more features with this problem", err=True)


def _print_unseen_shares(unseen: UnseenValues) -> None:
    shares = unseen.shares()
    shown = [(name, share) for name, share in shares[:MAX_SHOWN_SHARES] if share]
    if shown:
        typer.echo("  values not seen in training, which use row 0 or the row of their hash:")
        width = max(len(name) for name, _ in shown)
        for name, share in shown:
            typer.echo(f"    {name:{width}} {share:7.2%}")
        more = sum(share > 0 for _, share in shares[MAX_SHOWN_SHARES:])
        typer.echo(f"    and {more} other features with a smaller share") if more else None
    elif shares:
        typer.echo("  all values were seen in training")
    if unseen.uncounted_features:
        names = ", ".join(unseen.uncounted_features[:MAX_SHOWN_SHARES]) + (
            ", ..." if len(unseen.uncounted_features) > MAX_SHOWN_SHARES else ""
        )
        typer.echo(f"  unknown share of unseen values for {names}: the earlier dataset has no record of its values")


def _print_schema(options: PrepareOptions) -> None:
    from meseta.data.prepare.run import read_layout
    from meseta.data.schema.schema import format_schema

    typer.echo(format_schema(read_layout(options)), nl=False)


def run_prepare(options: PrepareOptions, command: str = "the same command", *, is_result: bool = True) -> Dataset:
    """Prepare a dataset. Prints the column types, how to change them with `command`, and a summary.

    A quiet command prints one line if `is_result`, and which rows and values it omitted.
    """
    from meseta.data.prepare.continuation import missing_counts_note
    from meseta.data.prepare.run import prepare

    start_s = time.perf_counter()
    if note := missing_counts_note(options):
        typer.echo(f"note: {note}", err=True)
    with progress_bar() as progress:
        by_chance = options.split_rule("test") == "fraction" and options.split_by is None and options.like is None
        show = partial(print_layout, has_schema=options.schema is not None, is_random_split=by_chance, command=command)
        dataset = prepare(options, progress, None if CurrentDetail.is_quiet() or options.like is not None else show)
    print_summary(dataset, options.out, time.perf_counter() - start_s, is_result=is_result)
    if not CurrentDetail.is_quiet():
        _print_dates(dataset)
        _print_growth(dataset)
        if options.valid_by_time and dataset.time is not None:
            _print_valid_rule(dataset)
    return dataset


def _print_growth(dataset: Dataset) -> None:
    """Print how many values got and lost rows in the vocabularies, largest change first."""
    changes = [(f.num_added + f.num_retired, f) for f in dataset.sparse if f.num_added or f.num_retired]
    for _, feature in sorted(changes, key=lambda change: -change[0])[:MAX_SHOWN_SHARES]:
        retired = f", {feature.num_retired:,} retired" if feature.num_retired else ""
        typer.echo(f"  {feature.name}: {feature.num_added:,} new values{retired}, {feature.num_embeddings:,} rows")
    if len(changes) > MAX_SHOWN_SHARES:
        typer.echo(f"  and {len(changes) - MAX_SHOWN_SHARES} more features with new or retired values")


def _print_dates(dataset: Dataset) -> None:
    """Print which columns of times give no hour."""
    hours = {feature.made_of for feature in dataset.sparse if feature.encoding == "hour"}
    for age in (feature.age for feature in dataset.dense if feature.age is not None):
        if (age.column,) not in hours:
            typer.echo(f"  {age.column} has dates without clock times, so {age.column}.hour is no feature")


def _print_valid_rule(dataset: Dataset) -> None:
    """Print how the valid split was made that no option asked for."""
    from meseta.data.prepare.survey import MIN_VALID_ROWS

    if dataset.valid_from is not None:
        since = (
            datetime.fromtimestamp(dataset.valid_from, UTC)
            .isoformat(sep=" ", timespec="seconds")
            .removesuffix("+00:00")
        )
        rule = f"the last {dataset.valid_fraction:g} of the other rows by {dataset.time}, from {since} UTC on"
    elif dataset.split_by is None:
        rule = f"drawn at random, because rows at the end of {dataset.time} are equal or fewer than {MIN_VALID_ROWS}"
    else:
        return
    typer.echo(f"  valid rows are {rule}; --valid-fraction draws them, --valid-after sets the time")


def bad_row_options(policy: str, limit: str | None) -> dict[str, Any]:
    """Return options of PrepareOptions. The limit "100" is a number of rows; "0.01" and "1%" are shares."""
    if limit is None:
        return {"bad_rows": policy}
    if policy != "skip":
        raise MesetaError("prepare: --max-bad-rows needs --bad-rows skip; otherwise the first invalid row is an error")
    try:
        if limit.endswith("%"):
            return {"bad_rows": policy, "max_bad_rows": float(limit[:-1]) / 100}
        return {"bad_rows": policy, "max_bad_rows": float(limit) if "." in limit else int(limit.replace("_", ""))}
    except ValueError:
        raise MesetaError(
            f"prepare: --max-bad-rows {limit!r} must be a number of rows, or a share such as 0.01 or 1%"
        ) from None


def comma_list(text: str) -> list[str]:
    """Split names that are separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


# An entry of --multi-valued. A comma or a space may be the separator that it names.
_MULTI_VALUED_ENTRY = re.compile(r"[^,]*?=.(?=,|$)|[^,]+")


def column_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of PrepareOptions that name columns. Entries hold names or patterns, separated by commas.

    `arguments` are those of a command. The entry `none` alone means no features of times or
    buckets.
    """
    columns: dict[str, Sequence[str] | None] = {
        name.removesuffix("_column"): arguments.get(name) for name in COLUMN_ARGUMENTS
    }
    names = {
        option: [
            name
            for entry in entries
            for name in (_multi_valued_list(entry) if option == "multi_valued" else comma_list(entry))
        ]
        for option, entries in columns.items()
        if entries
    }
    # A single label is passed as a string.
    options: dict[str, Any] = {
        option: parts[0] if option == "label" and len(parts) == 1 else parts for option, parts in names.items()
    }
    return options | {name: () for name in ("time_features", "buckets") if names.get(name) == ["none"]}


def _multi_valued_list(text: str) -> list[str]:
    entries = [entry.lstrip() for entry in _MULTI_VALUED_ENTRY.findall(text)]
    return [entry if entry[-2:-1] == "=" else entry.rstrip() for entry in entries if entry]


def _read_hash_rows(entries: Sequence[str]) -> tuple[int, dict[str, int]]:
    """Parse `["50000", "cat_2=1000000"]` to (50000, {"cat_2": 1000000})."""
    default, by_feature = 100_000, {}
    for entry in entries:
        name, _, number = entry.rpartition("=")
        try:
            rows = int(number.replace("_", ""))
        except ValueError:
            raise MesetaError(f"prepare: --hash-rows {entry!r} must be a number of rows, or NAME=ROWS") from None
        if name:
            by_feature[name] = rows
        else:
            default = rows
    return default, by_feature


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Context manager that shows the progress of preparation on stderr.

    On a terminal, one updating line has the phase, its share, rows, rows/s and remaining time. Elsewhere each phase
    prints a line at its end, and one after each minute. A quiet command prints nothing.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if CurrentDetail.is_quiet():
        yield lambda phase, rows, share: None
    elif can_redraw(console):
        with _phase_bar(console) as update:
            yield update
    else:
        lines = _PhaseLines()
        yield lines.update
        lines.end()


@contextmanager
def _phase_bar(console: Console) -> Iterator[Progress]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:5}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rows]:>13,} rows"),
        TextColumn("{task.fields[rate]:>9,.0f} rows/s"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, refresh_per_second=4, transient=True)
    task = bar.add_task("", total=1.0, rows=0, rate=0.0)
    first_rows = 0

    def update(phase: str, rows: int, share: float) -> None:
        nonlocal first_rows
        if phase != bar.tasks[task].description:
            bar.reset(task, description=phase, rows=rows, rate=0.0)
            bar.start()
            first_rows = rows
        # The rate is that of the current phase. `rows` may start above 0.
        rate = (rows - first_rows) / max(bar.tasks[task].elapsed or 0.0, 1e-3)
        bar.update(task, completed=share, rows=rows, rate=rate)

    try:
        yield update
    finally:
        if bar.tasks[task].description:
            bar.stop()


class _PhaseLines:
    """Lines of progress for logs. With `--verbose`, there is one per tenth of a phase."""

    def __init__(self) -> None:
        self._phase, self._rows, self._tenth = "", 0, 0
        self._start_s = 0.0
        self._timer = LifeSignTimer()

    def update(self, phase: str, rows: int, share: float) -> None:
        """Set the rows and the completed share of a phase."""
        if phase != self._phase:
            self.end()
            self._phase, self._tenth, self._start_s = phase, 0, time.perf_counter()
        tenth, self._rows = int(share * 10), rows
        is_next = CurrentDetail.level == Detail.VERBOSE and self._tenth < tenth < 10
        if is_next or self._timer.is_due():
            self._print(f"{phase}: {rows:,} rows, {share:.0%}")
        self._tenth = tenth

    def end(self) -> None:
        """Print the result of the last phase, if there is one."""
        if self._phase:
            self._print(f"{self._phase}: {self._rows:,} rows in {time.perf_counter() - self._start_s:.1f} s")

    def _print(self, text: str) -> None:
        self._timer.restart()
        typer.echo(text, err=True)


def print_layout(
    layout: RawLayout, *, has_schema: bool, is_random_split: bool = False, command: str = "the same command"
) -> None:
    """Print the inferred type of each column as a schema file, and how to change it with `command`.

    If the test split is random and the rows have times, also suggests --test-after.
    """
    from meseta.data.schema.schema import format_schema

    if not layout.reasons and not has_schema:
        return  # The layout of Criteo files is fixed, not inferred.
    typer.echo(f"columns, {'from the schema file' if has_schema else 'as inferred'}:")
    typer.echo("".join(f"  {line}\n" for line in format_schema(layout).splitlines()), nl=False)
    if not has_schema:
        typer.echo(
            "to change column types, use --label, --dense, --sparse, --multi-valued, --ignore, --time, "
            f"--time-features or --buckets with names or patterns, or a schema file: {command} with --print-schema > "
            "schema.yaml, edit it, then run with --schema schema.yaml"
        )
    if is_random_split and (layout.time is not None or layout.other_times):
        option = "" if layout.time is not None else f"--time {layout.other_times[0]} "
        typer.echo(
            f"test rows are drawn at random from all times; {option}--test-after TIME tests on later rows, as in "
            "production"
        )


def print_summary(dataset: Dataset, out: Path, elapsed_s: float, *, is_result: bool = True) -> None:
    """Print the rows, splits and features of a dataset. `elapsed_s` is the time of its preparation.

    A quiet command prints the number of rows if `is_result`, and which rows and values were omitted.
    """
    num_rows = sum(split.num_rows for split in dataset.splits.values())
    if is_result or not CurrentDetail.is_quiet():
        typer.echo(f"{num_rows:,} rows in {elapsed_s:.1f} s ({num_rows / elapsed_s:,.0f} rows/s) to {out}")
    if not CurrentDetail.is_quiet():
        _print_splits(dataset)
    if dataset.num_unlabelled:
        typer.echo(f"  {dataset.num_unlabelled:,} rows have no label and were omitted")
    for name, number in dataset.not_finite.items():
        typer.echo(f"  {name}: {number:,} values are inf or nan and count as missing")
    if dataset.bad_rows and dataset.bad_rows.num_rows:
        typer.echo(f"  {dataset.bad_rows.num_rows:,} rows could not be parsed and were omitted:")
        for place in dataset.bad_rows.first:
            typer.echo(f"    {place}")
        if dataset.bad_rows.num_rows > len(dataset.bad_rows.first):
            typer.echo("    ...")


def _print_splits(dataset: Dataset) -> None:
    from rich import print as show

    from meseta.data.schema.layout import NO_CATEGORY

    for name, split in dataset.splits.items():
        shares = ", ".join(f"{label} {rate:.4f}".strip() for label, rate in split.base_rates.items())
        labels = f"{shares} positive" if dataset.has_labels else "without labels"
        where = f"{len(split.files)} files" if dataset.recipe is None else "encoded on the fly"
        show(f"  {name:5} {split.num_rows:>13,} rows, {where}, {labels}")
    num_sparse = sum(feature.name != NO_CATEGORY.name for feature in dataset.sparse)
    show(f"  {len(dataset.dense)} dense and {num_sparse} sparse features")
