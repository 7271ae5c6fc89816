"""`meseta readers`: commands of the reader service, with readers that decode rows and a dispatcher."""

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
from meseta.system.processes import exit_immediately

if TYPE_CHECKING:
    from meseta.data.service.credentials import CommandToken

app = typer.Typer(help="Run readers, processes that decode rows for trainers.", no_args_is_help=True)

ListenOption = Annotated[
    str,
    typer.Option(help="HOST:PORT to listen on. Port 0 picks a free port. Other hosts can connect only with --keys."),
]
AdvertiseOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST", help="Address by which others reach this machine. Default: that of --listen, or the host name."
    ),
]
KeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        metavar="DIR",
        help="Folder of `meseta readers keys`. With it, connections are encrypted. Default: none.",
    ),
]
TokenStdinOption = Annotated[
    bool,
    typer.Option(
        "--token-stdin", help="Read the token of the service from the first line of stdin, and do not store it."
    ),
]
UntilStdinEndsOption = Annotated[bool, typer.Option("--until-stdin-ends", help="Exit when stdin is closed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only the URL, as one line of JSON.")]


@app.callback()
def _readers() -> None:
    """Run readers, processes that decode rows for trainers."""


@app.command()
def dispatch(
    data: Annotated[list[str], typer.Option(help="Dataset to serve, as FOLDER or NAME=FOLDER. May be repeated.")],
    listen: ListenOption = "127.0.0.1:7077",
    advertise: AdvertiseOption = None,
    keys: KeysOption = None,
    min_readers: Annotated[int, typer.Option("--min", help="Minimum number of readers.")] = 1,
    max_readers: Annotated[
        int | None,
        typer.Option(
            "--max",
            help="Maximum number of readers. Turns the autoscaler on. Default: no autoscaler, or with "
            "--start-local the number of cores.",
        ),
    ] = None,
    start_local: Annotated[
        bool, typer.Option("--start-local", help="Start and stop readers on this machine to reach the target number.")
    ] = False,
    token_stdin: TokenStdinOption = False,
    until_stdin_ends: UntilStdinEndsOption = False,
    as_json: AsJson = False,
) -> None:
    """Run the dispatcher, which assigns windows to readers.

    With --max or --start-local, an autoscaler computes the target number of readers, shown by `meseta readers status`.
    """
    from meseta.data.service.server.autoscaler import ReaderAutoscaler, run_autoscaler
    from meseta.data.service.server.catalog import Catalog
    from meseta.data.service.server.dispatch_server import DispatchServer
    from meseta.data.service.server.endpoint_server import Endpoint, run_server
    from meseta.data.service.server.lease_table import LeaseTable
    from meseta.data.service.server.local_readers import LocalReaders
    from meseta.system.processors import num_cores

    folders: dict[str, Path] = {}
    for text in data:
        name, folder = _parse_dataset(text)
        if name in folders:
            raise MesetaError(f"--data has the name {name!r} twice; rename one of them with NAME=FOLDER")
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
        if scale is not None:  # Start the autoscaler after printing, because the URL must be the first line.
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
    buffer_mb: Annotated[int, typer.Option(min=1, help="Memory for decoded windows, in MB.")] = 512,
    token_stdin: TokenStdinOption = False,
    until_stdin_ends: UntilStdinEndsOption = False,
    as_json: AsJson = False,
) -> None:
    """Run a reader, which decodes rows for trainers. After SIGTERM it sends the requested rows, then exits."""
    from meseta.data.service.credentials import credentials_for
    from meseta.data.service.dispatcher_client import DispatcherClient
    from meseta.data.service.server.endpoint_server import Endpoint, run_server
    from meseta.data.service.server.window_reader import ReadServer, WindowReader, disable_allocator_caching
    from meseta.system.processors import limit_arrow_threads

    # Must be called before threads are started.
    disable_allocator_caching()
    limit_arrow_threads()
    token = _read_token(keys) if token_stdin else None if keys else credentials_for(dispatcher)
    endpoint = Endpoint.from_options(listen, advertise, keys, token)
    known = DispatcherClient(dispatcher, endpoint.credentials)
    reader = WindowReader(known, buffer_mb * 1_000_000)
    with run_server(lambda: ReadServer(endpoint, reader, known), listen) as server:
        if server.wait_for_dispatcher(3.0):
            _print_url(server.url, f"reader at {server.url}, for the dispatcher at {dispatcher}", as_json)
        if _wait_for_end(until_stdin_ends, signal.SIGTERM):
            if until_stdin_ends:  # The process that started this one may end while the reader drains.
                threading.Thread(target=_exit_with_stdin, name="meseta-stdin", daemon=True).start()
            server.drain()
        exit_immediately(0)


