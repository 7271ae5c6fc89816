"""Tests of benchmarks/hosts: rates and counters of links, the end of commands, and cleanup."""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hosts.links import HEADER_BYTES, LinkTraffic, read_traffic
from hosts.namespaces import Namespace

from hosts import Failure, Hosts, Outcome, bits_per_s, why_impossible, write_page

PROGRAM = str(Path(__file__).with_name("link_program.py"))
NUM_BYTES = 4_000_000
NAMESPACES = pytest.mark.skipif(why_impossible() is not None, reason=f"no network namespaces: {why_impossible()}")


def send(hosts: Hosts, num_bytes: int = NUM_BYTES) -> Outcome:
    return hosts.run([sys.executable, "-IS", PROGRAM, str(num_bytes)], limit_s=60)


def _processes() -> list[Path]:
    return list(Path("/proc").glob("[0-9]*"))


def _looked_at(process: Path) -> tuple[str, str]:
    """Return (network namespace, command) of a process, or empty strings if it has ended or belongs to another user."""
    try:
        return os.readlink(process / "ns/net"), (process / "cmdline").read_text()
    except OSError:
        return "", ""


def namespaces() -> set[str]:
    """Return the network namespaces of all processes of this machine."""
    return {namespace for namespace, _ in map(_looked_at, _processes())}


@pytest.mark.parametrize(("rate", "bits"), [("200mbit", 2e8), ("1.5gbit", 1.5e9), ("64kbit", 64e3), ("1000bit", 1e3)])
def test_rates_are_read_as_tc_reads_them(rate: str, bits: float) -> None:
    assert bits_per_s(rate) == bits


@pytest.mark.parametrize("rate", ["", "200", "200mb", "0mbit", "-1mbit", "fast", "1e3mbit"])
def test_other_rates_are_refused(rate: str) -> None:
    with pytest.raises(ValueError, match="a number above 0"):
        Hosts(2, across=rate)


@pytest.mark.parametrize("numbers", [{"num_hosts": 0}, {"num_hosts": 3, "racks": 2}, {"num_hosts": 2, "ranks": 0}])
def test_hosts_that_make_no_network_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="as many hosts in each rack"):
        Hosts(**numbers)


def test_counters_are_those_of_the_link() -> None:
    names = (
        "bytes packets errs drop fifo frame compressed multicast bytes packets errs drop fifo colls carrier compressed"
    )
    loopback, link = [100, 1, *[0] * 6, 100, 1, *[0] * 6], [300, 3, *[0] * 6, 2000, 20, *[0] * 6]
    lines = [f"{name}: {' '.join(map(str, numbers))}" for name, numbers in (("lo", loopback), ("link0", link))]
    devices = "\n".join(("Inter-|   Receive  |  Transmit", f" face |{names}", *lines))
    protocols = "Ip: Forwarding\nIp: 1\nTcp: InSegs RetransSegs OutRsts\nTcp: 5 7 0\n"
    traffic = read_traffic(devices, protocols)
    assert traffic == LinkTraffic(2000, 20, 300, 3, 7)
    assert traffic.payload_bytes == 2000 - 20 * HEADER_BYTES
    assert traffic.since(LinkTraffic(1500, 10, 300, 3, 7)) == LinkTraffic(500, 10, 0, 0, 0)


@NAMESPACES
def test_a_link_limits_its_rate_and_counts_bytes() -> None:
    with Hosts(2, across="100mbit") as hosts:
        outcomes = [send(hosts) for _ in range(3)]
        assert hosts.dropped_packets() == 0
    # On a busy machine TCP sometimes treats a late acknowledgement as a loss.
    outcome = min(outcomes, key=lambda one: sum(link.resent_packets for link in one.traffic))
    assert outcome.outputs[1].split() == ["listens", str(NUM_BYTES)]
    least = 8 * NUM_BYTES / 100e6
    assert least <= float(outcome.outputs[0]) < 3 * least
    sender, receiver = outcome.traffic
    assert sender.payload_bytes == pytest.approx(NUM_BYTES, rel=0.01)
    for sent, received in ((sender.sent_bytes, receiver.received_bytes), (receiver.sent_bytes, sender.received_bytes)):
        assert abs(sent - received) < 1000  # a last packet may be on its way when counters are read
    assert abs(receiver.payload_bytes) < 0.01 * NUM_BYTES  # it acknowledges, and packets that open have shorter headers
    assert sender.resent_packets == receiver.resent_packets == 0
    assert all(a.traffic[0].sent_bytes <= b.traffic[0].sent_bytes for a, b in pairwise(outcome.samples))


@NAMESPACES
def test_dropped_packets_are_counted_and_resent() -> None:
    with Hosts(2, across="100mbit") as hosts:
        hosts._fabric.configure("tc", ["qdisc change dev host1 root tbf rate 100mbit burst 16kb limit 16kb"])
        outcome = send(hosts)
        dropped = hosts.dropped_packets()
    assert outcome.outputs[1].split() == ["listens", str(NUM_BYTES)]
    assert 0 < dropped <= outcome.traffic[0].resent_packets


