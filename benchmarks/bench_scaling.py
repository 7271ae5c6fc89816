"""Measure `meseta train` with readers whose files are behind slow links, and the autoscaler of readers.

    python benchmarks/bench_scaling.py --parts memory,here,sweep,auto [--raw] [--folder build/scaling]
        [--seconds 90] [--auto-seconds 240]

The main job reads 1.6 million prepared rows, or TSV with `--raw`. A link delivers a third of what training consumes.
- memory: all data in memory.
- here: the trainer reads over one link.
- sweep: 1 to 5 readers with one link each: the fewest with which training waits for less than 2 %.
- auto: autoscaled from one to 6 readers.

It needs network namespaces. Results of parts are stored in the folder for later parts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common.command import make_parser, parse_arguments
from common.processes import MESETA, run_meseta
from hosts.links import address
from record import ROOT, record
from remote import remote_files

from hosts import Hosts, why_impossible
from meseta.data.service.dispatcher_client import DispatcherClient

PORT = 29500
MOST = 6
NUM_LINKS = 2 * MOST
"""Number of links, including those of readers that are draining."""
WAITING = 0.02
HERE = """
import io, sys
import pyarrow.parquet as pq
from remote_files import RemoteFile
from meseta.data.dataset import part_files
def open_part(path, metadata=None, **_):
    return pq.ParquetFile(io.BufferedReader(RemoteFile(path)), metadata=metadata)
