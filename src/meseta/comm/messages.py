"""Point-to-point messages, of which exchanges consist, and the announcements that precede them.

Announcements detect ranks that take part in different exchanges, or disagree on sizes, before data is used.
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
# With gloo, a message that is too short fills a part of the buffer without an error, and one that is too long ends the
# process. Each rank therefore announces to each peer the size that it sends and expects. The tag of a message is a hash
# of all that both must agree on. A message of another exchange, or one left over from a failed exchange, does not
# match:
#
#     rank 0    announcement ---------------->    rank 1: checks it before data is used
#               message (tag) --------------->            received only if both agree

ANNOUNCEMENT_TAG = 0
"""Tag of announcements. Other messages have larger tags."""
_TRANSFER_CODES = {name: crc32(name.encode()) for name in (*sorted(STEP_TRANSFERS), *sorted(NON_STEP_TRANSFERS))}
_TRANSFER_NAMES = {code: repr(name) for name, code in _TRANSFER_CODES.items()}


class Announcement(NamedTuple):
    """Description of the messages between two ranks in one exchange, as six int64 values."""

    sequence_number: int
    """Number of earlier exchanges between the two ranks in this process group."""
    transfer_code: int
    """CRC-32 of the transfer's name."""
    batch_tag: int
    """Batch tag, which identifies the batch of the exchange. For a sum, the negative number of elements. Otherwise
    0."""
    dtype_code: int
    """Index of the dtype in `DTYPES`."""
    num_sent: int
    """Number of elements that the sender of the announcement sends."""
    num_expected: int
    """Number of elements that the sender of the announcement expects."""

    @staticmethod
    def from_transfer(place: int, name: str, batch: int, dtype: torch.dtype, sent: int, expected: int) -> Announcement:
        """Create the announcement of a transfer that `meseta.spec.transfer` describes."""
        code = _TRANSFER_CODES[name] if name in _TRANSFER_CODES else crc32(name.encode())
        return Announcement(place, code, batch, DTYPES.index(dtype), sent, expected)

    @property
    def expected_reply(self) -> Announcement:
        """Announcement that the peer sends if it agrees."""
        return self._replace(num_sent=self.num_expected, num_expected=self.num_sent)

    def tag(self) -> int:
        """Return the tag of the message that this rank sends. It is a hash of all fields except `num_expected`."""
        return max(crc32(b"%d %d %d %d %d" % self[:5]) & 0x7FFFFFFF, ANNOUNCEMENT_TAG + 1)

    def describe(self) -> str:
        name = _TRANSFER_NAMES.get(self.transfer_code, "an unlisted transfer")
        dtype = str(DTYPES[self.dtype_code]).removeprefix("torch.") if 0 <= self.dtype_code < len(DTYPES) else "unknown"
        step, number = divmod(self.batch_tag, MAX_TAGS)
        batch = f" of batch {number}" + f" at step {step - 1}" * (step > 0) if self.batch_tag else ""
        if self.batch_tag < 0:
            batch = f" of {-self.batch_tag} numbers"
        return f"{name}{batch} ({self.num_sent} {dtype} there, {self.num_expected} back)"


@dataclass(frozen=True)
class Peer:
    """Data that is sent to a peer, and the buffer for the data that it sends."""

    rank: int
    send: Tensor
    receive: Tensor


@dataclass(eq=False)
class PendingExchange:
    """Exchange in flight between this rank and its peers. Keeps references to its buffers until it is complete."""

    rank: int
    peers: Sequence[Peer]
    """Peers to which this exchange was announced."""
    sent_announcements: Sequence[Announcement]
    tables: Sequence[str]
    received_announcements: Tensor
    """Buffer [peers, 6] for the announcements of the peers."""
    pending_announcements: list[Any]
    pending_messages: list[Any]
    row_priority: RowPriority | None
    buffers: object

    def wait(self) -> None:
        """Block until all data has arrived. Raises MesetaError if a peer announced another transfer or size."""
        with nullcontext() if self.row_priority is None else self.row_priority.row_wait():
            for work in self.pending_announcements:
                work.wait()
            for peer, announced, received in zip(
                self.peers, self.sent_announcements, self.received_announcements.tolist(), strict=True
            ):
                if received != [*announced.expected_reply]:
                    # The transport may still access the buffers of this exchange.
                    retain_until_exit(self)
                    raise _diverged_error(self.rank, peer.rank, announced, Announcement(*received), self.tables)
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
    """Start to exchange data with `peers`, which must start the same exchange with this rank.

    Args:
        rank: This rank.
        peers: Data to send and buffers to fill. The tensors must be contiguous and have one dtype.
        name: Name of the transfer, see `meseta.spec.transfer`.
        batch_tag: Tag of the batch, or for a sum the negative number of elements. It must be equal on all ranks.
        tables: Tables whose rows are exchanged, for error messages.
        group: Process group of torch.distributed. `None` is the default group.
        row_priority: Counter to increment while this rank waits for the exchange.
        announced_peers: Ranks to which an earlier exchange has announced this one too, as for the chunks of a sum. This
            exchange is not announced to them. The other peers are added to the set.
    """
    # On GPUs nothing is announced, because the host would have to wait for the announcements.
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
    new_peers, outgoing = list[Peer](), list[Announcement]()
    messages, sends = list[Any](), list[tuple[Tensor, int, int]]()
    for p in peers:
        out = Announcement.from_transfer(places[p.rank], name, batch_tag, dtype, p.send.numel(), p.receive.numel())
        places[p.rank] += 1
        if announced_peers is None or p.rank not in announced_peers:
            new_peers.append(p)
            outgoing.append(out)
        if out.num_expected:
            messages.append(group.recv([p.receive], p.rank, out.expected_reply.tag()))
        if out.num_sent:
            sends.append((p.send, p.rank, out.tag()))
    if announced_peers is not None:
        announced_peers.update(p.rank for p in new_peers)
    rows, incoming = torch.tensor(outgoing), torch.empty(len(outgoing), len(Announcement._fields), dtype=torch.int64)
    announcements = [group.recv([incoming[i]], p.rank, ANNOUNCEMENT_TAG) for i, p in enumerate(new_peers)]
    messages += [group.send([rows[i]], p.rank, ANNOUNCEMENT_TAG) for i, p in enumerate(new_peers)]
    messages += [group.send([tensor], peer, number) for tensor, peer, number in sends]
    return PendingExchange(
        rank, new_peers, outgoing, tables, incoming, announcements, messages, row_priority, (peers, rows)
    )


_sequence_numbers: WeakKeyDictionary[Any, Counter[int]] = WeakKeyDictionary()
"""Number of exchanges with each peer, by process group."""
_retained: list[object] = []


def retain_until_exit(underway: object) -> None:
    """Keep a reference to an abandoned exchange, because the transport may still access its memory."""
    _retained.append(underway)


def _diverged_error(
    rank: int, peer: int, sent: Announcement, received: Announcement, tables: Sequence[str]
) -> MesetaError:
    tables_text = f" of tables {', '.join(tables)}" if tables else ""
    return MesetaError(
        f"rank {rank} is at {sent.describe()}{tables_text} with rank {peer}, which is at {received.describe()} with "
        f"rank {rank}; use the same tables and plan on all ranks, and run the same batches and stages in the same order"
    )
