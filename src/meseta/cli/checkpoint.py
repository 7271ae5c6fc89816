"""`meseta checkpoint`: commands that list, verify, compare, convert and compress checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meseta.checkpoint import CheckpointSummary
    from meseta.system.remote import Location

app = typer.Typer(help="List, verify, compare, export and import checkpoints.", no_args_is_help=True)

CheckpointArgument = Annotated[
    str,
    typer.Argument(
        help="Path or URL of a checkpoint or a folder of checkpoints (uses the newest), or path of a run (uses its "
        "final weights, see train.finish)."
    ),
]


@app.command(name="list")
def list_command(
    path: Annotated[str, typer.Argument(help="Path of a run, or path or URL of its folder of checkpoints.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List all checkpoints with step, size and checksum. Exits with 1 if one is damaged or unreadable."""
    from meseta.checkpoint import list_checkpoints
    from meseta.checkpoint.listing import find_checkpoint_folder
    from meseta.checkpoint.store.store import make_store
    from meseta.telemetry.formatting import format_bytes

    listing = list_checkpoints(path)
    if as_json:
        lines = [
            {"path": str(c.path), "problem": c.problem, **(_to_json(c.summary) if c.summary else {})} for c in listing
        ]
        typer.echo(json.dumps(lines, indent=1))
    for listed in () if as_json else listing:
        if listed.summary is None:
            typer.echo(f"{listed.path}  {'damaged' if listed.is_readable else 'not read'}: {listed.problem}")
        else:
            s = listed.summary
            # The size of a delta is followed by the total size including the files of older checkpoints that it needs.
            size = f"{format_bytes(s.own_bytes)}{f' of {format_bytes(s.num_bytes)}' if s.needs else ''}"
            typer.echo(f"{s.path}  {_format_saved_at(s)}  {size}  {len(s.tables)} tables  {_describe_content(s, 16)}")
    store = make_store(find_checkpoint_folder(path))
    for path_before in () if as_json else store.quarantined():
        typer.echo(f"{path_before}  quarantined: it was damaged, and the run resumed from an older checkpoint")
    for path_of_another in () if as_json else store.unrecognized_entries():
        typer.echo(f"{path_of_another}  not a checkpoint")
    if any(listed.summary is None for listed in listing):
        raise typer.Exit(1)


def _resolve_checkpoint(path: str) -> Location:
    """Return the location of the checkpoint that a path or URL names."""
    from meseta.checkpoint import find_checkpoint
    from meseta.system.remote import to_location
    from meseta.train.run_dir import RunDir

    place = to_location(path)
    # Only local run folders have a config with train.finish. A URL leads to checkpoints.
    final = RunDir(place).final_checkpoint() if isinstance(place, Path) else None
    return final or find_checkpoint(place)


