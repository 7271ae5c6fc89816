"""`meseta prepare`: raw click logs to a dataset directory."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meseta.errors import MesetaError

if TYPE_CHECKING:
    from meseta.data.dataset.dataset import Dataset
    from meseta.data.dataset.unseen_values import UnseenValues
    from meseta.data.layout import RawLayout
    from meseta.data.prepare.first_pass import Progress
    from meseta.data.prepare.options import PrepareOptions

MAX_SHOWN_SHARES = 10
"""Lines of a table that is printed of features."""
_COLUMNS_PANEL, _SPLITS_PANEL = "What the columns are", "What is kept from training"
TestFractionOption = Annotated[
    float | None, typer.Option(help="Share of rows for testing.", show_default="0.1", rich_help_panel=_SPLITS_PANEL)
]
TestFilesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--test-files",
        metavar="FILE",
        help="File or pattern of rows for testing; repeatable.",
        rich_help_panel=_SPLITS_PANEL,
    ),
]
TestAfterOption = Annotated[
    str | None, typer.Option(help="Time from which on rows are for testing: 2026-01-31.", rich_help_panel=_SPLITS_PANEL)
]
ValidFractionOption = Annotated[
    float | None,
    typer.Option(
        help="Share of rows for choosing, the valid split.",
        show_default="none; of train --data, 0.1",
        rich_help_panel=_SPLITS_PANEL,
    ),
]
ValidFilesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--valid-files",
        metavar="FILE",
        help="File or pattern of rows for choosing; repeatable.",
        rich_help_panel=_SPLITS_PANEL,
    ),
]
ValidAfterOption = Annotated[
    str | None,
    typer.Option(help="Time from which on they are for choosing, until testing.", rich_help_panel=_SPLITS_PANEL),
]
SplitByOption = Annotated[
    str | None,
    typer.Option(
        help="Shares of what. time: the last rows; group: whole groups.",
        show_default="rows drawn by seed",
        rich_help_panel=_SPLITS_PANEL,
    ),
]
LabelOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Column of the label, or of several: a,b; or a condition: 'rating >= 4'.",
        show_default="by its name",
        rich_help_panel=_COLUMNS_PANEL,
    ),
]
DenseOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Columns that are numbers, or patterns: age,I*. The rest is inferred.", rich_help_panel=_COLUMNS_PANEL
    ),
]
SparseOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Columns that are categories, likewise; under --dense too: both.", rich_help_panel=_COLUMNS_PANEL
    ),
]
IgnoreOption = Annotated[
    list[str] | None, typer.Option(help="Columns that are left out, likewise.", rich_help_panel=_COLUMNS_PANEL)
]
TimeColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        "--time",
        help="Column of times, which --test-after goes by.",
        show_default="by its name",
        rich_help_panel=_COLUMNS_PANEL,
    ),
]
SchemaOption = Annotated[
    Path | None, typer.Option(help="YAML file that says what the columns are.", rich_help_panel=_COLUMNS_PANEL)
]
EncodingOption = Annotated[
    str | None,
    typer.Option(
        "--encoding", help="Of text, such as cp1252.", show_default="UTF-8, or UTF-16", rich_help_panel=_COLUMNS_PANEL
    ),
]
_PrintSchemaOption = Annotated[
    bool, typer.Option("--print-schema", help="Print that file, as inferred, and stop.", rich_help_panel=_COLUMNS_PANEL)
]

_SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Files, folders, URLs or patterns: CSV and other text, JSON lines, libsvm, libffm or Criteo TSV, or "
        "Parquet.",
    ),
]
_BAD_ROWS_PANEL = "Rows that cannot be parsed"
BadRowsOption = Annotated[
    str, typer.Option(help="error: stop there. skip: leave them out, and count them.", rich_help_panel=_BAD_ROWS_PANEL)
]
MaxBadRowsOption = Annotated[
    str | None,
    typer.Option(
        help="With skip: stop when there are more; a number of rows, or a share such as 0.01 or 1%.",
        show_default="1%",
        rich_help_panel=_BAD_ROWS_PANEL,
    ),
]


_LikeOption = Annotated[
    Path | None,
    typer.Option(
        "--like",
        metavar="DATASET|RUN",
        help="Encode the rows, with labels or without, as an earlier dataset has its own, or that of a run.",
    ),
]
_HashRowsOption = Annotated[
    list[str] | None,
    typer.Option(help="Table rows that features are hashed to: N, or NAME=N for one of them.", show_default="100000"),
]
_RecipeOnlyOption = Annotated[
    bool,
    typer.Option(
        "--recipe-only", help="Write no rows: they are made from the sources, by a recipe, each time they are read."
    ),
]
_LIKE_OPTIONS = {"sources", "out", "like", "force", "encoding", "bad_rows", "max_bad_rows"}
"""Options that have a meaning beside --like."""


def prepare(
    sources: _SourcesArgument,
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    like: _LikeOption = None,
    test_fraction: TestFractionOption = None,
    test_files: TestFilesOption = None,
    test_after: TestAfterOption = None,
    valid_fraction: ValidFractionOption = None,
    valid_files: ValidFilesOption = None,
    valid_after: ValidAfterOption = None,
    split_by: SplitByOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the splits and of the hashes.")] = 0,
    hash_rows: _HashRowsOption = None,
    vocabulary: Annotated[bool, typer.Option("--vocabulary", help="Rows for frequent values, no hashing.")] = False,
    min_count: Annotated[int, typer.Option(help="With --vocabulary: occurrences that earn a row.")] = 10,
    label: LabelOption = None,
    dense: DenseOption = None,
    sparse: SparseOption = None,
    ignore: IgnoreOption = None,
    time_column: TimeColumnOption = None,
    schema: SchemaOption = None,
    encoding: EncodingOption = None,
    print_schema: _PrintSchemaOption = False,
    bad_rows: BadRowsOption = "error",
    max_bad_rows: MaxBadRowsOption = None,
    recipe_only: _RecipeOnlyOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier dataset.")] = False,
) -> None:
    """Turn raw click logs into a dataset that `meseta train` reads: Parquet files and dataset.json."""
    if like is not None:
        _check_like_options(locals())
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
        **column_options(label=label, dense=dense, sparse=sparse, ignore=ignore, time=time_column),
        schema=schema,
        encoding=encoding,
        recipe_only=recipe_only,
        force=force,
        **bad_row_options(bad_rows, max_bad_rows),
    )
    (_print_schema if print_schema else run_prepare)(options)


def _check_like_options(chosen: Mapping[str, Any]) -> None:
    """What an earlier dataset has decided is not asked for again; `chosen` are the arguments of `prepare`."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(prepare).parameters.items()}
    names = [name for name, value in chosen.items() if value not in (defaults[name], None, [])]
    if others := sorted({*names} - _LIKE_OPTIONS):
        options = ", ".join(f"--{name.removesuffix('_column').replace('_', '-')}" for name in others)
        raise MesetaError(f"prepare: {options} and --like exclude each other: the rows become what they are there")


