"""Network namespaces without a name: each lives as long as the process that holds it, which ends with this one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
"""What is called, and the package of Debian that has it."""
IPV6 = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
HOLD = ("sh", "-c", f"if [ -e {IPV6} ]; then echo 1 > {IPV6}; fi; echo held && exec cat")
"""Says that the namespace is there, and ends when nobody holds the other end of its standard input, however that
happened. Without addresses of IPv6 nothing is sent that nobody asked for."""


class Impossible(Exception):
    """This machine makes no network namespaces, or no slow links between them."""


class Namespace:
    """A network of its own: interfaces, addresses, ports. A context manager.

    Where this process may not make one, the first is made in a user namespace, in which it may; others go into the
    same.
    """

    def __init__(self, first: Namespace | None = None) -> None:
        """`first` of those that are to be joined by links. Raises Impossible."""
        self._user = first._user if first is not None else None if _is_privileged() else self
        into, flags = (["--user", "--map-root-user"], []) if self._user is self else ([], self._in_user_namespace())
        self._holder = subprocess.Popen(
            [*flags, "unshare", *into, "--net", *HOLD],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if not self._holder.stdout.readline():
            self._holder.wait()
            raise Impossible(f"no network namespace: {self._holder.stderr.read().decode().strip()}")

    def _in_user_namespace(self) -> list[str]:
        if self._user is None:
            return []
        return ["nsenter", "--target", str(self._user.pid), "--user", "--preserve-credentials"]

    @property
    def pid(self) -> int:
        """Of the process that holds it; /proc/PID/net says what is in it."""
        return self._holder.pid

    def entered(self, command: Sequence[str]) -> list[str]:
        """The command, as it is run inside; it is killed with the thread that starts it."""
        user = [] if self._user is None else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self.pid), *user, "--net", "setpriv", "--pdeathsig", "KILL", *command]

    @property
    def files(self) -> list[str]:
        """What a process of one thread opens for `setns`, in this order, to be inside from then on."""
        user = [] if self._user is None else [f"/proc/{self.pid}/ns/user"]
        return [*user, f"/proc/{self.pid}/ns/net"]

    def configure(self, program: str, lines: Sequence[str]) -> None:
        """Give `ip` or `tc` these commands, all in one. Raises Impossible with what it says."""
        done = subprocess.run(
            self.entered([program, "-batch", "-"]), input="\n".join(lines), text=True, capture_output=True, check=False
        )
        if done.returncode:
            raise Impossible(f"{program}: {done.stderr.strip()}; the commands were: {'; '.join(lines)}")

    def dropped_packets(self) -> int:
        """Packets that no queue inside had room for."""
        shown = subprocess.run(self.entered(["tc", "-s", "-j", "qdisc", "show"]), capture_output=True, check=True)
        return sum(queue["drops"] for queue in json.loads(shown.stdout))

    def table(self, name: str) -> str:
        """/proc/net/NAME as a process inside reads it."""
        return Path(f"/proc/{self.pid}/net/{name}").read_text()

    def __enter__(self) -> Namespace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            assert pipe is not None
            pipe.close()
        self._holder.wait()


def why_impossible() -> str | None:
    """Why there can be no slow links between hosts on this machine; None where there can."""
    lacking = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if lacking:
        return f"programs of {' and '.join(lacking)} are missing"
    try:
        with Namespace() as namespace:
            namespace.configure("tc", ["qdisc add dev lo root tbf rate 1mbit burst 64kb limit 1mb"])
            namespace.configure("ip", ["link add name end0 type veth peer name end1", "link add name both type bridge"])
    except (Impossible, OSError) as error:
        return str(error)
    return None


def _is_privileged() -> bool:
    """Whether this process may make namespaces as it is: CAP_SYS_ADMIN and CAP_NET_ADMIN."""
    text = Path("/proc/self/status").read_text()
    effective = int(next(line.split()[1] for line in text.splitlines() if line.startswith("CapEff:")), 16)
    return os.geteuid() == 0 and bool(effective & (1 << 21)) and bool(effective & (1 << 12))
