"""Unnamed network namespaces. Each exists until the process that holds it ends, at the latest with this one."""

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
"""Required programs, and their Debian packages."""
IPV6 = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
HOLD = ("sh", "-c", f"if [ -e {IPV6} ]; then echo 1 > {IPV6}; fi; echo held && exec cat")


class Impossible(Exception):
    """This machine cannot create network namespaces or limit links between them."""


class Namespace:
    """Network namespace with its own interfaces, addresses and ports.

    Without privileges, the first one is created in a user namespace, and others in the same one.
    """

    def __init__(self, first: Namespace | None = None) -> None:
        """Create a namespace, connected to `first`. Raises Impossible."""
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
        return self._holder.pid

    def entered(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` inside. The command is killed with the thread that starts it."""
        user = [] if self._user is None else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self.pid), *user, "--net", "setpriv", "--pdeathsig", "KILL", *command]

    @property
    def files(self) -> list[str]:
        """Files for `setns` with which a single-threaded process enters the namespace."""
        user = [] if self._user is None else [f"/proc/{self.pid}/ns/user"]
        return [*user, f"/proc/{self.pid}/ns/net"]

    def configure(self, program: str, lines: Sequence[str]) -> None:
        """Run commands of `ip` or `tc` in one batch. Raises Impossible with its message."""
        done = subprocess.run(
            self.entered([program, "-batch", "-"]), input="\n".join(lines), text=True, capture_output=True, check=False
        )
        if done.returncode:
            raise Impossible(f"{program}: {done.stderr.strip()}; the commands were: {'; '.join(lines)}")

    def dropped_packets(self) -> int:
        shown = subprocess.run(self.entered(["tc", "-s", "-j", "qdisc", "show"]), capture_output=True, check=True)
        return sum(queue["drops"] for queue in json.loads(shown.stdout))

    def table(self, name: str) -> str:
        """Read /proc/net/NAME inside the namespace."""
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
    """Return why this machine cannot create hosts with slow links, or `None`."""
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
    """Whether this process has CAP_SYS_ADMIN and CAP_NET_ADMIN."""
    text = Path("/proc/self/status").read_text()
    effective = int(next(line.split()[1] for line in text.splitlines() if line.startswith("CapEff:")), 16)
    return os.geteuid() == 0 and bool(effective & (1 << 21)) and bool(effective & (1 << 12))
