"""`meseta train` on rows of readers whose files lie behind links, of which one gives a host a third of what training
eats: how much training waits, and how many readers a dispatcher takes that adapts their number.

    python benchmarks/bench_scaling.py --parts memory,here,sweep,auto [--raw] [--folder build/scaling]
        [--page scaling.html] [--seconds 90] [--auto-seconds 600] [--from 1]

Parts, with main.yaml's model on 1.6 million rows of prepared data, or with `--raw` of TSV that a recipe reads,
shuffled:
- memory: all data prepared and in memory, and the same with as much processor time burnt beside it as readers took in
  `auto`.
- here: read in the trainer, over one link.
- sweep: 1 to 5 readers, or `--from` more, a link each: the fewest with which training waits for less than 2 %.
- auto: from one reader on, of at most 6; at two fifths of the time the links become three times as fast.

Trainers, readers and dispatcher are in one network; what readers read comes from another host, each reader's over a
link of its own (benchmarks/hosts), so that it takes network namespaces; without them it says so. What is found stays in
the folder, for parts that are run later. Appends to benchmarks/results.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from far import far_files
from hosts.links import address
from record import ROOT, record

from hosts import Hosts, why_impossible
from meseta.data.service.dispatcher_client import DispatcherClient
from meseta.report.charts.chart import Series, line_chart
from meseta.report.charts.markup import escape, html_document, tag
from meseta.system.files import write_atomic

PORT = 29500
MOST = 6
NUM_LINKS = 2 * MOST
"""Readers that leave keep theirs until they have ended."""
WAITING = 0.02
BURN = (
    "import sys, time\nshare = float(sys.argv[1])\nwhile True:\n    end = time.perf_counter() + 0.02 * share\n"
    "    while time.perf_counter() < end: pass\n    time.sleep(0.02 * (1 - share))\n"
)
HERE = """
import io, sys
import pyarrow.parquet as pq
from far_files import FarFile
from meseta.data.dataset import part_files
def open_part(path, metadata=None, **_):
    return pq.ParquetFile(io.BufferedReader(FarFile(path)), metadata=metadata)