@app.command()
def status(
    dispatcher: Annotated[str, typer.Argument(help="URL of the dispatcher.")],
    keys: KeysOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print metrics in the text format of Prometheus.")
    ] = False,
) -> None:
    """Show readers with their buffers and speeds, windows that were decoded again or reassigned, and waiting ranks."""
    from meseta.data.service.client.reader import ReaderServiceAddress
    from meseta.data.service.server.status_text import prometheus_text, status_lines

    service_status = ReaderServiceAddress(url=dispatcher, keys=keys).dispatcher().status()
    if as_json:
        print(service_status.model_dump_json())
    elif prometheus:
        print(prometheus_text(service_status), end="")
    else:
        print("\n".join(status_lines(service_status)))


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create. It must not exist.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or address of a host with a dispatcher or reader. *.NAME.DOMAIN covers all hosts below it. "
            "May be repeated. Default: localhost, 127.0.0.1 and the name of this machine."
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=36_500, help="Validity of the keys in days.")] = 730,
) -> None:
    """Create keys with which dispatchers, readers and trainers on several hosts authenticate each other.

    Copy the folder to hosts of dispatchers and readers with `scp -pr`, which keeps file permissions, and use --keys
    DIR. Copy all files except key.pem to hosts of trainers, and set data.service.keys=DIR. The files key.pem,
    client.pem and token are secret. Commands reject them if other users can read them.
    """
    from meseta.data.service.server.key_folder import local_hosts, make_keys

    hosts = host or local_hosts()
    make_keys(folder, hosts, days)
    print(f"keys in {folder}, for {', '.join(hosts)}: for dispatchers and readers; omit key.pem for trainers")


def _print_url(url: str, text: str, as_json: bool) -> None:
    """Print `text`, or only the URL as JSON."""
    print(json.dumps({"url": url}) if as_json else text, flush=True)


def _parse_dataset(text: str) -> tuple[str, Path]:
    name, sign, folder = text.partition("=")
    path = Path(folder if sign else text).resolve()  # Local readers have another working directory.
    return (name if sign else path.name), path


def _read_token(keys: Path | None) -> CommandToken:
    """Read the token of the service from stdin. Raises MesetaError if it is missing or `keys` is set."""
    from meseta.data.service.credentials import CommandToken, parse_token

    if keys is not None:
        raise MesetaError("readers: --token-stdin and --keys cannot be combined; omit one of them")
    line = b""
    # Read single bytes, so that the input after the first line remains unread.
    while not line.endswith(b"\n") and len(line) < 2048 and (byte := os.read(0, 1)):
        line += byte
    return CommandToken(parse_token(line, "readers: the first line of standard input", "write a token there"))


def _exit_with_stdin() -> None:
    while os.read(0, 1024):
        continue
    exit_immediately(0)


def _wait_for_end(until_stdin_ends: bool, ending: signal.Signals | None = None) -> bool:
    """Wait until stdin is closed or the signal `ending` arrives. Returns whether it was the signal."""
    # The signal handler wakes up `select` by a byte in this pipe.
    read_fd, write_fd = os.pipe()
    if ending is not None:

        def handle_signal(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL)  # The next one ends this process immediately.
            os.write(write_fd, b".")

        signal.signal(ending, handle_signal)
    if until_stdin_ends:
        # A terminal sends SIGINT to all processes. The process that started this one decides when this one ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([read_fd, 0] if until_stdin_ends else [read_fd], [], [])
        if read_fd in ready:
            return True
        if not os.read(0, 1024):
            return False
