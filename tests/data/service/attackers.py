"""A process that calls dispatchers and readers with mutated beats, tickets, filters and addresses."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pyarrow import flight

from data.service.spoiled import spoiled

NOBODY = 65_534
KINDS = ("beat", "ticket", "filter", "address")
BEAT = {"reader": "grpc://127.0.0.1:7077", "buffered_bytes": 0, "max_buffer_bytes": 1, "num_rows": 0, "num_windows": 0,
        "num_redecoded": {}, "busy_s": 0.0, "is_draining": False}  # fmt: skip
ODD_ADDRESSES = (
    "http://x", "file:///etc/passwd", "grpc://", "grpc://x",
    "grpc://127.0.0.1:7077/path", "grpc://a\n127.0.0.1:7077", "\tgrpc://127.0.0.1:7077", "grpc://127.0.0.1:7077\n",
    "grpc://127.0.0.1\x00:7077", "grpc://127.0.0.1\x7f:7077", "grpc://user@127.0.0.1:7077", "grpc://[::1", "grpc://[]:1",
    "grpc://\u202e127.0.0.1:7077", "grpc://١٢٧.0.0.1:7077", "grpc://127.0.0.1:٧٠٧٧", "grpc://" + "a" * 900 + ":1",
    "unix:///tmp/socket", "grpc+unix:///tmp/socket", "grpc://127.0.0.1:0", "grpc://127.0.0.1:65536", "", " ",
)  # fmt: skip
ADDRESSES_ELSEWHERE = ("grpc://10.0.0.1:7077", "grpc://host7:7077", "grpc+tls://127.0.0.1:7077")
"""Valid, and no addresses of readers without keys."""
HEADERS = ("", "Bearer", "Bearer ", "Bearer wrong", "Basic dTpw", "Bearer " + "A" * 43, "Bearer " + "A" * 4000)


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Requests of one process."""

    dispatcher: str
    reader: str
    pids: tuple[int, ...]
    """Processes that answer, whose processor time is measured."""
    beat: dict[str, Any]
    ticket: dict[str, Any]
    """Both valid, to be mutated."""
    num: int
    """Calls of each kind."""
    seed: int
    is_nobody: bool
    """Whether it runs as another user."""
    token: str | None = None


@dataclass
class Outcome:
    """Results of the calls."""

    errors: Counter[str] = field(default_factory=Counter)
    """Number of calls by class of the error, `answered` for none."""
    texts: list[str] = field(default_factory=list)
    """Some of them."""
    max_processor_s: float = 0.0
    """Processor time of the answering processes for one call."""
    costliest: str = ""


def attack(spec: Attack, results: Connection) -> None:
    """Send all calls, and the `Outcome` to `results`."""
    outcome = Outcome()
    if spec.is_nobody:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    clients = {url: flight.connect(url) for url in (spec.dispatcher, spec.reader)}
    draw = random.Random(spec.seed)
    for kind in KINDS:
        for _ in range(spec.num):
            header = f"Bearer {spec.token}" if spec.token else draw.choice(HEADERS)
            options = flight.FlightCallOptions(timeout=60, headers=[(b"authorization", header.encode())])
            content, call = made_call(kind, spec, draw, clients, options)
            before_s = processor_s(spec.pids)
            try:
                call()
                outcome.errors["answered"] += 1
            except Exception as error:
                outcome.errors[type(error).__name__] += 1
                if len(outcome.texts) < 1000:
                    outcome.texts.append(str(error).partition(". Detail:")[0][:2000])
            used_s = processor_s(spec.pids) - before_s
            if used_s > outcome.max_processor_s:
                outcome.max_processor_s, outcome.costliest = used_s, f"{kind} {content[:300]!r}"
    results.send(outcome)


def made_call(
    kind: str,
    spec: Attack,
    draw: random.Random,
    clients: dict[str, flight.FlightClient],
    options: flight.FlightCallOptions,
) -> tuple[bytes, Callable[[], object]]:
    """The content of a call, and the call."""
    dispatcher, reader = clients[spec.dispatcher], clients[spec.reader]
    action = "heartbeat"
    match kind:
        case "beat":
            content = spoiled(draw, copied(spec.beat))
        case "address":
            content = json.dumps(spec.beat | {"reader": mutated_address(draw)}).encode()
        case "filter":
            rows = spec.ticket["session"]["rows"] | {"filter": mutated_filter(draw)}
            content, action = json.dumps({"rows": rows}).encode(), "count"
        case _:
            ticket = copied(spec.ticket)
            large = draw.random() < 0.5
            content = json.dumps(large_numbers(draw, ticket)).encode() if large else spoiled(draw, ticket)
            return content, lambda: list(reader.do_get(flight.Ticket(content), options))
    return content, lambda: list(dispatcher.do_action(flight.Action(action, content), options))


def copied(document: dict[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(document))
    return copy


def large_numbers(draw: random.Random, ticket: dict[str, Any]) -> dict[str, Any]:
    """A valid ticket of many ranks, large batches or small ones."""
    ticket["session"]["num_ranks"] = draw.choice([2, 1000, 1 << 20])
    ticket["session"]["rank"] = draw.randrange(ticket["session"]["num_ranks"])
    ticket["batch_size"] = draw.choice([1, 2, 1 << 20, (1 << 53) - 1])
    ticket["last_batch"] = draw.choice(["keep", "drop", "pad"])
    ticket["session"]["rows"]["window_rows"] = draw.choice([1, 1000, (1 << 53) - 1])
    return ticket


def mutated_address(draw: random.Random) -> str:
    """No address of this machine."""
    if draw.random() < 0.3:
        return draw.choice([*ODD_ADDRESSES, *ADDRESSES_ELSEWHERE])
    text = list("grpc://127.0.0.1:7077")
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(text))
        text[place : place + draw.randrange(2)] = draw.choice("\t\n\r\0\x1b\x7f @/\\:#?%[]٣xﬁ\u2028")
    return "".join(text)


def mutated_filter(draw: random.Random) -> str:
    num = draw.choice([1, 10, 5000, 100_000])
    words = ["d0", "label", "==", "in", "not", "and", "or", "(", ")", "[", "]", ",", "1", "'a'", "`", "'", ";", "1e999"]
    match draw.randrange(5):
        case 0:
            return f"d0 in [{','.join(str(k) for k in range(num))}]"
        case 1:
            return " or ".join(f"d0 == {k}" for k in range(num))
        case 2:
            return draw.choice(["(", "not ", "'", "d0 == ", "d0 in [", "a"]) * num
        case _:
            return " ".join(draw.choice(words) for _ in range(draw.randint(1, 30)))


def processor_s(pids: tuple[int, ...]) -> float:
    """Processor time of processes, in steps of 10 ms; anybody may read it."""
    total = 0.0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total