part_files.open_part = open_part
from meseta.cli.main import main
main()
"""
STYLE = "svg .one-line { stroke: var(--test); } svg .two-line { stroke: var(--other); }"
MESETA = [sys.executable, "-m", "meseta.cli.main"]


class Bench:
    """The data, what was found so far, and the commands."""

    def __init__(self, folder: Path, *, is_raw: bool, num_rows: int = 2_000_000) -> None:
        self.folder = folder.resolve()
        self.raw, self.data = self.folder / "raw", self.folder / "data"
        self.far = self.folder / "recipe" if is_raw else self.data
        """What readers read."""
        self.kind = "raw TSV, " * is_raw
        self.found_at = self.folder / f"found{'-raw' * is_raw}.json"
        self.found: dict[str, Any] = json.loads(self.found_at.read_text()) if self.found_at.exists() else {}
        prepare = ["prepare", f"{self.raw}/*.tsv", "--test-files", f"{self.raw}/day_4.tsv", "--out"]
        synth = ["data", "synth", "--out", str(self.raw), "--rows", str(num_rows), "--files", "5", "--scale", "0.01"]
        recipe = [*prepare, str(self.folder / "recipe"), "--recipe-only"]
        made = {self.raw / "day_4.tsv": synth, self.data: [*prepare, str(self.data)], self.folder / "recipe": recipe}
        for path, command in made.items():
            if not path.exists():
                subprocess.run([*MESETA, *command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        files = list(self.raw.glob("day_[0-3].tsv") if is_raw else (self.data / "train").glob("*.parquet"))
        described = json.loads((self.data / "dataset.json").read_text())
        self.row_bytes = sum(file.stat().st_size for file in files) / described["splits"]["train"]["num_rows"]

    def keep(self, name: str, value: Any) -> None:
        self.found[name] = value
        self.found_at.write_text(json.dumps(self.found))

    def rate(self, factor: float = 1.0) -> str:
        """Of a link that gives a third of what training eats from memory."""
        return f"{factor * self.found['memory'] * self.row_bytes * 8 / 3 / 1000:.0f}kbit"

    @contextmanager
    def training(self, *overrides: str, program: list[str] | None = None, **variables: str) -> Iterator[Training]:
        """A run that is ended when this is left."""
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
    """A run under way."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self._process, self._path = process, path

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged. Raises SystemExit where it has ended."""
        if self._process.poll() is not None:
            assert self._process.stderr is not None
            sys.exit(f"the training has ended: {self._process.stderr.read().decode()[-2000:]}")
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]

    def over(self, skipped_s: float, seconds: float) -> tuple[float, float]:
        """(samples a second, share of the time that it waits) after its first `skipped_s`, over so long."""
        while not (lines := self.lines()) or lines[-1]["time_s"] < skipped_s + seconds:
            time.sleep(0.5)
        return rates(lines, skipped_s, skipped_s + seconds)


def rates(lines: list[dict[str, Any]], first_s: float, last_s: float) -> tuple[float, float]:
    """(samples a second, share that was waited) of the lines from one time of training to another."""
    inside = [line for line in lines if first_s < line["time_s"] <= last_s]
    samples = inside[-1]["num_samples"] - inside[0]["num_samples"]
    seconds = inside[-1]["time_s"] - inside[0]["time_s"]
    waited = sum(waiting_share(line) * line["seconds_per_step"] for line in inside[1:])
    return samples / seconds, waited / sum(line["seconds_per_step"] for line in inside[1:])


def waiting_share(line: dict[str, Any]) -> float:
    return line["stages_s"]["data"] / line["seconds_per_step"]


@contextmanager
def links(bench: Bench) -> Iterator[tuple[Hosts, dict[str, str]]]:
    """(hosts, variables of processes whose files lie behind a link of their own)."""
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(1 + NUM_LINKS, across=bench.rate()))
        hosts.widen(0, "1gbit")
        serve = [sys.executable, far_files.__file__, "serve", f"{address(0)}:{PORT}"]
        server = stack.enter_context(subprocess.Popen(hosts._hosts[0].entered(serve), stdout=subprocess.PIPE))
        stack.callback(server.kill)
        assert server.stdout is not None
        server.stdout.readline()
        locks = stack.enter_context(tempfile.TemporaryDirectory(prefix="meseta-links-"))
        ends = [hosts.namespace_files(host) for host in range(1, 1 + NUM_LINKS)]
        found = {"address": [address(0), PORT], "links": ends, "locks": locks, "raw": str(bench.raw)}
        yield hosts, {far_files.VARIABLE: json.dumps(found), "PYTHONPATH": str(Path(far_files.__file__).parent)}


@contextmanager
def tier(bench: Bench, variables: dict[str, str], least: int, most: int) -> Iterator[tuple[str, int]]:
    """(URL of a dispatcher with readers behind links, its process)."""
    command = ["readers", "dispatch", "--data", str(bench.far), "--listen", "127.0.0.1:0", "--start-local"]
    with subprocess.Popen(
        [*MESETA, *command, "--min", str(least), "--max", str(most), "--until-stdin-ends", "--json"],
        env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        while len(DispatcherClient(url).status().readers) < least:
            time.sleep(0.2)
        yield url, process.pid


def processor_s(pid: int) -> float:
    """That a process and those it has started have used, those that have ended among them."""
    used = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if pid in (int(path.parent.name), int(words[1])):
            ended = words[13:15] if int(path.parent.name) == pid else []
            used += sum(map(int, [*words[11:13], *ended])) / os.sysconf("SC_CLK_TCK")
    return used


def memory(bench: Bench, seconds: float) -> None:
    """Part `memory`."""
    with bench.training(f"data.dir={bench.data}") as training:
        plain, waited = training.over(8, seconds)
    bench.keep("memory", plain)
    print(f"memory: {plain:,.0f} samples/s, {waited:.1%} waiting; {bench.row_bytes:.1f} bytes a row")
    if (share := bench.found.get("processor_share")) is None:
        return
    burner = subprocess.Popen([sys.executable, "-c", BURN, str(share)])
    try:
        with bench.training(f"data.dir={bench.data}") as training:
            burnt, _ = training.over(8, seconds)
    finally:
        burner.kill()
        burner.wait()
    bench.keep("burnt", burnt)
    print(f"memory, with {share:.2f} of a processor burnt: {burnt:,.0f} samples/s")


def here(bench: Bench, seconds: float) -> None:
    """Part `here`."""
    with links(bench) as (_, variables):
        program = [sys.executable, "-c", HERE]
        with bench.training(f"data.dir={bench.far}", program=program, **variables) as training:
            speed, waited = training.over(15, seconds)
    print(f"read in the trainer over {bench.rate()}: {speed:,.0f} samples/s, {waited:.1%} waiting")
    record("scaling", bench.kind + bench.rate(), "waiting, read here", waited, "share", peer="at least", peer_value=0.5)


def sweep(bench: Bench, seconds: float, first: int) -> None:
    """Part `sweep`."""
    needed = None
    for number in range(first, MOST):
        with ExitStack() as stack:
            _, variables = stack.enter_context(links(bench))
            url, _ = stack.enter_context(tier(bench, variables, number, number))
            training = stack.enter_context(bench.training("data.dir=null", f"data.service.url={url}"))
            speed, waited = training.over(20, seconds)
        print(f"{number} readers: {speed:,.0f} samples/s, {waited:.1%} waiting", flush=True)
        if waited < WAITING:
            needed = number
            break
    bench.keep("needed", needed)


def auto(bench: Bench, seconds: float, page: Path | None) -> None:
    """Part `auto`."""
    faster_s = 0.4 * seconds
    with ExitStack() as stack:
        hosts, variables = stack.enter_context(links(bench))
        url, pid = stack.enter_context(tier(bench, variables, 1, MOST))
        training = stack.enter_context(bench.training("data.dir=null", f"data.service.url={url}"))
        while not training.lines():
            time.sleep(0.2)
        dispatcher, began_s, used_s = DispatcherClient(url), time.monotonic(), processor_s(pid)
        train_s = training.lines()[-1]["time_s"]
        numbers: list[tuple[float, int]] = []
        is_fast = False
        while (now_s := time.monotonic() - began_s) < seconds:
            if now_s >= faster_s and not is_fast:
                share = (processor_s(pid) - used_s) / now_s
                hosts.reshape(bench.rate(3.0))
                hosts.widen(0, "1gbit")
                is_fast = True
            numbers.append((now_s, sum(not reader.is_draining for reader in dispatcher.status().readers)))
            time.sleep(0.5)
        lines = [line | {"time_s": line["time_s"] - train_s} for line in training.lines()]
    told(bench, lines, numbers, faster_s, share)
    if page is not None:
        draw(page, bench, lines, numbers, faster_s)
        print(f"picture: {page}")


def told(
    bench: Bench, lines: list[dict[str, Any]], numbers: list[tuple[float, int]], faster_s: float, share: float
) -> None:
    """What must be reached, beside what was."""
    case = f"{bench.kind}{bench.rate()}, then x 3"
    bench.keep("processor_share", share)
    for first_s in range(0, int(numbers[-1][0]) - 19, 20):
        _, waited = rates(lines, first_s, first_s + 20)
        readers = [number for now_s, number in numbers if first_s <= now_s < first_s + 20]
        print(f"{first_s:4}-{first_s + 20} s: {waited:6.1%} waiting, {min(readers)} to {max(readers)} readers")
    speed, waited = rates(lines, 60, faster_s)
    record("scaling", case, "waiting after 60 s", waited, "share", peer="at most", peer_value=WAITING)
    record("scaling", case, "samples/s after 60 s", speed, "samples/s", peer="memory", peer_value=bench.found["memory"])
    before = [number for now_s, number in numbers if faster_s - 20 <= now_s < faster_s]
    if bench.found.get("needed"):
        record("scaling", case, "readers", max(before), "readers", peer="sweep", peer_value=bench.found["needed"])
    fewer = next((now_s - faster_s for now_s, number in numbers if now_s > faster_s and number < min(before)), None)
    after = [number for now_s, number in numbers if now_s > faster_s + (fewer or 0) + 5]
    changes = sum(a != b for a, b in pairwise(after))
    when = "never" if fewer is None else f"{fewer:.0f} s after the links became faster"
    print(
        f"readers and dispatcher took {share:.2f} of a processor; fewer readers: {when}, {changes} changes after that"
    )
    if fewer is not None:
        record("scaling", case, "fewer readers after", fewer, "seconds", peer="at most", peer_value=120.0)


def draw(
    path: Path, bench: Bench, lines: list[dict[str, Any]], numbers: list[tuple[float, int]], faster_s: float
) -> None:
    """A page with waiting and readers over time."""
    waiting = [(line["time_s"], waiting_share(line)) for line in lines if line["time_s"] >= 0]
    last_s = numbers[-1][0]
    charts = [
        ("share of its time that training waits", Series(name="waiting", points=waiting, class_="one")),
        ("readers", Series(name="readers", points=[(s, float(n)) for s, n in numbers], class_="two")),
    ]
    figures = [
        tag("figure", tag("figcaption", escape(name)), line_chart(name, [one], last_s, include_zero=True, x_name="s"))
        for name, one in charts
    ]
    title = f"Readers behind links of {bench.rate()}, from {faster_s:.0f} s on three times as fast"
    write_atomic(path, html_document(title, tag("h1", escape(title)), tag("div", *figures, class_="grid"), style=STYLE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="memory,here,sweep,auto")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "scaling")
    parser.add_argument("--seconds", type=float, default=90.0, help="of a measurement: several windows")
    parser.add_argument("--auto-seconds", type=float, default=600.0, help="of part auto")
    parser.add_argument("--raw", action="store_true", help="read raw TSV, by a recipe")
    parser.add_argument("--from", type=int, default=1, dest="first", help="readers that the sweep begins with")
    parser.add_argument("--page", type=Path, help="draw part auto")
    options = parser.parse_args()
    if options.auto_seconds < 250:
        parser.error("--auto-seconds must be at least 250: what is after a minute is looked at, and after two more")
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
        "sweep": lambda: sweep(bench, options.seconds, options.first),
        "auto": lambda: auto(bench, options.auto_seconds, options.page),
    }
    for part in options.parts.split(","):
        parts[part]()


if __name__ == "__main__":
    main()
