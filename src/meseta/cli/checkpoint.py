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
    from meseta.checkpoint import Summary
    from meseta.machine.remote import Location

app = typer.Typer(help="Look at checkpoints, check them, compare them, hand them on.", no_args_is_help=True)

AnyPath = Annotated[
    str,
    typer.Argument(help="A checkpoint, a folder of them (its newest), or a run (what train.finish says); or a URL."),
]


@app.command(name="list")
def list_them(
    path: Annotated[str, typer.Argument(help="A run, its folder of checkpoints, or the URL of one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """All checkpoints with step, size and checksum; exit code 1 if one is damaged or cannot be read."""
    from meseta.checkpoint import list_checkpoints
    from meseta.checkpoint.listing import checkpoints_of
    from meseta.checkpoint.store.store import store_at
    from meseta.telemetry.shown import byte_size

    found = list_checkpoints(path)
    if as_json:
        lines = [{"path": str(c.path), "problem": c.problem, **(_facts(c.summary) if c.summary else {})} for c in found]
        typer.echo(json.dumps(lines, indent=1))
    for listed in () if as_json else found:
        if listed.summary is None:
            typer.echo(f"{listed.path}  {'damaged' if listed.is_readable else 'not read'}: {listed.problem}")
        else:
            s = listed.summary
            size = f"{byte_size(s.own_bytes)}{f' of {byte_size(s.num_bytes)}' if s.needs else ''}"
            typer.echo(f"{s.path}  {_when(s)}  {size}  {len(s.tables)} tables  {_content(s, 16)}")
    store = store_at(checkpoints_of(path))
    for path_before in () if as_json else store.passed_over():
        typer.echo(f"{path_before}  passed over: it was damaged, and the run has gone back behind it")
    for path_of_another in () if as_json else store.strangers():
        typer.echo(f"{path_of_another}  no checkpoint")
    if any(listed.summary is None for listed in found):
        raise typer.Exit(1)


def _find(path: str) -> Location:
    """The checkpoint that a path or URL names."""
    from meseta.checkpoint import find_checkpoint
    from meseta.machine.remote import locate
    from meseta.train.run_dir import RunDir

    place = locate(path)
    final = RunDir(place).final_checkpoint() if isinstance(place, Path) else None
    return final or find_checkpoint(place)


@app.command()
def inspect(path: AnyPath, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """What a checkpoint holds: its tables with rows, types, optimizers and sizes, and the position in the data."""
    from meseta.checkpoint import summarize
    from meseta.telemetry.shown import byte_size

    summary = summarize(_find(path))
    if as_json:
        typer.echo(json.dumps(_facts(summary), indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    typer.echo(f"{summary.path}: step {summary.step:,}, {_when(summary)}, saved by {summary.num_ranks} ranks")
    typer.echo(_content(summary))
    shown = Table()
    for name in ("table", "rows", "dim", "type", "optimizer", "states", "size"):
        shown.add_column(name, justify="right" if name in ("rows", "dim", "size") else "left", no_wrap=name != "states")
    for t in summary.tables:
        states, size = ", ".join(t.states), byte_size(t.num_bytes)
        kind = f"{t.dtype} ±{t.row_error:.2g}" if t.row_error else t.dtype
        shown.add_row(t.name, f"{t.num_embeddings:,}", str(t.embedding_dim), kind, t.optimizer, states, size)
    shown.add_row("dense tensors", "", "", "", "", "", byte_size(summary.dense_bytes))
    if summary.carried_bytes:
        shown.add_row("answers carried", "", "", "", "", "", byte_size(summary.carried_bytes))
    Console().print(shown)
    typer.echo(f"in the data: {json.dumps(summary.reader)}")


def _content(summary: Summary, digits: int = 64) -> str:
    """What names the content, and which older checkpoints are needed for it."""
    name = f"model {summary.checksum[:digits]}" if summary.checksum else f"chain {(summary.chain or '')[:digits]}"
    if not summary.needs:
        return name
    steps = ", ".join(f"{step:,}" for step in summary.needs)
    return f"{name}  {summary.policy} delta, needs files of step {steps}"


@app.command()
def compact(
    path: AnyPath, out: Annotated[Path, typer.Option(help="Folder for the checkpoint; made if need be.")]
) -> None:
    """Make one whole checkpoint of a delta and the older ones whose files it needs, in DIR/step-..."""
    from meseta.checkpoint import compact as write_whole
    from meseta.checkpoint import summarize

    found = _find(path)
    summary = summarize(found)
    with _progress(sum(table.num_embeddings for table in summary.tables), "compact") as on_rows:
        made = write_whole(found, out, on_rows=on_rows)
    typer.echo(f"{made}: {_content(summarize(made))}")


@app.command()
def verify(path: AnyPath) -> None:
    """Read every byte of a checkpoint and check its checksums; exit code 1, naming the file, if one differs."""
    from meseta.checkpoint import summarize
    from meseta.checkpoint import verify as check
    from meseta.telemetry.shown import byte_size

    found = _find(path)
    summary, start_s = summarize(found), time.perf_counter()
    checksum = check(found)
    rate = summary.num_bytes / (time.perf_counter() - start_s) / 1e6
    typer.echo(f"{found}: whole, {byte_size(summary.num_bytes)} read, {rate:,.0f} MB/s, model {checksum}")


@app.command()
def diff(first: AnyPath, second: AnyPath) -> None:
    """In which tables, rows and dense tensors two checkpoints differ, and whether in what their ids and dense columns
    mean; exit code 1 if they do."""
    from meseta.checkpoint import compare
    from meseta.data.dataset.encoding import difference as encoding_difference
    from meseta.train.trained_on import encoding_of

    differs = False
    one, other = _find(first), _find(second)
    for difference in compare(one, other):
        differs = True
        typer.echo(f"{difference.name}: {difference.text}")
    before, now = encoding_of(one), encoding_of(other)
    other_data = encoding_difference(before, now) if before is not None and now is not None else None
    if other_data is not None:
        differs = True
        typer.echo(f"data that they were trained on: {other_data}")
    if differs:
        raise typer.Exit(1)
    typer.echo(f"{one} and {other} hold the same model, bit for bit")


@app.command(name="export")
def export_it(
    path: AnyPath,
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
    from meseta.checkpoint.exporting import FORMATS
    from meseta.errors import MesetaError
    from meseta.telemetry.shown import byte_size
    from meseta.train.outside.dense_export import DENSE_FORMATS, export_dense

    known, programs = [f for f in FORMATS if f == form], [f for f in DENSE_FORMATS if f == form]
    if not (known or programs):
        names = ", ".join((*FORMATS, *DENSE_FORMATS))
        raise MesetaError(f"checkpoint export: --format {form!r} is unknown; choose from {names}")
    if programs and (table or states):
        raise MesetaError(f"checkpoint export: --format {form} writes no tables; leave --table and --states out")
    found = _find(path)
    if programs:
        files = export_dense(found, out, programs[0], Path(path) if Path(path, "config.yaml").exists() else None)
    else:
        total = sum(t.num_embeddings for t in summarize(found).tables)
        with _progress(None if table else total) as on_rows:
            files = export(found, out, known[0], tables=table or ("*",), states=states, on_rows=on_rows)
    typer.echo(f"{out}: {len(files)} files, {byte_size(sum(file.stat().st_size for file in files))}")


@app.command(name="import")
def import_it(
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
    from meseta.errors import MesetaError, nearest
    from meseta.train.outside.foreign import LAYOUTS
    from meseta.train.outside.importing import OWN_LAYOUT, import_export, import_model

    known = [name for name in LAYOUTS if name == layout]
    if layout == OWN_LAYOUT and (rename or ignore):
        raise MesetaError(f"checkpoint import: --rename and --ignore are not for --from {OWN_LAYOUT}; leave them out")
    if states and layout != OWN_LAYOUT:
        raise MesetaError(f"checkpoint import: --states is for --from {OWN_LAYOUT} alone; leave it out")
    if not known and layout != OWN_LAYOUT:
        raise MesetaError(f"checkpoint import: --from {layout!r} is unknown; {nearest(layout, (*LAYOUTS, OWN_LAYOUT))}")
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
    from meseta.telemetry.shown import byte_size
    from meseta.train.advise.measure import advise_run, check_advice

    check_advice(budget, restores, out)
    with advise_run(run_dir, restores, data, storage_dir) as advisor:
        if advisor.split == "test":
            typer.echo("the data have no split valid, so test is measured", err=True)
        with _progress(advisor.num_widths, "advise", "widths") as on_widths:

            def show(table: str, bits: int, ne_loss: float | None) -> None:
                on_widths(1)
                if ne_loss is not None:
                    typer.echo(f"{table}: {bits} bits, NE {100 * ne_loss:+.4f} %")

            advice = advisor.advise(budget, show)
    advice.file.write(out)
    for table, of_table in advice.file.tables.items():
        typer.echo(f"{table}: {of_table.bits}{'' if of_table.bits == 'exact' else ' bits'}")
    sizes = f"{byte_size(advice.num_bytes)} where {byte_size(advice.exact_bytes)} are exact"
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


def _facts(summary: Summary) -> dict[str, object]:
    return {**asdict(summary), "path": str(summary.path), "num_bytes": summary.num_bytes}


def _when(summary: Summary) -> str:
    return datetime.fromtimestamp(summary.saved_at_s).isoformat(sep=" ", timespec="seconds")
