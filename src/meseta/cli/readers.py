"""`meseta readers`: processes that decode rows for trainers, and the one that tells these whom to ask."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from meseta.errors import MesetaError
from meseta.machine.processes import exit_immediately

if TYPE_CHECKING:
    from meseta.data.read.served.credentials import CommandToken

app = typer.Typer(help="Read data in processes of their own, for trainers that ask for rows.", no_args_is_help=True)

ListenOption = Annotated[
    str,
    typer.Option(help="HOST:PORT of this machine; port 0: any that is free. With keys others may reach it."),
]
AdvertiseOption = Annotated[
    str | None,
    typer.Option(metavar="HOST", help="How others call this machine; default: as --listen does, or by its name."),
]
KeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys", metavar="DIR", help="Folder of `meseta readers keys`, by which all that travels is encrypted."
    ),
]
TokenStdinOption = Annotated[
    bool,
    typer.Option(
        "--token-stdin", help="Read the token of the service from the first line of standard input, and store none."
    ),
]
UntilStdinEndsOption = Annotated[bool, typer.Option("--until-stdin-ends", help="End when standard input does.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the URL as one line of JSON, for programs.")]


@app.callback()
def _readers() -> None:
    """Read data in processes of their own, for trainers that ask for rows."""


@app.command()
def dispatch(
    data: Annotated[
        list[str], typer.Option(help="Folder of a dataset, or NAME=FOLDER; once for each that may be asked for.")
    ],
    listen: ListenOption = "127.0.0.1:7077",
    advertise: AdvertiseOption = None,
    keys: KeysOption = None,
    min_readers: Annotated[int, typer.Option("--min", help="Readers that there should be at least.")] = 1,
    max_readers: Annotated[
        int | None,
        typer.Option(
            "--max",
            help="Readers that there should be at most: so many are wanted, told by `meseta readers status`, as keep "
            "training from waiting; else with --start-local as many as there are cores.",
        ),
    ] = None,
    start_local: Annotated[
        bool, typer.Option("--start-local", help="Start the readers that are wanted here, and end them.")
    ] = False,
    token_stdin: TokenStdinOption = False,
    until_stdin_ends: UntilStdinEndsOption = False,
    as_json: AsJson = False,
) -> None:
    """Tell trainers what there is to read, which reader has which window, and how many readers there should be."""
    from meseta.machine.processors import num_cores
    from meseta.readers.autoscaler import ReaderAutoscaler
    from meseta.readers.autoscaling import run_autoscaler
    from meseta.readers.catalog import Catalog
    from meseta.readers.dispatch_server import DispatchServer
    from meseta.readers.endpoint_server import Endpoint, run_server
    from meseta.readers.lease_table import LeaseTable
    from meseta.readers.local_readers import LocalReaders

    folders: dict[str, Path] = {}
    for text in data:
        name, folder = _parse_dataset(text)
        if name in folders:
            raise MesetaError(f"--data names {name!r} twice; give one of them another name, as in NAME=FOLDER")
        folders[name] = folder
    if max_readers is None and start_local:
        max_readers = max(num_cores(), min_readers)
    scale = None if max_readers is None else ReaderAutoscaler(min_readers, max_readers)
    token = _read_token(keys) if token_stdin else None
    endpoint, catalog, leases = Endpoint.from_options(listen, advertise, keys, token), Catalog(folders), LeaseTable()
    with ExitStack() as stack:
        server = stack.enter_context(run_server(lambda: DispatchServer(endpoint, catalog, leases, scale), listen))
        names = ", ".join(folders)
        way = f"meseta readers work --dispatcher {server.url}" + f" --keys {keys}" * (keys is not None)
        _print_url(server.url, f"dispatcher at {server.url}, with {names}; readers: {way}", as_json)
        if scale is not None:  # the thread that this starts may print, and the URL is the first line
            local = LocalReaders(server.url, server.credentials) if start_local else None
            stack.enter_context(run_autoscaler(scale, leases, local))
        _wait_for_end(until_stdin_ends)
    exit_immediately(0)


@app.command()
def work(
    dispatcher: Annotated[str, typer.Option(help="URL of the dispatcher, such as grpc://127.0.0.1:7077.")],
    listen: ListenOption = "127.0.0.1:0",
    advertise: AdvertiseOption = None,
    keys: KeysOption = None,
    buffer_mb: Annotated[int, typer.Option(min=1, help="Decoded windows that it holds, in MB.")] = 512,
    token_stdin: TokenStdinOption = False,
    until_stdin_ends: UntilStdinEndsOption = False,
    as_json: AsJson = False,
) -> None:
    """Decode rows for trainers, which the dispatcher sends here; leave at SIGTERM, when what was asked for is given."""
    from meseta.data.read.served.credentials import credentials_for
    from meseta.data.read.served.dispatcher_client import DispatcherClient
    from meseta.readers.endpoint_server import Endpoint, run_server
    from meseta.readers.window_reader import ReadServer, WindowReader, disable_allocator_caching

    disable_allocator_caching()
    token = _read_token(keys) if token_stdin else None if keys else credentials_for(dispatcher)
    endpoint = Endpoint.from_options(listen, advertise, keys, token)
    known = DispatcherClient(dispatcher, endpoint.credentials)
    reader = WindowReader(known, buffer_mb * 1_000_000)
    with run_server(lambda: ReadServer(endpoint, reader, known), listen) as server:
        if server.wait_for_dispatcher(3.0):
            _print_url(server.url, f"reader at {server.url}, for the dispatcher at {dispatcher}", as_json)
        if _wait_for_end(until_stdin_ends, signal.SIGTERM):
            if until_stdin_ends:  # nobody is left to be given anything when that ends
                threading.Thread(target=_exit_with_stdin, name="meseta-stdin", daemon=True).start()
            server.drain()
        exit_immediately(0)


@app.command()
def status(
    dispatcher: Annotated[str, typer.Argument(help="URL of the dispatcher.")],
    keys: KeysOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="For a file that Prometheus reads.")] = False,
) -> None:
    """Readers that are there, what they hold and have decoded and how fast, windows that were decoded again or went to
    another one, and who waits for rows."""
    from meseta.data.read.served.reader import ReaderServiceAddress
    from meseta.readers.status_text import prometheus_text, status_lines

    found = ReaderServiceAddress(url=dispatcher, keys=keys).dispatcher().status()
    if as_json:
        print(found.model_dump_json())
    elif prometheus:
        print(prometheus_text(found), end="")
    else:
        print("\n".join(status_lines(found)))


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is not there yet.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or address of a host with a dispatcher or a reader; *.NAME.DOMAIN: all below it. "
            "Default: this machine, as localhost, 127.0.0.1 and by its name."
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=36_500, help="For which they are valid.")] = 730,
) -> None:
    """Make what dispatchers, readers and trainers know each other by, so that they may be on several hosts.

    Copy the whole folder to hosts of dispatchers and readers (`scp -pr`, which keeps its files from others), for --keys
    DIR; and all of it but key.pem to those of trainers, for data.service.keys=DIR. key.pem, client.pem and token are
    secrets, and no command reads one that others may read.
    """
    from meseta.readers.key_folder import local_hosts, make_keys

    hosts = host or local_hosts()
    make_keys(folder, hosts, days)
    print(f"keys in {folder}, for {', '.join(hosts)}: for dispatchers and readers; trainers get all but key.pem")


def _print_url(url: str, text: str, as_json: bool) -> None:
    """Print `text`, or for programs the URL alone."""
    print(json.dumps({"url": url}) if as_json else text, flush=True)


def _parse_dataset(text: str) -> tuple[str, Path]:
    name, sign, folder = text.partition("=")
    path = Path(folder if sign else text).resolve()  # readers of this machine stand elsewhere
    return (name if sign else path.name), path


def _read_token(keys: Path | None) -> CommandToken:
    """Raises MesetaError if there is none, or if there are keys too."""
    from meseta.data.read.served.credentials import CommandToken, parse_token

    if keys is not None:
        raise MesetaError("readers: --token-stdin and --keys: a service has one of them; leave one out")
    line = b""
    while not line.endswith(b"\n") and len(line) < 2048 and (byte := os.read(0, 1)):  # what follows stays unread
        line += byte
    return CommandToken(parse_token(line, "readers: the first line of standard input", "write a token there"))


def _exit_with_stdin() -> None:
    while os.read(0, 1024):
        continue
    exit_immediately(0)


def _wait_for_end(until_stdin_ends: bool, ending: signal.Signals | None = None) -> bool:
    """Until whoever started this has ended, or until the first signal `ending`; returns whether it was that."""
    heard, tell = os.pipe()
    if ending is not None:

        def hear(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL)  # the next one ends this process at once
            os.write(tell, b".")

        signal.signal(ending, hear)
    if until_stdin_ends:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells all; who started this ends it in its own time
    while True:
        ready, _, _ = select.select([heard, 0] if until_stdin_ends else [heard], [], [])
        if heard in ready:
            return True
        if not os.read(0, 1024):
            return False