part_files.open_part = open_part
from meseta.cli.main import main
main()
"""


class Bench:
    def __init__(self, folder: Path, *, is_raw: bool, num_rows: int = 2_000_000) -> None:
        self.folder = folder.resolve()
        self.raw, self.data = self.folder / "raw", self.folder / "data"
        self.source = self.folder / "recipe" if is_raw else self.data
        self.kind = "raw TSV, " * is_raw
        self._results_file = self.folder / f"found{'-raw' * is_raw}.json"
        self.results: dict[str, Any] = json.loads(self._results_file.read_text()) if self._results_file.exists() else {}
        prepare = ["prepare", f"{self.raw}/*.tsv", "--test-files", f"{self.raw}/day_4.tsv", "--out"]
        synth = ["data", "synth", "--out", str(self.raw), "--rows", str(num_rows), "--files", "5", "--scale", "0.01"]
        recipe = [*prepare, str(self.folder / "recipe"), "--recipe-only"]
        made = {self.raw / "day_4.tsv": synth, self.data: [*prepare, str(self.data)], self.folder / "recipe": recipe}
        for path, command in made.items():
            if not path.exists():
                run_meseta(*command)
        files = list(self.raw.glob("day_[0-3].tsv") if is_raw else (self.data / "train").glob("*.parquet"))
        described = json.loads((self.data / "dataset.json").read_text())
        self.row_bytes = sum(file.stat().st_size for file in files) / described["splits"]["train"]["num_rows"]

    def keep(self, name: str, value: Any) -> None:
        self.results[name] = value
        self._results_file.write_text(json.dumps(self.results))

    def rate(self) -> str:
        """Return the rate of a link that delivers a third of what training can consume."""
        return f"{self.results['memory'] * self.row_bytes * 8 / 3 / 1000:.0f}kbit"

    @contextmanager
    def training(self, *overrides: str, program: list[str] | None = None, **variables: str) -> Iterator[Training]:
        with tempfile.TemporaryDirectory(prefix="meseta-scaling-") as run:
            config = str(ROOT / "examples/configs/main.yaml")
            more = [f"run_dir={run}/run", "train.epochs=1000", "checkpoint.every_steps=null", *overrides]
            process = subprocess.Popen(
                [*(program or MESETA), "train", config, *more], env={**os.environ, **variables},
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip
            try:
                yield Training(process, Path(run) / "run/metrics.jsonl")
            finally:
                process.kill()
                process.communicate()


class Training:
    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self._process, self._path = process, path

    def lines(self) -> list[dict[str, Any]]:
        """Return the logged lines. Exits if the run has ended."""
        if self._process.poll() is not None:
            assert self._process.stderr is not None
            sys.exit(f"the training has ended: {self._process.stderr.read().decode()[-2000:]}")
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]

    def over(self, skipped_s: float, seconds: float) -> tuple[float, float]:
        """Return (samples/s, waiting share) of `seconds` after the first `skipped_s`."""
        while not (lines := self.lines()) or lines[-1]["time_s"] < skipped_s + seconds:
            time.sleep(0.5)
        return rates(lines, skipped_s, skipped_s + seconds)


def rates(lines: list[dict[str, Any]], first_s: float, last_s: float) -> tuple[float, float]:
    """Return (samples/s, waiting share) between two times of training."""
    inside = [line for line in lines if first_s < line["time_s"] <= last_s]
    samples = inside[-1]["num_samples"] - inside[0]["num_samples"]
    seconds = inside[-1]["time_s"] - inside[0]["time_s"]
    waited = sum(waiting_share(line) * line["seconds_per_step"] for line in inside[1:])
    return samples / seconds, waited / sum(line["seconds_per_step"] for line in inside[1:])


def waiting_share(line: dict[str, Any]) -> float:
    return line["stages_s"]["data"] / line["seconds_per_step"]


@contextmanager
def links(bench: Bench) -> Iterator[tuple[Hosts, dict[str, str]]]:
    """Context manager that yields (hosts, variables of processes that read files over their own link)."""
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(1 + NUM_LINKS, across=bench.rate()))
        hosts.widen(0, "1gbit")
        serve = [sys.executable, remote_files.__file__, "serve", f"{address(0)}:{PORT}"]
        server = stack.enter_context(subprocess.Popen(hosts._hosts[0].entered(serve), stdout=subprocess.PIPE))
        stack.callback(server.kill)
        assert server.stdout is not None
        server.stdout.readline()
        locks = stack.enter_context(tempfile.TemporaryDirectory(prefix="meseta-links-"))
        ends = [hosts.namespace_files(host) for host in range(1, 1 + NUM_LINKS)]
        settings = {"address": [address(0), PORT], "links": ends, "locks": locks, "raw": str(bench.raw)}
        yield (
            hosts,
            {remote_files.VARIABLE: json.dumps(settings), "PYTHONPATH": str(Path(remote_files.__file__).parent)},
        )


@contextmanager
def tier(bench: Bench, variables: dict[str, str], least: int, most: int) -> Iterator[str]:
    command = ["readers", "dispatch", "--data", str(bench.source), "--listen", "127.0.0.1:0", "--start-local"]
    with subprocess.Popen(
        [*MESETA, *command, "--min", str(least), "--max", str(most), "--until-stdin-ends", "--json"],
        env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        while len(DispatcherClient(url).status().readers) < least:
            time.sleep(0.2)
        yield url


def memory(bench: Bench, seconds: float) -> None:
    with bench.training(f"data.dir={bench.data}") as training:
        plain, waited = training.over(8, seconds)
    bench.keep("memory", plain)
    print(f"memory: {plain:,.0f} samples/s, {waited:.1%} waiting; {bench.row_bytes:.1f} bytes a row")


def here(bench: Bench, seconds: float) -> None:
    with links(bench) as (_, variables):
        program = [sys.executable, "-c", HERE]
        with bench.training(f"data.dir={bench.source}", program=program, **variables) as training:
            speed, waited = training.over(15, seconds)
    print(f"read in the trainer over {bench.rate()}: {speed:,.0f} samples/s, {waited:.1%} waiting")
    record("scaling", bench.kind + bench.rate(), "waiting, read here", waited, "share", peer="at least", peer_value=0.5)


def sweep(bench: Bench, seconds: float) -> None:
    needed = None
    for number in range(1, MOST):
        with ExitStack() as stack:
            _, variables = stack.enter_context(links(bench))
            url = stack.enter_context(tier(bench, variables, number, number))
            training = stack.enter_context(bench.training("data.dir=null", f"data.service.url={url}"))
            speed, waited = training.over(20, seconds)
        print(f"{number} readers: {speed:,.0f} samples/s, {waited:.1%} waiting", flush=True)
        if waited < WAITING:
            needed = number
            break
    bench.keep("needed", needed)


def auto(bench: Bench, seconds: float) -> None:
    with ExitStack() as stack:
        _, variables = stack.enter_context(links(bench))
        url = stack.enter_context(tier(bench, variables, 1, MOST))
        training = stack.enter_context(bench.training("data.dir=null", f"data.service.url={url}"))
        while not training.lines():
            time.sleep(0.2)
        dispatcher, begin_s = DispatcherClient(url), time.monotonic()
        train_s = training.lines()[-1]["time_s"]
        numbers: list[tuple[float, int]] = []
        while (now_s := time.monotonic() - begin_s) < seconds:
            numbers.append((now_s, sum(not reader.is_draining for reader in dispatcher.status().readers)))
            time.sleep(0.5)
        lines = [line | {"time_s": line["time_s"] - train_s} for line in training.lines()]
    case = bench.kind + bench.rate()
    for first_s in range(0, int(numbers[-1][0]) - 19, 20):
        _, waited = rates(lines, first_s, first_s + 20)
        readers = [number for now_s, number in numbers if first_s <= now_s < first_s + 20]
        print(f"{first_s:4}-{first_s + 20} s: {waited:6.1%} waiting, {min(readers)} to {max(readers)} readers")
    speed, waited = rates(lines, 60, seconds)
    record("scaling", case, "waiting after 60 s", waited, "share", peer="at most", peer_value=WAITING)
    in_memory = bench.results["memory"]
    record("scaling", case, "samples/s after 60 s", speed, "samples/s", peer="memory", peer_value=in_memory)
    if needed := bench.results.get("needed"):
        record("scaling", case, "readers", max(readers), "readers", peer="sweep", peer_value=needed)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--parts", default="memory,here,sweep,auto")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "scaling")
    parser.add_argument("--seconds", type=float, default=90.0, help="of a measurement: several windows")
    parser.add_argument("--auto-seconds", type=float, default=240.0, help="of part auto")
    parser.add_argument("--raw", action="store_true", help="read raw TSV, by a recipe")
    options = parse_arguments(parser)
    if options.auto_seconds < 120:
        parser.error("--auto-seconds must be at least 120, because readings start after one minute")
    why = why_impossible() or ("links are entered by root alone" if os.geteuid() else None)
    if why is not None:
        print(f"nothing is measured, since this machine makes no slow links: {why}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.folder, is_raw=options.raw)
    parts = {
        "memory": lambda: memory(bench, options.seconds),
        "here": lambda: here(bench, options.seconds),
        "sweep": lambda: sweep(bench, options.seconds),
        "auto": lambda: auto(bench, options.auto_seconds),
    }
    for part in options.parts.split(","):
        parts[part]()


if __name__ == "__main__":
    main()
