"""Messages between two ranks, of which every exchange is made, and what is told before them.

gloo fills a part of the memory without a word where a message is too short, and ends the process where one is too long.
So each rank tells each other one, in the order in which it takes part in exchanges, what it sends and what it expects;
and the number of a message is made of all that both must agree on, so that nothing else is taken for it, nor what is
left of an exchange that ranks did not agree on:

    rank 0    announcement ---------------->    rank 1: checked before a byte is used
              message (number of it) ------>            received where both agree, else never
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from meseta.comm.lanes import Crossing
from meseta.spec import MesetaError
from meseta.spec.transfer import BETWEEN_STEPS, MARKS, OF_STEPS

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
ANNOUNCEMENTS = 0
"""Number of the messages that announce others; theirs are larger."""
_CODES = {name: crc32(name.encode()) for name in (*sorted(OF_STEPS), *sorted(BETWEEN_STEPS))}
_NAMES = {code: repr(name) for name, code in _CODES.items()}


class Announcement(NamedTuple):
    """What one rank sends another in one exchange, and expects from it: 6 numbers of 64 bits."""

    place: int
    """Which one of the two ranks it is, counted from 0."""
    transfer: int
    """Of its name, alike on all ranks."""
    batch: int
    """Tells the batch that it belongs to from others, or below 0 the length of a sum; 0 where it belongs to none."""
    dtype: int
    """Of its numbers: place in DTYPES."""
    sent: int
    """Numbers to that rank."""
    expected: int
    """Numbers from it."""

    @staticmethod
    def of(place: int, name: str, batch: int, dtype: torch.dtype, sent: int, expected: int) -> Announcement:
        """Of a transfer, see `meseta.spec.transfer`."""
        code = _CODES[name] if name in _CODES else crc32(name.encode())
        return Announcement(place, code, batch, DTYPES.index(dtype), sent, expected)

    @property
    def answer(self) -> Announcement:
        """What the other rank says, where both agree."""
        return self._replace(sent=self.expected, expected=self.sent)

    def number(self) -> int:
        """Of the message that this rank sends: others than the one that is expected have others."""
        return max(crc32(b"%d %d %d %d %d" % self[:5]) & 0x7FFFFFFF, ANNOUNCEMENTS + 1)

    def shown(self) -> str:
        """For people."""
        name = _NAMES.get(self.transfer, "an unlisted transfer")
        dtype = str(DTYPES[self.dtype]).removeprefix("torch.") if 0 <= self.dtype < len(DTYPES) else "unknown"
        step, number = divmod(self.batch, MARKS)
        batch = f" of batch {number}" + f" at step {step - 1}" * (step > 0) if self.batch else ""
        if self.batch < 0:
            batch = f" of {-self.batch} numbers"
        return f"{name}{batch} ({self.sent} {dtype} there, {self.expected} back)"


@dataclass(frozen=True)
class Peer:
    """What goes to another rank, and what comes from it."""

    rank: int
    send: Tensor
    receive: Tensor


@dataclass(eq=False)
class Swap:
    """Messages under way, to and from some peers; what they hold stays referenced until they are there."""

    rank: int
    peers: Sequence[Peer]
    """Those that announce something."""
    announced: Sequence[Announcement]
    """What this rank announces to them."""
    tables: Sequence[str]
    told: Tensor
    """[peers, 6]: what they announce."""
    announcements: list[Any]
    """Those that come in."""
    messages: list[Any]
    crossing: Crossing | None
    memory: object
    """What the transport reads and writes."""

    def wait(self) -> None:
        """Block until all is here and may be used. Raises MesetaError where a peer is at another transfer than this
        rank, or at one of another size."""
        with nullcontext() if self.crossing is None else self.crossing.waiting():
            for work in self.announcements:
                work.wait()
            for peer, announced, told in zip(self.peers, self.announced, self.told.tolist(), strict=True):
                if told != [*announced.answer]:
                    abandon(self)
                    raise _astray(self.rank, peer.rank, announced, Announcement(*told), self.tables)
            for work in self.messages:
                work.wait()


def swap(
    rank: int,
    peers: Sequence[Peer],
    name: str,
    *,
    batch: int = 0,
    tables: Sequence[str] = (),
    group: Any = None,
    crossing: Crossing | None = None,
    known: set[int] | None = None,
) -> Swap:
    """Begin to send each peer something, and to receive something from it; all of them name this rank as a peer.

    On GPUs nothing is announced: a rank would stand still for it.

    Args:
        rank: this one.
        peers: the tensors are contiguous and of one type.
        name: of the transfer, see `meseta.spec.transfer`.
        batch: tells the batch that this belongs to from others, or below 0 the length of a sum, alike on all ranks.
        tables: whose rows travel, for the error.
        group: of torch.distributed.
        crossing: is told while this rank waits for it.
        known: peers that have announced an exchange of which all that follow are made, as the pieces of a sum of one
            length are; they announce nothing more. Those of this one are added.
    """
    if peers and peers[0].send.device.type == "cuda":
        operations = [dist.P2POp(dist.isend, p.send, group=group, group_peer=p.rank) for p in peers if p.send.numel()]
        operations += [
            dist.P2POp(dist.irecv, p.receive, group=group, group_peer=p.rank) for p in peers if p.receive.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return Swap(rank, (), (), tables, torch.empty(0), [], works, None, peers)
    group = dist.group.WORLD if group is None else group
    dtype = peers[0].send.dtype if peers else torch.uint8
    places = _places.setdefault(group, Counter())
    unknown, said = list[Peer](), list[Announcement]()
    messages, sends = list[Any](), list[tuple[Tensor, int, int]]()
    for p in peers:
        out = Announcement.of(places[p.rank], name, batch, dtype, p.send.numel(), p.receive.numel())
        places[p.rank] += 1
        if known is None or p.rank not in known:
            unknown.append(p)
            said.append(out)
        if out.expected:
            messages.append(group.recv([p.receive], p.rank, out.answer.number()))
        if out.sent:
            sends.append((p.send, p.rank, out.number()))
    if known is not None:
        known.update(p.rank for p in unknown)
    lines, told = torch.tensor(said), torch.empty(len(said), len(Announcement._fields), dtype=torch.int64)
    announcements = [group.recv([told[i]], p.rank, ANNOUNCEMENTS) for i, p in enumerate(unknown)]
    messages += [group.send([lines[i]], p.rank, ANNOUNCEMENTS) for i, p in enumerate(unknown)]
    messages += [group.send([tensor], peer, number) for tensor, peer, number in sends]
    return Swap(rank, unknown, said, tables, told, announcements, messages, crossing, (peers, lines))


_places: WeakKeyDictionary[Any, Counter[int]] = WeakKeyDictionary()
"""Exchanges with each other rank of a process group so far."""
_abandoned: list[object] = []


def abandon(underway: object) -> None:
    """Keep what nobody waits for any more: the transport still knows its memory."""
    _abandoned.append(underway)


def _astray(rank: int, peer: int, announced: Announcement, told: Announcement, tables: Sequence[str]) -> MesetaError:
    of_tables = f" of tables {', '.join(tables)}" if tables else ""
    return MesetaError(
        f"rank {rank} is at {announced.shown()}{of_tables} with rank {peer}, which is at {told.shown()} with rank "
        f"{rank}; every rank must have the same tables and plan, and take the same batches, and their stages, in the "
        "same order"
    )