@NAMESPACES
def test_ranks_of_one_host_use_no_link() -> None:
    with Hosts(1, ranks=2, across="1mbit") as hosts:
        outcome = send(hosts)
    assert float(outcome.outputs[0]) < 8 * NUM_BYTES / 1e6
    assert outcome.traffic[0].sent_bytes < 0.01 * NUM_BYTES


@NAMESPACES
def test_racks_share_their_links() -> None:
    """Ranks 0 and 1, on hosts 0 and 1, are in one rack or in two. Two pairs share the link between racks."""
    seconds = {}
    for racks in (1, 2):
        with Hosts(4 if racks == 1 else 2, across="400mbit", racks=racks, between_racks="50mbit") as hosts:
            seconds[racks] = float(send(hosts).outputs[0])
    assert seconds[2] >= 8 * NUM_BYTES / 50e6 > seconds[1]


@NAMESPACES
def test_a_command_has_the_variables_of_torchrun() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OWN")
    program = f"import os\nprint(*(os.environ[name] for name in {names}))"
    with Hosts(2, ranks=2) as hosts:
        outputs = hosts.run([sys.executable, "-ISc", program], variables={"OWN": "mine"}).outputs
    assert [one.split() for one in outputs] == [
        [str(rank), "4", str(rank % 2), "2", str(rank // 2), "10.77.0.1", "mine"] for rank in range(4)
    ]


@NAMESPACES
def test_a_rank_that_fails_is_named_and_ends_the_others() -> None:
    program = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no such file')\ntime.sleep(600)"
    start = time.monotonic()
    with Hosts(2) as hosts, pytest.raises(Failure, match="rank 1 on host 1 ended with 1: no such file"):
        made = set(hosts.namespaces)
        hosts.run([sys.executable, "-ISc", program])
    assert time.monotonic() - start < 60
    assert len(made) == 3 and not made & namespaces()


@NAMESPACES
def test_a_command_that_does_not_end_is_killed() -> None:
    with Hosts(2) as hosts, pytest.raises(Failure, match=r"rank 0 on host 0 had not ended after 0\.5 s"):
        hosts.run(["sleep", "600"], limit_s=0.5)


HOLDER = """
import sys
from hosts import Hosts
with Hosts(2) as hosts:
    print(*hosts.namespaces, flush=True)
    hosts.run(["sleep", "600"])
"""


@NAMESPACES
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_it_is_stopped(number: int) -> None:
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    made = set(process.stdout.readline().decode().split())
    stop = time.monotonic() + 30
    while _ranks_in(made) < 2 and time.monotonic() < stop:
        time.sleep(0.05)
    assert len(made) == 3 and made < namespaces()
    process.send_signal(number)
    process.wait()
    process.stdout.close()
    while made & namespaces() and time.monotonic() < stop:
        time.sleep(0.05)
    assert not made & namespaces()


def _ranks_in(made: set[str]) -> int:
    """Count the processes of the command in these namespaces."""
    return sum(
        namespace in made and command == "sleep\x00600\x00" for namespace, command in map(_looked_at, _processes())
    )


UNPRIVILEGED = """
import os, sys
from hosts import Hosts
from hosts.namespaces import Namespace, why_impossible
why = why_impossible()
if why is not None:
    sys.exit("no user namespaces: " + why)
with Hosts(2, ranks=2, across="100mbit") as hosts:
    assert os.readlink(f"/proc/{hosts._hosts[0].pid}/ns/user") != os.readlink("/proc/self/ns/user")
    print(*hosts.run(["sh", "-c", "grep -c link0: /proc/net/dev"]).outputs)
"""


@NAMESPACES
def test_no_rights_are_needed_where_there_are_user_namespaces() -> None:
    """Root drops its capabilities first, except the one that Linux requires of root in a user namespace."""
    few = ["setpriv", "--bounding-set", "-all,+setfcap", "--inh-caps", "-all"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*few, sys.executable, "-c", UNPRIVILEGED], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "no user namespaces" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert (done.returncode, done.stdout.split()) == (0, ["1"] * 4), done.stderr


def test_a_namespace_ends_with_its_block() -> None:
    if why_impossible() is not None:
        pytest.skip(str(why_impossible()))
    with Namespace() as namespace:
        link = os.readlink(f"/proc/{namespace.pid}/ns/net")
        assert link in namespaces() and link != os.readlink("/proc/self/ns/net")
    assert link not in namespaces()


@NAMESPACES
def test_the_page_shows_each_link(tmp_path: Path) -> None:
    with Hosts(2, across="100mbit") as hosts:
        outcome = send(hosts)
    write_page(tmp_path / "links.html", "Two hosts", outcome)
    page = (tmp_path / "links.html").read_text()
    assert page.count("<svg") == 2 and "4.00 MB" in page
    assert page.count('class="sent-line"') == page.count('class="received-line"') == 2
