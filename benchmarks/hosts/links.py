"""The links of the hosts: a star of racks, each link shaped in both directions, and what the kernel counts on them.

host 0     host 1          host 2     host 3        link0 in each: address 10.77.0.(host + 1)
 | link0    | link0         | link0    | link0
 | host0    | host1         | host2    | host3      each end lets through `across`, in its direction
[   rack0    ]             [   rack1    ]           bridges
      | rack0up                  | rack1up
      | spine0                   | spine1           each end lets through `between_racks`
[                 spine                 ]           a bridge; only where there are several racks
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "link0"
"""Of a host, towards the others."""
HEADER_BYTES = 14 + 20 + 32
"""Ethernet, IPv4, and TCP with time stamps: what stands before the bytes of a packet."""
QUEUE = "limit 256mb"
"""What may wait at the end of a link. More than all windows of TCP, so that no packet is lost and sent again."""
BURST = "burst 128kb"
"""What may pass at once: a packet of the largest size, and what a fast link lets through between two clock ticks."""
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True)
class LinkTraffic:
    """What the kernel has counted on the link of one host."""

    sent_bytes: int
    """With headers."""
    sent_packets: int
    received_bytes: int
    """With headers."""
    received_packets: int
    resent_packets: int
    """Of TCP, in this host; 0 unless a queue was too short."""

    @property
    def payload_bytes(self) -> int:
        """Sent, without headers. Packets that only open and acknowledge are but headers, to some bytes."""
        return self.sent_bytes - HEADER_BYTES * self.sent_packets

    def since(self, start: LinkTraffic) -> LinkTraffic:
        """What was counted after `start`."""
        return LinkTraffic(
            self.sent_bytes - start.sent_bytes,
            self.sent_packets - start.sent_packets,
            self.received_bytes - start.received_bytes,
            self.received_packets - start.received_packets,
            self.resent_packets - start.resent_packets,
        )


def bits_per_s(rate: str) -> float:
    """Of a rate as `tc` reads it: '200mbit', '1.5gbit'. Raises ValueError for another one."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if parts is None or not float(parts[1]):
        raise ValueError(
            f"a rate is {rate!r}, and must be a number above 0 with kbit, mbit or gbit behind, as '200mbit'"
        )
    return float(parts[1]) * UNITS[parts[2]]


def address(host: int) -> str:
    """Of a host, on the network of all."""
    return f"10.77.{(host + 1) // 256}.{(host + 1) % 256}"


def host_commands(host: int) -> list[str]:
    """`ip`, inside a host."""
    return ["link set lo up", f"address add {address(host)}/16 dev {INTERFACE}", f"link set {INTERFACE} up"]


def fabric_commands(holders: list[int], num_racks: int) -> Iterator[str]:
    """`ip`, inside the namespace of the bridges; `holders` are the processes of the hosts."""
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
    """`tc`: what leaves by this interface leaves at no more than `rate`; 'change' where another was said before."""
    return f"qdisc {how} dev {interface} root tbf rate {rate} {BURST} {QUEUE}"


def own_traffic() -> LinkTraffic:
    """Of the host that this process runs in."""
    return read_traffic(*(Path(f"/proc/self/net/{name}").read_text() for name in ("dev", "snmp")))


def read_traffic(devices: str, protocols: str) -> LinkTraffic:
    """From /proc/net/dev and /proc/net/snmp of a host."""
    counts = next(line for line in devices.splitlines() if line.strip().startswith(f"{INTERFACE}:"))
    numbers = [int(word) for word in counts.split(":")[1].split()]
    names, values = (line.split() for line in protocols.splitlines() if line.startswith("Tcp:"))
    resent = int(values[names.index("RetransSegs")])
    return LinkTraffic(numbers[8], numbers[9], numbers[0], numbers[1], resent)
