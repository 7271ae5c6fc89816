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

from meseta.comm.lanes import RowPriority
from meseta.spec import MesetaError
from meseta.spec.transfer import MAX_TAGS, NON_STEP_TRANSFERS, STEP_TRANSFERS

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
ANNOUNCEMENT_TAG = 0
"""Number of the messages that announce others; theirs are larger."""
_TRANSFER_CODES = {name: crc32(name.encode()) for name in (*sorted(STEP_TRANSFERS), *sorted(NON_STEP_TRANSFERS))}
_TRANSFER_NAMES = {code: repr(name) for name, code in _TRANSFER_CODES.items()}


class Announcement(NamedTuple):
    """What one rank sends another in one exchange, and expects from it: 6 numbers of 64 bits."""

    sequence_number: int
    """Which one of the two ranks it is, counted from 0."""
    transfer_code: int
    """Of its name, alike on all ranks."""
    batch_tag: int
    """Tells the batch that it belongs to from others, or below 0 the length of a sum; 0 where it belongs to none."""
    dtype_code: int
    """Of its numbers: place in DTYPES."""
    num_sent: int
    """Numbers to that rank."""
    num_expected: int
    """Numbers from it."""

    @staticmethod
    def from_transfer(place: int, name: str, batch: int, dtype: torch.dtype, sent: int, expected: int) -> Announcement:
        """Of a transfer, see `meseta.spec.transfer`."""
        code = _TRANSFER_CODES[name] if name in _TRANSFER_CODES else crc32(name.encode())
        return Announcement(place, code, batch, DTYPES.index(dtype), sent, expected)

    @property
    def expected_reply(self) -> Announcement:
        """What the other rank says, where both agree."""
        return self._replace(num_sent=self.num_expected, num_expected=self.num_sent)

    def tag(self) -> int:
        """Of the message that this rank sends: others than the one that is expected have others."""
        return max(crc32(b"%d %d %d %d %d" % self[:5]) & 0x7FFFFFFF, ANNOUNCEMENT_TAG + 1)

    def describe(self) -> str:
        """For people."""
        name = _TRANSFER_NAMES.get(self.transfer_code, "an unlisted transfer")
        dtype = str(DTYPES[self.dtype_code]).removeprefix("torch.") if 0 <= self.dtype_code < len(DTYPES) else "unknown"
        step, number = divmod(self.batch_tag, MAX_TAGS)
        batch = f" of batch {number}" + f" at step {step - 1}" * (step > 0) if self.batch_tag else ""
        if self.batch_tag < 0:
            batch = f" of {-self.batch_tag} numbers"
        return f"{name}{batch} ({self.num_sent} {dtype} there, {self.num_expected} back)"


@dataclass(frozen=True)
class Peer:
    """What goes to another rank, and what comes from it."""

    rank: int
    send: Tensor
    receive: Tensor


@dataclass(eq=False)
class PendingExchange:
    """Messages under way, to and from some peers; what they hold stays referenced until they are there."""

    rank: int
    peers: Sequence[Peer]
    """Those that announce something."""
    sent_announcements: Sequence[Announcement]
    """What this rank announces to them."""
    tables: Sequence[str]
    received_announcements: Tensor
    """[peers, 6]: what they announce."""
    pending_announcements: list[Any]
    """Those that come in."""
    pending_messages: list[Any]
    row_priority: RowPriority | None
    buffers: object
    """What the transport reads and writes."""

    def wait(self) -> None:
        """Block until all is here and may be used. Raises MesetaError where a peer is at another transfer than this
        rank, or at one of another size."""
        with nullcontext() if self.row_priority is None else self.row_priority.row_wait():
            for work in self.pending_announcements:
                work.wait()
            for peer, announced, told in zip(
                self.peers, self.sent_announcements, self.received_announcements.tolist(), strict=True
            ):
                if told != [*announced.expected_reply]:
                    retain_until_exit(self)
                    raise _diverged_error(self.rank, peer.rank, announced, Announcement(*told), self.tables)
            for work in self.pending_messages:
                work.wait()


def start_exchange(
    rank: int,
    peers: Sequence[Peer],
    name: str,
    *,
    batch_tag: int = 0,
    tables: Sequence[str] = (),
    group: Any = None,
    row_priority: RowPriority | None = None,
    announced_peers: set[int] | None = None,
) -> PendingExchange:
    """Begin to send each peer something, and to receive something from it; all of them name this rank as a peer.

    On GPUs nothing is announced: a rank would stand still for it.

    Args:
        rank: this one.
        peers: the tensors are contiguous and of one type.
        name: of the transfer, see `meseta.spec.transfer`.
        batch_tag: tells the batch that this belongs to from others, or below 0 the length of a sum, alike on all ranks.
        tables: whose rows travel, for the error.
        group: of torch.distributed.
        row_priority: is told while this rank waits for it.
        announced_peers: peers that have announced an exchange of which all that follow are made, as the pieces of a sum
            of one length are; they announce nothing more. Those of this one are added.
    """
    if peers and peers[0].send.device.type == "cuda":
        operations = [dist.P2POp(dist.isend, p.send, group=group, group_peer=p.rank) for p in peers if p.send.numel()]
        operations += [
            dist.P2POp(dist.irecv, p.receive, group=group, group_peer=p.rank) for p in peers if p.receive.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return PendingExchange(rank, (), (), tables, torch.empty(0), [], works, None, peers)
    group = dist.group.WORLD if group is None else group
    dtype = peers[0].send.dtype if peers else torch.uint8
    places = _sequence_numbers.setdefault(group, Counter())
    unknown, said = list[Peer](), list[Announcement]()
    messages, sends = list[Any](), list[tuple[Tensor, int, int]]()
    for p in peers:
        out = Announcement.from_transfer(places[p.rank], name, batch_tag, dtype, p.send.numel(), p.receive.numel())
        places[p.rank] += 1
        if announced_peers is None or p.rank not in announced_peers:
            unknown.append(p)
            said.append(out)
        if out.num_expected:
            messages.append(group.recv([p.receive], p.rank, out.expected_reply.tag()))
        if out.num_sent:
            sends.append((p.send, p.rank, out.tag()))
    if announced_peers is not None:
        announced_peers.update(p.rank for p in unknown)
    lines, told = torch.tensor(said), torch.empty(len(said), len(Announcement._fields), dtype=torch.int64)
    announcements = [group.recv([told[i]], p.rank, ANNOUNCEMENT_TAG) for i, p in enumerate(unknown)]
    messages += [group.send([lines[i]], p.rank, ANNOUNCEMENT_TAG) for i, p in enumerate(unknown)]
    messages += [group.send([tensor], peer, number) for tensor, peer, number in sends]
    return PendingExchange(rank, unknown, said, tables, told, announcements, messages, row_priority, (peers, lines))


_sequence_numbers: WeakKeyDictionary[Any, Counter[int]] = WeakKeyDictionary()
"""Exchanges with each other rank of a process group so far."""
_retained: list[object] = []


def retain_until_exit(underway: object) -> None:
    """Keep what nobody waits for any more: the transport still knows its memory."""
    _retained.append(underway)


def _diverged_error(
    rank: int, peer: int, announced: Announcement, told: Announcement, tables: Sequence[str]
) -> MesetaError:
    of_tables = f" of tables {', '.join(tables)}" if tables else ""
    return MesetaError(
        f"rank {rank} is at {announced.describe()}{of_tables} with rank {peer}, which is at {told.describe()} with "
        f"rank "
        f"{rank}; every rank must have the same tables and plan, and take the same batches, and their stages, in the "
        "same order"
    )