def _prepare_like(sources: list[str], out: Path, like: Path, force: bool, chosen: dict[str, Any]) -> None:
    from meseta.data.prepare.prepare_like import PrepareLikeOptions, prepare_like

    options = PrepareLikeOptions(sources=sources, out=out, like=like, force=force, **chosen)
    start_s = time.perf_counter()
    with progress_bar() as progress:
        dataset, unseen = prepare_like(options, partial(progress, "read"))
    print_summary(dataset, options.out, time.perf_counter() - start_s)
    print_unseen(unseen)


def print_unseen(unseen: UnseenValues) -> None:
    """Print which share of each feature's values training has not seen, the largest first, and warn of some."""
    shares = unseen.shares()
    shown = [(name, share) for name, share in shares[:MAX_SHOWN_SHARES] if share]
    if shown:
        typer.echo("  values that training has not seen, which share row 0, or the row of their hash:")
        width = max(len(name) for name, _ in shown)
        for name, share in shown:
            typer.echo(f"    {name:{width}} {share:7.2%}")
        more = sum(share > 0 for _, share in shares[MAX_SHOWN_SHARES:])
        typer.echo(f"    and {more} other features with less") if more else None
    elif shares:
        typer.echo("  training has seen all values")
    if unseen.uncounted_features:
        names = ", ".join(unseen.uncounted_features[:MAX_SHOWN_SHARES]) + (
            ", ..." if len(unseen.uncounted_features) > MAX_SHOWN_SHARES else ""
        )
        typer.echo(f"  how many values are new cannot be told of {names}: the earlier dataset did not keep that")
    warnings = unseen.warnings()
    for line in warnings[:MAX_SHOWN_SHARES]:
        typer.echo(f"warning: {line}", err=True)
    if len(warnings) > MAX_SHOWN_SHARES:
        typer.echo(f"warning: and {len(warnings) - MAX_SHOWN_SHARES} other features likewise", err=True)


def _print_schema(options: PrepareOptions) -> None:
    from meseta.data.prepare.run import read_layout
    from meseta.data.schema.schema import format_schema

    typer.echo(format_schema(read_layout(options)), nl=False)


def run_prepare(options: PrepareOptions, command: str = "the same command") -> Dataset:
    """Prepare, and print what the columns are, how to change that with `command`, and what came of it."""
    from meseta.data.prepare.run import prepare

    start_s = time.perf_counter()
    with progress_bar() as progress:
        by_chance = options.split_rule("test") == "fraction" and options.split_by is None
        show = partial(print_layout, has_schema=options.schema is not None, is_random_split=by_chance, command=command)
        dataset = prepare(options, progress, show)
    print_summary(dataset, options.out, time.perf_counter() - start_s)
    return dataset


