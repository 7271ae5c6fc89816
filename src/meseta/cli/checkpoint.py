"""`meseta checkpoint`: look at checkpoints, check them, compare them, hand them on."""

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
    from meseta.machine.remote import Location

app = typer.Typer(help="Look at checkpoints, check them, compare them, hand them on.", no_args_is_help=True)

CheckpointArgument = Annotated[
    str,
    typer.Argument(help="A checkpoint, a folder of them (its newest), or a run (what train.finish says); or a URL."),
]


@app.command(name="list")
def list_command(
    path: Annotated[str, typer.Argument(help="A run, its folder of checkpoints, or the URL of one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """All checkpoints with step, size and checksum; exit code 1 if one is damaged or cannot be read."""
    from meseta.checkpoint import list_checkpoints
    from meseta.checkpoint.listing import find_checkpoint_folder
    from meseta.checkpoint.store.store import make_store
    from meseta.telemetry.formatting import format_bytes

    found = list_checkpoints(path)
    if as_json:
        lines = [
            {"path": str(c.path), "problem": c.problem, **(_to_json(c.summary) if c.summary else {})} for c in found
        ]
        typer.echo(json.dumps(lines, indent=1))
    for listed in () if as_json else found:
        if listed.summary is None:
            typer.echo(f"{listed.path}  {'damaged' if listed.is_readable else 'not read'}: {listed.problem}")
        else:
            s = listed.summary
            size = f"{format_bytes(s.own_bytes)}{f' of {format_bytes(s.num_bytes)}' if s.needs else ''}"
            typer.echo(f"{s.path}  {_format_saved_at(s)}  {size}  {len(s.tables)} tables  {_describe_content(s, 16)}")
    store = make_store(find_checkpoint_folder(path))
    for path_before in () if as_json else store.quarantined():
        typer.echo(f"{path_before}  passed over: it was damaged, and the run has gone back behind it")
    for path_of_another in () if as_json else store.unrecognized_entries():
        typer.echo(f"{path_of_another}  no checkpoint")
    if any(listed.summary is None for listed in found):
        raise typer.Exit(1)


def _resolve_checkpoint(path: str) -> Location:
    """The checkpoint that a path or URL names."""
    from meseta.checkpoint import find_checkpoint
    from meseta.machine.remote import to_location
    from meseta.train.run_dir import RunDir

    place = to_location(path)
    final = RunDir(place).final_checkpoint() if isinstance(place, Path) else None
    return final or find_checkpoint(place)


@app.command()
def inspect(
    path: CheckpointArgument, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """What a checkpoint holds: its tables with rows, types, optimizers and sizes, and the position in the data."""
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
        shown.add_row("answers carried", "", "", "", "", "", format_bytes(summary.carried_bytes))
    Console().print(shown)
    typer.echo(f"in the data: {json.dumps(summary.reader)}")


def _describe_content(summary: CheckpointSummary, digits: int = 64) -> str:
    """What names the content, and which older checkpoints are needed for it."""
    name = f"model {summary.checksum[:digits]}" if summary.checksum else f"chain {(summary.chain or '')[:digits]}"
    if not summary.needs:
        return name
    steps = ", ".join(f"{step:,}" for step in summary.needs)
    return f"{name}  {summary.policy} delta, needs files of step {steps}"


@app.command()
def compact(
    path: CheckpointArgument, out: Annotated[Path, typer.Option(help="Folder for the checkpoint; made if need be.")]
) -> None:
    """Make one whole checkpoint of a delta and the older ones whose files it needs, in DIR/step-..."""
    from meseta.checkpoint import compact as write_whole
    from meseta.checkpoint import summarize

    found = _resolve_checkpoint(path)
    summary = summarize(found)
    with _progress(sum(table.num_embeddings for table in summary.tables), "compact") as on_rows:
        made = write_whole(found, out, on_rows=on_rows)
    typer.echo(f"{made}: {_describe_content(summarize(made))}")


@app.command()
def verify(path: CheckpointArgument) -> None:
    """Read every byte of a checkpoint and check its checksums; exit code 1, naming the file, if one differs."""
    from meseta.checkpoint import summarize
    from meseta.checkpoint import verify as check
    from meseta.telemetry.formatting import format_bytes

    found = _resolve_checkpoint(path)
    summary, start_s = summarize(found), time.perf_counter()
    checksum = check(found)
    rate = summary.num_bytes / (time.perf_counter() - start_s) / 1e6
    typer.echo(f"{found}: whole, {format_bytes(summary.num_bytes)} read, {rate:,.0f} MB/s, model {checksum}")


@app.command()
def diff(first: CheckpointArgument, second: CheckpointArgument) -> None:
    """In which tables, rows and dense tensors two checkpoints differ, and whether in what their ids and dense columns
    mean; exit code 1 if they do."""
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
        typer.echo(f"data that they were trained on: {other_data}")
    if differs:
        raise typer.Exit(1)
    typer.echo(f"{one} and {other} hold the same model, bit for bit")


@app.command(name="export")
def export_command(
    path: CheckpointArgument,
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    form: Annotated[str, typer.Option("--format", help="safetensors, numpy; onnx, torch-export.")] = "safetensors",
    table: Annotated[
        list[str] | None, typer.Option(help="Only tables that match this pattern; may be repeated.")
    ] = None,
    states: Annotated[bool, typer.Option("--states", help="The states of the row optimizers too.")] = False,
) -> None:
    """Write tables and dense tensors for other programs, block by block: a table never has to fit into memory.

    onnx and torch-export write the dense part of a run's model, from pooled embeddings to logits, as a program.
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
        raise MesetaError(f"checkpoint export: --format {form} writes no tables; leave --table and --states out")
    found = _resolve_checkpoint(path)
    if programs:
        files = export_dense(found, out, programs[0], Path(path) if Path(path, "config.yaml").exists() else None)
    else:
        total = sum(t.num_embeddings for t in summarize(found).tables)
        with _progress(None if table else total) as on_rows:
            files = export(found, out, known[0], tables=table or ("*",), states=states, on_rows=on_rows)
    typer.echo(f"{out}: {len(files)} files, {format_bytes(sum(file.stat().st_size for file in files))}")


@app.command(name="import")
def import_command(
    path: Annotated[
        Path, typer.Argument(help="File of torch.save or safetensors, a folder of them, or what `export` has made.")
    ],
    layout: Annotated[str, typer.Option("--from", help="Whose names it has: torch, torchrec or dlrm; or meseta.")],
    config: Annotated[Path, typer.Option(help="YAML config of the run that shall go on with it.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings.")] = None,
    rename: Annotated[list[str] | None, typer.Option(help="SOURCE=TARGET: where one tensor goes.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Leave out tensors that match this pattern.")] = None,
    states: Annotated[
        bool, typer.Option("--states", help="With --from meseta, the states of all optimizers and their step too.")
    ] = False,
) -> None:
    """Begin a run with a model that another program trained, or with an export; `meseta train CONFIG` goes on from
    there.

    No pickle is ever loaded: files hold tensors alone.
    """
    from meseta.config import load_config
    from meseta.errors import MesetaError, suggest
    from meseta.train.interop.importing import MESETA_LAYOUT, import_export, import_model
    from meseta.train.interop.state_dicts import LAYOUTS

    known = [name for name in LAYOUTS if name == layout]
    if layout == MESETA_LAYOUT and (rename or ignore):
        raise MesetaError(
            f"checkpoint import: --rename and --ignore are not for --from {MESETA_LAYOUT}; leave them out"
        )
    if states and layout != MESETA_LAYOUT:
        raise MesetaError(f"checkpoint import: --states is for --from {MESETA_LAYOUT} alone; leave it out")
    if not known and layout != MESETA_LAYOUT:
        raise MesetaError(
            f"checkpoint import: --from {layout!r} is unknown; {suggest(layout, (*LAYOUTS, MESETA_LAYOUT))}"
        )
    pairs = [text.partition("=") for text in rename or []]
    for source, equals, target in pairs:
        if not (source and equals and target):
            raise MesetaError(f"checkpoint import: --rename {source + equals + target!r} is not SOURCE=TARGET")
    run_config = load_config(config, overrides or [])
    if known:
        renames = {source: target for source, _, target in pairs}
        saved, imported = import_model(path, known[0], run_config, renames=renames, ignore=ignore or ())
    else:
        saved, imported = import_export(path, run_config, states=states)
    width = max(len(entry.source) for entry in imported)
    for entry in imported:
        typer.echo(f"{entry.source:{width}}  ->  {entry.target}  {list(entry.shape)}")
    typer.echo(f"{saved}: step 0, {len(imported)} tensors; `meseta train {config}` goes on from there")


@app.command()
def advise(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a training run.")],
    out: Annotated[Path, typer.Option(help="File to write, for checkpoint.tables=FILE.")],
    budget: Annotated[
        float, typer.Option(help="Part of its normalised entropy by which a model may get worse.")
    ] = 1e-4,
    restores: Annotated[int, typer.Option(help="Times that a run is taken up from such a checkpoint.")] = 3,
    data: Annotated[Path | None, typer.Option(help="Another prepared dataset with the same features.")] = None,
    storage_dir: Annotated[
        Path | None,
        typer.Option(help="Folder on a local disk where all tables are to lie; else they lie as in the run."),
    ] = None,
) -> None:
    """Measure on the split valid what the rows of each table lose in 8, 4, 3 and 2 bits, and write the widths that take
    the fewest bytes within the budget."""
    from meseta.telemetry.formatting import format_bytes
    from meseta.train.advise.measure import check_advice, open_advisor

    check_advice(budget, restores, out)
    with open_advisor(run_dir, restores, data, storage_dir) as advisor:
        if advisor.split == "test":
            typer.echo("the data have no split valid, so test is measured", err=True)
        with _progress(advisor.num_widths, "advise", "widths") as on_widths:

            def show(table: str, bits: int, ne_loss: float | None) -> None:
                on_widths(1)
                if ne_loss is not None:
                    typer.echo(f"{table}: {bits} bits, NE {100 * ne_loss:+.4f} %")

            advice = advisor.advise(budget, show)
    advice.bits_file.write(out)
    for table, of_table in advice.bits_file.tables.items():
        typer.echo(f"{table}: {of_table.bits}{'' if of_table.bits == 'exact' else ' bits'}")
    sizes = f"{format_bytes(advice.num_bytes)} where {format_bytes(advice.exact_bytes)} are exact"
    loss = f"NE {100 * advice.ne_loss:+.4f} % on {advisor.split} after {restores} restores"
    typer.echo(f"{out}: {sizes}, {loss}; `meseta train` takes it as checkpoint.tables={out}")


@contextmanager
def _progress(total: int | None, doing: str = "export", unit: str = "rows") -> Iterator[Callable[[int], None]]:
    """A live line on standard error."""
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