@app.command()
def inspect(
    path: CheckpointArgument, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show the tables of a checkpoint with rows, types, optimizers and sizes, and the position in the data."""
    from meseta.checkpoint import summarize
    from meseta.telemetry.formatting import format_bytes

    summary = summarize(_resolve_checkpoint(path))
    if as_json:
        typer.echo(json.dumps(_to_json(summary), indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    typer.echo(
        f"{summary.path}: step {summary.step:,}, {_format_saved_at(summary)}, saved by {summary.num_ranks} ranks"
    )
    typer.echo(_describe_content(summary))
    shown = Table()
    for name in ("table", "rows", "dim", "type", "optimizer", "states", "size"):
        shown.add_column(name, justify="right" if name in ("rows", "dim", "size") else "left", no_wrap=name != "states")
    for t in summary.tables:
        states, size = ", ".join(t.states), format_bytes(t.num_bytes)
        kind = f"{t.dtype} ±{t.row_error:.2g}" if t.row_error else t.dtype
        shown.add_row(t.name, f"{t.num_embeddings:,}", str(t.embedding_dim), kind, t.optimizer, states, size)
    shown.add_row("dense tensors", "", "", "", "", "", format_bytes(summary.dense_bytes))
    if summary.carried_bytes:
        shown.add_row("prefetched embeddings", "", "", "", "", "", format_bytes(summary.carried_bytes))
    Console().print(shown)
    typer.echo(f"position in the data: {json.dumps(summary.reader)}")


def _describe_content(summary: CheckpointSummary, digits: int = 64) -> str:
    """Return the checksum of the model or chain, and the older checkpoints that are needed."""
    name = f"model {summary.checksum[:digits]}" if summary.checksum else f"chain {(summary.chain or '')[:digits]}"
    if not summary.needs:
        return name
    steps = ", ".join(f"{step:,}" for step in summary.needs)
    return f"{name}  {summary.policy} delta, needs files of step {steps}"


@app.command()
def compact(
    path: CheckpointArgument,
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint. It is created if it does not exist.")],
) -> None:
    """Merge a delta checkpoint and the older ones that it needs into a full checkpoint OUT/step-..."""
    from meseta.checkpoint import compact as write_whole
    from meseta.checkpoint import summarize

    source = _resolve_checkpoint(path)
    summary = summarize(source)
    with _progress(sum(table.num_embeddings for table in summary.tables), "compact") as on_rows:
        made = write_whole(source, out, on_rows=on_rows)
    typer.echo(f"{made}: {_describe_content(summarize(made))}")


@app.command()
def verify(path: CheckpointArgument) -> None:
    """Read all bytes of a checkpoint and check the checksums. If one differs, names the file and exits with 1."""
    from meseta.checkpoint import summarize
    from meseta.checkpoint import verify as check
    from meseta.telemetry.formatting import format_bytes

    location = _resolve_checkpoint(path)
    summary, start_s = summarize(location), time.perf_counter()
    checksum = check(location)
    rate = summary.num_bytes / (time.perf_counter() - start_s) / 1e6
    typer.echo(f"{location}: intact, {format_bytes(summary.num_bytes)} read, {rate:,.0f} MB/s, model {checksum}")


@app.command()
def diff(first: CheckpointArgument, second: CheckpointArgument) -> None:
    """List the tables, rows and dense tensors in which two checkpoints differ.

    Also compares the meaning of their ids and dense columns. Exits with 1 if there is a difference.
    """
    from meseta.checkpoint import compare
    from meseta.data.dataset.encoding import encoding_difference
    from meseta.train.dataset_checks import load_encoding

    differs = False
    one, other = _resolve_checkpoint(first), _resolve_checkpoint(second)
    for difference in compare(one, other):
        differs = True
        typer.echo(f"{difference.name}: {difference.description}")
    before, now = load_encoding(one), load_encoding(other)
    other_data = encoding_difference(before, now) if before is not None and now is not None else None
    if other_data is not None:
        differs = True
        typer.echo(f"training data: {other_data}")
    if differs:
        raise typer.Exit(1)
    typer.echo(f"{one} and {other} hold the same model, bit for bit")


@app.command(name="export")
def export_command(
    path: CheckpointArgument,
    out: Annotated[Path, typer.Option(help="Folder to create.")],
    form: Annotated[
        str, typer.Option("--format", help="Output format: safetensors, numpy, onnx or torch-export.")
    ] = "safetensors",
    table: Annotated[
        list[str] | None,
        typer.Option(help="Export only tables that match this pattern. May be repeated. Default: all."),
    ] = None,
    states: Annotated[bool, typer.Option("--states", help="Also export the states of the row optimizers.")] = False,
) -> None:
    """Write tables and dense tensors for other programs.

    Tables are written block by block, so that they need not fit into memory. The formats onnx and torch-export write
    the dense part of a run's model, from pooled embeddings to logits, as a program.
    """
    from meseta.checkpoint import export, summarize
    from meseta.checkpoint.exporting import EXPORT_FORMATS
    from meseta.errors import MesetaError
    from meseta.telemetry.formatting import format_bytes
    from meseta.train.interop.dense_export import DENSE_FORMATS, export_dense

    known, programs = [f for f in EXPORT_FORMATS if f == form], [f for f in DENSE_FORMATS if f == form]
    if not (known or programs):
        names = ", ".join((*EXPORT_FORMATS, *DENSE_FORMATS))
        raise MesetaError(f"checkpoint export: --format {form!r} is unknown; choose from {names}")
    if programs and (table or states):
        raise MesetaError(f"checkpoint export: --format {form} writes no tables; omit --table and --states")
    source = _resolve_checkpoint(path)
    if programs:
        # With a run folder, its config is used to build the model.
        files = export_dense(source, out, programs[0], Path(path) if Path(path, "config.yaml").exists() else None)
    else:
        # The number of rows that match --table is not known here, so the progress bar shows no total.
        total = sum(t.num_embeddings for t in summarize(source).tables)
        with _progress(None if table else total) as on_rows:
            files = export(source, out, known[0], tables=table or ("*",), states=states, on_rows=on_rows)
    typer.echo(f"{out}: {len(files)} files, {format_bytes(sum(file.stat().st_size for file in files))}")


@app.command(name="import")
def import_command(
    path: Annotated[
        Path,
        typer.Argument(
            help="File of torch.save or safetensors, a folder of such files, or a folder that `export` wrote."
        ),
    ],
    layout: Annotated[
        str, typer.Option("--from", help="Naming scheme of the tensors: torch, torchrec, dlrm or meseta.")
    ],
    config: Annotated[Path, typer.Option(help="YAML config of the run that starts from the imported model.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the config.")
    ] = None,
    rename: Annotated[
        list[str] | None, typer.Option(help="SOURCE=TARGET imports tensor SOURCE as TARGET. May be repeated.")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Skip tensors that match this pattern. May be repeated.")] = (
        None
    ),
    states: Annotated[
        bool,
        typer.Option("--states", help="With --from meseta, also import the optimizer states and their step."),
    ] = False,
) -> None:
    """Create the first checkpoint of a run from a model that another program trained, or from an export.

    `meseta train CONFIG` then continues from this checkpoint. Files must hold tensors only, never pickled objects.
    """
    from meseta.config import load_config
    from meseta.errors import MesetaError, suggest
    from meseta.train.interop.importing import MESETA_LAYOUT, import_export, import_model
    from meseta.train.interop.state_dicts import LAYOUTS

    known = [name for name in LAYOUTS if name == layout]
    if layout == MESETA_LAYOUT and (rename or ignore):
        raise MesetaError(
            f"checkpoint import: --rename and --ignore cannot be combined with --from {MESETA_LAYOUT}; omit them"
        )
    if states and layout != MESETA_LAYOUT:
        raise MesetaError(f"checkpoint import: --states needs --from {MESETA_LAYOUT}; omit --states")
    if not known and layout != MESETA_LAYOUT:
        raise MesetaError(
            f"checkpoint import: --from {layout!r} is unknown; {suggest(layout, (*LAYOUTS, MESETA_LAYOUT))}"
        )
    pairs = [text.partition("=") for text in rename or []]
    for source, equals, target in pairs:
        if not (source and equals and target):
            raise MesetaError(f"checkpoint import: --rename {source + equals + target!r} must be SOURCE=TARGET")
    run_config = load_config(config, overrides or [])
    if known:
        renames = {source: target for source, _, target in pairs}
        saved, imported = import_model(path, known[0], run_config, renames=renames, ignore=ignore or ())
    else:
        saved, imported = import_export(path, run_config, states=states)
    width = max(len(entry.source) for entry in imported)
    for entry in imported:
        typer.echo(f"{entry.source:{width}}  ->  {entry.target}  {list(entry.shape)}")
    typer.echo(f"{saved}: step 0, {len(imported)} tensors; `meseta train {config}` continues from there")


@app.command()
def advise(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    out: Annotated[Path, typer.Option(help="YAML file to write, for checkpoint.tables=FILE.")],
    budget: Annotated[
        float, typer.Option(help="Relative increase of the normalized entropy (NE) that is acceptable.")
    ] = 1e-4,
    restores: Annotated[int, typer.Option(help="Number of times that a run is resumed from such a checkpoint.")] = 3,
    data: Annotated[
        Path | None, typer.Option(help="Another prepared dataset with the same features. Default: that of the run.")
    ] = None,
    storage_dir: Annotated[
        Path | None,
        typer.Option(help="Folder on a local disk in which all tables are stored. Default: the tiers of the run."),
    ] = None,
) -> None:
    """Find the narrowest row formats for checkpoints within a budget of NE.

    Measures on the validation split how much NE the rows of each table lose with 8, 4, 3 and 2 bits. Writes the widths
    that need the fewest bytes within the budget.
    """
    from meseta.telemetry.formatting import format_bytes
    from meseta.train.advise import check_advice, open_advisor

    check_advice(budget, restores, out)
    with open_advisor(run_dir, restores, data, storage_dir) as advisor:
        if advisor.split == "test":
            typer.echo("the dataset has no split valid; measuring on test", err=True)
        with _progress(advisor.num_widths, "advise", "widths") as on_widths:

            def show(table: str, bits: int, ne_loss: float | None) -> None:
                on_widths(1)
                if ne_loss is not None:
                    typer.echo(f"{table}: {bits} bits, NE {100 * ne_loss:+.4f} %")

            advice = advisor.advise(budget, show)
    advice.bits_file.write(out)
    for table, of_table in advice.bits_file.tables.items():
        typer.echo(f"{table}: {of_table.bits}{'' if of_table.bits == 'exact' else ' bits'}")
    sizes = f"{format_bytes(advice.num_bytes)} instead of {format_bytes(advice.exact_bytes)} in the exact format"
    loss = f"NE {100 * advice.ne_loss:+.4f} % on {advisor.split} after {restores} restores"
    typer.echo(f"{out}: {sizes}, {loss}; use it in `meseta train` with checkpoint.tables={out}")


@contextmanager
def _progress(total: int | None, doing: str = "export", unit: str = "rows") -> Iterator[Callable[[int], None]]:
    """Context manager that shows a progress bar on stderr. Yields a function that adds completed units."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    counted = TextColumn(f"{{task.completed:>13,.0f}} {unit}")
    columns = (TextColumn(doing), BarColumn(), counted, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda rows: bar.update(task, advance=rows)


def _to_json(summary: CheckpointSummary) -> dict[str, object]:
    return {**asdict(summary), "path": str(summary.path), "num_bytes": summary.num_bytes}


def _format_saved_at(summary: CheckpointSummary) -> str:
    return datetime.fromtimestamp(summary.saved_at_s).isoformat(sep=" ", timespec="seconds")
