"""Receive rows from `meseta readers` with pyarrow, without meseta and torch.

    python examples/04_read_rows.py [grpc://127.0.0.1:7077]

Without an argument, it first prepares a small log and starts a dispatcher and a reader, for which it needs meseta.
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

from pyarrow import flight


def options_for(url: str) -> flight.FlightCallOptions:
    """Return the options of every call: the token that the dispatcher stored for this user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "meseta" if runtime else Path.home() / ".local/state/meseta"
    token = (folder / f"{url.rpartition(':')[2]}.token").read_text().strip()
    return flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])


def ask(dispatcher: flight.FlightClient, options: flight.FlightCallOptions, name: str, **request: object) -> dict:
    """Send a JSON request to the dispatcher and return its JSON response."""
    [answer] = dispatcher.do_action(flight.Action(name, json.dumps(request).encode()), options)
    return json.loads(answer.body.to_pybytes())


def read_epoch(url: str, split: str, batch_size: int) -> int:
    """Read all rows of a split, shuffled, and return their number."""
    dispatcher, options = flight.connect(url), options_for(url)
    described = ask(dispatcher, options, "describe")
    rows = {
        "dataset": described["name"],
        "digest": described["digest"],
        "split": split,
        "labels": described["document"]["labels"],
        "shuffle": True,
        "seed": 0,
        "window_rows": 10_000,
        "filter": None,
        "negative_keep": 1.0,
    }
    expected = sum(ask(dispatcher, options, "count", rows=rows)["group_rows"])
    session = {"rows": rows, "run": "an example", "attempt": 0, "rank": 0, "num_ranks": 1}
    num_rows, window = 0, 0
    while num_rows < expected:  # windows are parts of the shuffled epoch, in order
        [lease] = ask(dispatcher, options, "lease", session=session, epoch=0, windows=[window])["leases"]
        ticket = {"session": session, "epoch": 0, "window": window, "begin": 0, "batch_size": batch_size,
                  "last_batch": "keep"}  # fmt: skip
        for chunk in flight.connect(lease["reader"]).do_get(flight.Ticket(json.dumps(ticket).encode()), options):
            if num_rows == 0:
                print(
                    f"columns: {', '.join(chunk.data.schema.names[:4])}, ...; first row:", chunk.data.slice(0, 1)[2][0]
                )
            num_rows += chunk.data.num_rows
        window += 1
    print(f"{num_rows:,} rows in {window} windows")
    return num_rows


def main() -> None:
    if len(sys.argv) > 1:
        read_epoch(sys.argv[1], "train", batch_size=1024)
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        read_epoch(start(Path(folder), stack), "train", batch_size=1024)


def start(folder: Path, stack: ExitStack) -> str:
    """Start a dispatcher and a reader of a small log, which end with `stack`. Return the URL of the dispatcher."""

    def meseta(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "meseta.cli.main", *arguments], stdout=PIPE, stderr=PIPE, text=True
        )
        stack.callback(process.communicate)
        return process

    meseta("data", "synth", "--out", f"{folder}/raw", "--rows", "30000").wait()
    meseta("prepare", f"{folder}/raw/*.tsv", "--out", f"{folder}/click").wait()
    dispatcher = meseta("readers", "dispatch", "--data", f"{folder}/click", "--listen", "127.0.0.1:0", "--json")
    stack.callback(dispatcher.terminate)
    url = json.loads(dispatcher.stdout.readline())["url"]
    reader = meseta("readers", "work", "--dispatcher", url)
    stack.callback(reader.terminate)
    reader.stdout.readline()  # waits until the reader is ready
    return url


if __name__ == "__main__":
    main()
