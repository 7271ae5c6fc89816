"""Links of the hosts: a star of racks, each link limited in both directions, with kernel counters.

host 0     host 1          host 2     host 3        link0 in each: address 10.77.0.(host + 1)
 | link0    | link0         | link0    | link0
 | host0    | host1         | host2    | host3      each end is limited to `across`
[   rack0    ]             [   rack1    ]           bridges
      | rack0up                  | rack1up
      | spine0                   | spine1           each end is limited to `between_racks`
[                 spine                 ]           a bridge, only with several racks
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "link0"
HEADER_BYTES = 14 + 20 + 32
"""Bytes of Ethernet, IPv4 and TCP headers with time stamps."""
QUEUE = "limit 256mb"
"""Queue at the end of a link. It is larger than all TCP windows, so that no packet is lost."""
BURST = "burst 128kb"
"""Bytes that may pass immediately: a packet of maximum size, or the rate between two clock ticks."""
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True)
class LinkTraffic:
    """Kernel counters of the link of one host."""

    sent_bytes: int
    """Bytes with headers."""
    sent_packets: int
    received_bytes: int
    """Bytes with headers."""
    received_packets: int
    resent_packets: int
    """TCP packets that this host sent again. 0 unless a queue was too short."""

    @property
    def payload_bytes(self) -> int:
        """Bytes sent without headers."""
        return self.sent_bytes - HEADER_BYTES * self.sent_packets

    def since(self, start: LinkTraffic) -> LinkTraffic:
        return LinkTraffic(
            self.sent_bytes - start.sent_bytes,
            self.sent_packets - start.sent_packets,
            self.received_bytes - start.received_bytes,
            self.received_packets - start.received_packets,
            self.resent_packets - start.resent_packets,
        )


def bits_per_s(rate: str) -> float:
    """Parse a rate such as '200mbit' or '1.5gbit'. Raises ValueError if it is invalid."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if parts is None or not float(parts[1]):
        raise ValueError(
            f"a rate is {rate!r}, and must be a number above 0 with kbit, mbit or gbit behind, as '200mbit'"
        )
    return float(parts[1]) * UNITS[parts[2]]


def address(host: int) -> str:
    return f"10.77.{(host + 1) // 256}.{(host + 1) % 256}"


def host_commands(host: int) -> list[str]:
    """Return commands of `ip` inside a host."""
    return ["link set lo up", f"address add {address(host)}/16 dev {INTERFACE}", f"link set {INTERFACE} up"]


def fabric_commands(holders: list[int], num_racks: int) -> Iterator[str]:
    """Return commands of `ip` in the namespace of the bridges. `holders` are the processes of the hosts."""
    for rack in range(num_racks):
        yield f"link add name rack{rack} type bridge"
        yield f"link set rack{rack} up"
    for host, holder in enumerate(holders):
        yield f"link add name host{host} type veth peer name {INTERFACE} netns {holder}"
        yield f"link set host{host} master rack{host * num_racks // len(holders)} up"
    if num_racks > 1:
        yield "link add name spine type bridge"
        yield "link set spine up"
        for rack in range(num_racks):
            yield f"link add name rack{rack}up type veth peer name spine{rack}"
            yield f"link set rack{rack}up master rack{rack} up"
            yield f"link set spine{rack} master spine up"


def shaped(interface: str, rate: str, how: str = "add") -> str:
    """Return the command of `tc` that limits the rate of outgoing traffic."""
    return f"qdisc {how} dev {interface} root tbf rate {rate} {BURST} {QUEUE}"


def own_traffic() -> LinkTraffic:
    """Return the traffic of the host of this process."""
    return read_traffic(*(Path(f"/proc/self/net/{name}").read_text() for name in ("dev", "snmp")))


def read_traffic(devices: str, protocols: str) -> LinkTraffic:
    """Parse /proc/net/dev and /proc/net/snmp."""
    counts = next(line for line in devices.splitlines() if line.strip().startswith(f"{INTERFACE}:"))
    numbers = [int(word) for word in counts.split(":")[1].split()]
    names, values = (line.split() for line in protocols.splitlines() if line.startswith("Tcp:"))
    resent = int(values[names.index("RetransSegs")])
    return LinkTraffic(numbers[8], numbers[9], numbers[0], numbers[1], resent)
