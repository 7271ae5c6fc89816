"""`meseta readers`: processes that decode rows for trainers, and the one that tells these whom to ask."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from meseta.errors import MesetaError
from meseta.machine.processes import leave_at_once

app = typer.Typer(help="Read data in processes of their own, for trainers that ask for rows.", no_args_is_help=True)

Listen = Annotated[str, typer.Option(help="HOST:PORT of this machine; port 0: any that is free.")]
UntilStdinEnds = Annotated[bool, typer.Option("--until-stdin-ends", help="End when standard input does.")]


@app.callback()
def _readers() -> None:
    """Read data in processes of their own, for trainers that ask for rows."""


@app.command()
def dispatch(
    data: Annotated[
        list[str], typer.Option(help="Folder of a dataset, or NAME=FOLDER; once for each that may be asked for.")
    ],
    listen: Listen = "127.0.0.1:7077",
    until_stdin_ends: UntilStdinEnds = False,
) -> None:
    """Tell trainers what there is to read, and which reader has which window."""
    from meseta.readers.catalog import Catalog
    from meseta.readers.dispatching import DispatchServer
    from meseta.readers.lease_table import LeaseTable
    from meseta.readers.listening import location, serving

    folders: dict[str, Path] = {}
    for text in data:
        name, folder = _named(text)
        if name in folders:
            raise MesetaError(f"--data names {name!r} twice; give one of them another name, as in NAME=FOLDER")
        folders[name] = folder
    catalog = Catalog(folders)
    with serving(lambda: DispatchServer(location(listen), catalog, LeaseTable()), listen) as server:
        names = ", ".join(folders)
        way = f"meseta readers work --dispatcher {server.url}"
        print(f"dispatcher at {server.url}, with {names}; readers: {way}", flush=True)
        _wait(until_stdin_ends)


@app.command()
def work(
    dispatcher: Annotated[str, typer.Option(help="URL of the dispatcher, such as grpc://127.0.0.1:7077.")],
    listen: Listen = "127.0.0.1:0",
    buffer_mb: Annotated[int, typer.Option(min=1, help="Decoded windows that it holds, in MB.")] = 512,
    until_stdin_ends: UntilStdinEnds = False,
) -> None:
    """Decode rows for trainers, which the dispatcher sends here."""
    from meseta.data.read.served.service import Dispatcher
    from meseta.readers.listening import location, serving
    from meseta.readers.reading import ReadServer, WindowReader

    known = Dispatcher(dispatcher)
    reader = WindowReader(known, buffer_mb * 1_000_000)
    with serving(lambda: ReadServer(location(listen), reader, known), listen) as server:
        if server.meet(3.0):
            print(f"reader at {server.url}, for the dispatcher at {dispatcher}", flush=True)
        _wait(until_stdin_ends)


@app.command()
def status(
    dispatcher: Annotated[str, typer.Argument(help="URL of the dispatcher.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="For a file that Prometheus reads.")] = False,
) -> None:
    """Readers that are there, what they hold and have decoded and how fast, windows that were decoded again or went to
    another one, and who waits for rows."""
    from meseta.data.read.served.service import Dispatcher
    from meseta.readers.shown import prometheus_text, status_lines

    found = Dispatcher(dispatcher).status()
    if as_json:
        print(found.model_dump_json())
    elif prometheus:
        print(prometheus_text(found), end="")
    else:
        print("\n".join(status_lines(found)))


def _named(text: str) -> tuple[str, Path]:
    name, sign, folder = text.partition("=")
    path = Path(folder if sign else text).resolve()  # readers of this machine stand elsewhere
    return (name if sign else path.name), path


def _wait(until_stdin_ends: bool) -> None:
    """Until a signal comes, or whoever started this has ended."""
    if until_stdin_ends:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells all; who started this ends it in its own time
        while os.read(0, 1024):
            continue
        leave_at_once(0)
    threading.Event().wait()
