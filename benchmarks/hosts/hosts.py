"""Several hosts on one machine, and commands whose ranks run on them."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hosts.links import (
    INTERFACE,
    LinkTraffic,
    address,
    bits_per_s,
    fabric_commands,
    host_commands,
    read_traffic,
    shaped,
)
from hosts.namespaces import Impossible, Namespace, why_impossible
from hosts.utilisation import Sample

PORT = 29400
"""Port of torch's store on rank 0, in a new network."""
GRACE_S = 3.0
"""Seconds for other ranks to report the consequences of a failure."""
WATCH_S = 0.1
"""Interval between samples of the counters."""
LAST_WORDS = 2000


class Failure(Exception):
    """Command that failed on a rank or exceeded its time limit."""


@dataclass(frozen=True)
class Outcome:
    outputs: tuple[str, ...]
    """Standard output of each rank."""
    seconds: float
    rate: float
    """Rate of each link in bits per second."""
    samples: tuple[Sample, ...]
    """Counters over time. The first sample is zero, the last one is the total."""

    @property
    def traffic(self) -> tuple[LinkTraffic, ...]:
        """Total traffic by host."""
        return self.samples[-1].traffic


class Hosts:
    """Hosts with links between them. The context manager removes them, even if this process is killed.

        with Hosts(4, ranks=2, across="200mbit") as hosts:
            print(hosts.run([sys.executable, "job.py"]).outputs[0])

    Each host is a network namespace. All hosts share the file system.
    """

    def __init__(
        self, num_hosts: int, *, ranks: int = 1, across: str = "1gbit", racks: int = 1, between_racks: str | None = None
    ) -> None:
        """
        Args:
            num_hosts: at most 200.
            ranks: of each host.
            across: rate of each host's link in either direction, as `tc` reads it.
            racks: the first num_hosts / racks hosts are in the first one, and so on.
            between_racks: rate of each rack's link to the others; None: as `across`.

        Raises ValueError for numbers that make no network, and Impossible where this machine makes none.
        """
        if not 1 <= num_hosts <= 200 or ranks < 1 or racks < 1 or num_hosts % racks:
            raise ValueError(
                f"{num_hosts} hosts of {ranks} ranks in {racks} racks: there must be 1 to 200 hosts, 1 rank in each or "
                "more, and as many hosts in each rack"
            )
        self.num_hosts, self.ranks_per_host, self.num_racks = num_hosts, ranks, racks
        self.across, self.between_racks = across, between_racks or across
        self.rate = bits_per_s(across)
        bits_per_s(self.between_racks)
        self._made = ExitStack()
        self._hosts: list[Namespace] = []

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @property
    def namespaces(self) -> list[str]:
        """Paths in /proc of the namespaces of the bridges and of each host."""
        return [os.readlink(f"/proc/{held.pid}/ns/net") for held in (self._fabric, *self._hosts)]

    def __enter__(self) -> Hosts:
        why = why_impossible()
        if why is not None:
            raise Impossible(f"this machine makes no slow links: {why}")
        with ExitStack() as made:
            self._fabric = fabric = made.enter_context(Namespace())
            self._hosts = [made.enter_context(Namespace(fabric)) for _ in range(self.num_hosts)]
            fabric.configure("ip", list(fabric_commands([host.pid for host in self._hosts], self.num_racks)))
            ends = [shaped(f"host{host}", self.across) for host in range(self.num_hosts)]
            if self.num_racks > 1:
                names = [end for rack in range(self.num_racks) for end in (f"rack{rack}up", f"spine{rack}")]
                ends += [shaped(name, self.between_racks) for name in names]
            fabric.configure("tc", ends)
            for number, host in enumerate(self._hosts):
                host.configure("ip", host_commands(number))
                host.configure("tc", [shaped(INTERFACE, self.across)])
            self._made = made.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hosts = []
        self._made.close()

    def dropped_packets(self) -> int:
        """Number of packets that did not fit into a queue. TCP sends them again."""
        return sum(place.dropped_packets() for place in (self._fabric, *self._hosts))

    def reshape(self, across: str) -> None:
        """Change the rate of each host's link, also while commands run. Links between racks do not change."""
        self.rate = bits_per_s(across)
        self.across = across
        self._fabric.configure("tc", [shaped(f"host{host}", across, "change") for host in range(self.num_hosts)])
        for host in self._hosts:
            host.configure("tc", [shaped(INTERFACE, across, "change")])

    def widen(self, host: int, across: str) -> None:
        """Change the rate of one host's link."""
        self._fabric.configure("tc", [shaped(f"host{host}", across, "change")])
        self._hosts[host].configure("tc", [shaped(INTERFACE, across, "change")])

    def variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables of a rank, as torchrun sets them."""
        host, place = divmod(rank, self.ranks_per_host)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "GROUP_RANK": str(host),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
        }

    def namespace_files(self, rank: int) -> list[str]:
        """Return the files for `setns` with which a process enters the host of a rank. It outlives the hosts."""
        return self._hosts[rank // self.ranks_per_host].files

    def run(
        self, command: Sequence[str], *, variables: Mapping[str, str] | None = None, limit_s: float = 600.0
    ) -> Outcome:
        """Run a command as every rank, to its end.

        Args:
            command: a program and its arguments.
            variables: additional environment variables.
            limit_s: seconds after which all of it is killed.

        Raises Failure, which names the rank that ended first with an error and has its last words.
        """
        with tempfile.TemporaryDirectory(prefix="meseta-hosts-") as name:
            ranks: list[subprocess.Popen[bytes]] = []
            start, zeros = time.monotonic(), self.traffic()
            samples = [self._sample(start, zeros)]
            try:
                for rank in range(self.num_ranks):
                    added = {**self.variables(rank), **(variables or {})}
                    ranks.append(self._start(command, added, Path(name) / str(rank), rank))
                while _running(ranks):
                    self._check(ranks, Path(name), command, time.monotonic() - start, limit_s)
                    time.sleep(WATCH_S)
                    samples.append(self._sample(start, zeros))
                self._check(ranks, Path(name), command, 0.0, limit_s)
            finally:
                _kill(ranks)
            outputs = tuple((Path(name) / f"{rank}.out").read_text(errors="replace") for rank in range(self.num_ranks))
        return Outcome(outputs, time.monotonic() - start, self.rate, tuple(samples))

    def _start(
        self, command: Sequence[str], added: Mapping[str, str], place: Path, rank: int
    ) -> subprocess.Popen[bytes]:
        host = self._hosts[rank // self.ranks_per_host]
        with place.with_suffix(".out").open("wb") as out, place.with_suffix(".err").open("wb") as err:
            return subprocess.Popen(
                host.entered(command), env={**os.environ, **added}, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                process_group=0,
            )  # fmt: skip

    def _check(
        self,
        ranks: Sequence[subprocess.Popen[bytes]],
        folder: Path,
        command: Sequence[str],
        seconds: float,
        limit_s: float,
    ) -> None:
        """Raise Failure if a rank has failed."""
        failed = next((rank for rank, process in enumerate(ranks) if process.returncode), None)
        if failed is None and seconds < limit_s:
            return
        if failed is None:
            failed = next(rank for rank, process in enumerate(ranks) if process.returncode is None)
            what = f"had not ended after {limit_s:g} s"
        else:
            _wait(ranks, GRACE_S)
            what = f"ended with {ranks[failed].returncode}"
        words = (folder / f"{failed}.err").read_text(errors="replace").strip() or "it wrote nothing to standard error"
        raise Failure(
            f"{' '.join(command)}: rank {failed} on host {failed // self.ranks_per_host} {what}: {words[-LAST_WORDS:]}"
        )

    def traffic(self) -> list[LinkTraffic]:
        return [read_traffic(host.table("dev"), host.table("snmp")) for host in self._hosts]

    def _sample(self, start: float, zeros: Sequence[LinkTraffic]) -> Sample:
        counted = zip(self.traffic(), zeros, strict=True)
        return Sample(time.monotonic() - start, tuple(now.since(zero) for now, zero in counted))


def _running(ranks: Sequence[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    return [process for process in ranks if process.poll() is None]


def _wait(ranks: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    stop = time.monotonic() + limit_s
    while _running(ranks) and time.monotonic() < stop:
        time.sleep(WATCH_S)


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in _running(ranks):
        os.killpg(process.pid, signal.SIGKILL)
    for process in ranks:
        process.wait()
