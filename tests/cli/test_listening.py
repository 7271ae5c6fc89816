"""Tests that commands on one machine open sockets only on loopback."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli.processes import Command
from small_run import settings, write_config
from source_tree import ROOT

LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the system does not list its sockets")


def listening_inodes() -> dict[str, str]:
    """Return the local address of each listening socket of this machine, by inode."""
    addresses = {}
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == LISTENS:
                # Words of 32 bits, each in the byte order of the processor.
                words, port = fields[1].split(":")
                number = b"".join(int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8))
                address = ipaddress.ip_address(number)
                mapped = getattr(address, "ipv4_mapped", None)
                addresses[fields[9]] = f"{mapped or address} port {int(port, 16)}"
    return addresses


def open_inodes(pid: int) -> set[str]:
    """Return the inodes of a process's sockets. The set is empty if the process has ended."""
    sockets = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed since it was listed
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    sockets.add(target[8:-1])
    return sockets


def listened(commands: Sequence[Command]) -> set[str]:
    """Return every address on which a process of the commands listened until all have succeeded."""
    addresses: set[str] = set()
    while any(command.process.exitcode is None for command in commands):
        processes = {pid for command in commands for pid in (command.pid, *command.members())}
        inodes = {inode for pid in processes for inode in open_inodes(pid)}
        addresses |= {address for inode, address in listening_inodes().items() if inode in inodes}
        time.sleep(0.2)
    for command in commands:
        command.succeed()
    return addresses


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split(maxsplit=1)[0]).is_loopback


def test_ranks_of_one_machine_listen_on_loopback_alone(tiny: Path, tmp_path: Path) -> None:
    plan = {"tables": {"*": "row_wise"}}
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run", train__max_steps=2, plan=plan))
    commands = [
        Command(tmp_path / "1", "sweep", config, "seed=[1]", "--out", tmp_path / "s", "--nproc", 2),  # trains
        Command(tmp_path / "2", "verify", config, "--nproc", 2, "--steps", 1, "--float64"),
        Command(tmp_path / "3", "train", config, f"run_dir={tmp_path / 'read'}", "--readers", 1),
    ]
    addresses = listened(commands)
    # The ranks of each command keep a socket for each other; a dispatcher and a reader listen for trainers.
    assert len(addresses) >= 6
    assert not [address for address in sorted(addresses) if not is_loopback(address)]


@pytest.mark.soak
def test_ranks_that_are_timed_listen_on_loopback_alone(tmp_path: Path) -> None:
    """`benchmarks/bench_e2e.py` starts its ranks as commands do."""
    script = ROOT / "benchmarks" / "bench_e2e.py"
    command = Command(tmp_path, script, "d16_8k", "--layouts", "2x1", "--no-peers", "--quick", program="python")
    addresses = listened([command])
    assert len(addresses) >= 2
    assert not [address for address in sorted(addresses) if not is_loopback(address)]


def test_one_rank_listens_nowhere(tiny: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "one"))
    assert listened([Command(tmp_path / "1", "train", config)]) == set()


def ranks_of(run: str) -> set[int]:
    """Return the processes that torchrun has started as ranks of a run."""
    processes = set()
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if f"TORCHELASTIC_RUN_ID={run}".encode() in environment:
            processes.add(int(entry.name))
    return processes


@pytest.mark.soak
def test_ranks_of_torchrun_listen_on_the_chosen_interface_alone(tiny: Path, tmp_path: Path) -> None:
    """The agent's store, which belongs to torch, listens on all interfaces (docs/clusters.md)."""
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run"))
    run = f"meseta-{os.getpid()}"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    place = ["--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", run, "-m", "meseta.cli.main"]
    command = [sys.executable, *launcher, *place, "train", str(config)]
    chosen = {**os.environ, "GLOO_SOCKET_IFNAME": socket.if_indextoname(1)}
    with subprocess.Popen(command, env=chosen, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as agent:
        addresses: set[str] = set()
        while agent.poll() is None:
            inodes = {inode for pid in ranks_of(run) for inode in open_inodes(pid)}
            addresses |= {address for inode, address in listening_inodes().items() if inode in inodes}
            time.sleep(0.2)
        assert agent.returncode == 0, agent.stderr.read() if agent.stderr else ""
    assert len(addresses) >= 2
    assert not [address for address in sorted(addresses) if not is_loopback(address)]