def bad_row_options(policy: str, limit: str | None) -> dict[str, Any]:
    """Options of PrepareOptions; of the limit, "100" are rows, and "0.01" or "1%" a share."""
    if limit is None:
        return {"bad_rows": policy}
    if policy != "skip":
        raise MesetaError(
            "prepare: --max-bad-rows goes with --bad-rows skip; without it the first bad row stops the work"
        )
    try:
        if limit.endswith("%"):
            return {"bad_rows": policy, "max_bad_rows": float(limit[:-1]) / 100}
        return {"bad_rows": policy, "max_bad_rows": float(limit) if "." in limit else int(limit.replace("_", ""))}
    except ValueError:
        raise MesetaError(
            f"prepare: --max-bad-rows {limit!r} must be a number of rows, or a share such as 0.01 or 1%"
        ) from None


def comma_list(text: str) -> list[str]:
    """Names that are parted by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def column_options(**columns: Sequence[str] | None) -> dict[str, Any]:
    """Options of PrepareOptions that name columns; each entry holds names or patterns, parted by commas."""
    names = {
        option: [name for entry in entries for name in comma_list(entry)]
        for option, entries in columns.items()
        if entries
    }
    return {option: found[0] if option == "label" and len(found) == 1 else found for option, found in names.items()}


def _read_hash_rows(entries: Sequence[str]) -> tuple[int, dict[str, int]]:
    """`["50000", "cat_2=1000000"]` to (50000, {"cat_2": 1000000})."""
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
    """A live line per pass on standard error: share done, rows, rows per second, time left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:5}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rows]:>13,} rows"),
        TextColumn("{task.fields[rate]:>9,.0f} rows/s"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), refresh_per_second=4)
    tasks: dict[str, TaskID] = {}
    begun_at: dict[str, int] = {}

    def update(stage: str, rows: int, share: float) -> None:
        # Stages appear as they begin: not every kind of file is scanned.
        if stage not in tasks:
            bar.start()
            tasks[stage] = bar.add_task(stage, total=1.0, rows=0, rate=0.0)
            begun_at[stage] = rows
        task = bar.tasks[tasks[stage]]
        rate = (rows - begun_at[stage]) / max(task.elapsed or 0.0, 1e-3)
        bar.update(task.id, completed=share, rows=rows, rate=rate)

    try:
        yield update
    finally:
        if tasks:
            bar.stop()


def print_layout(
    layout: RawLayout, *, has_schema: bool, is_random_split: bool = False, command: str = "the same command"
) -> None:
    """What each column is taken for, as the schema file that says so, and how to change it with `command`; and that
    rows with times could be tested on later ones, where chance splits them."""
    from meseta.data.schema.schema import format_schema

    if not layout.reasons and not has_schema:
        return  # Criteo's, which is no guess
    typer.echo(f"columns, {'as the schema says' if has_schema else 'as inferred'}:")
    typer.echo("".join(f"  {line}\n" for line in format_schema(layout).splitlines()), nl=False)
    if not has_schema:
        typer.echo(
            "to change that: --label, --dense, --sparse, --ignore or --time with names or patterns; or all of it in a "
            f"file: {command} with --print-schema > schema.yaml, edit it, then this one with --schema schema.yaml"
        )
    if is_random_split and (layout.time is not None or layout.other_times):
        option = "" if layout.time is not None else f"--time {layout.other_times[0]} "
        typer.echo(
            f"test rows are drawn by chance from all times; {option}--test-after TIME tests on later ones, as those of "
            "tomorrow will be"
        )


def print_summary(dataset: Dataset, out: Path, elapsed_s: float) -> None:
    """Rows, splits and features of a dataset that took `elapsed_s` seconds."""
    from rich import print as show

    from meseta.data.layout import NO_CATEGORY

    num_rows = sum(split.num_rows for split in dataset.splits.values())
    show(f"{num_rows:,} rows in {elapsed_s:.1f} s ({num_rows / elapsed_s:,.0f} rows/s) to {out}")
    for name, split in dataset.splits.items():
        shares = ", ".join(f"{label} {rate:.4f}".strip() for label, rate in split.base_rates.items())
        labels = f"{shares} positive" if dataset.has_labels else "without labels"
        where = f"{len(split.files)} files" if dataset.recipe is None else "made as they are read"
        show(f"  {name:5} {split.num_rows:>13,} rows, {where}, {labels}")
    num_sparse = sum(feature.name != NO_CATEGORY.name for feature in dataset.sparse)
    show(f"  {len(dataset.dense)} dense and {num_sparse} sparse features")
    if dataset.num_unlabelled:
        typer.echo(f"  {dataset.num_unlabelled:,} rows have none of the labels and were left out")
    for name, number in dataset.not_finite.items():
        typer.echo(f"  {name}: {number:,} values are inf or nan, and count as missing")
    if dataset.bad_rows and dataset.bad_rows.num_rows:
        typer.echo(f"  {dataset.bad_rows.num_rows:,} rows could not be parsed and were left out:")
        for place in dataset.bad_rows.first:
            typer.echo(f"    {place}")
        if dataset.bad_rows.num_rows > len(dataset.bad_rows.first):
            typer.echo("    ...")
