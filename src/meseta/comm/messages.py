"""Queues of collectives that make progress while a rank computes, and give way to urgent collectives.

All ranks submit the same collectives to a lane in the same order.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from meseta.spec import MesetaError
from meseta.spec.transfer import MAX_TAGS, NON_STEP_TRANSFERS, STEP_TRANSFERS

# lane     process group    collectives                                  gives way to
# ------   --------------   ------------------------------------------   -----------------------------------------
# rows     the run's        ids, rows and their gradients, in the        -
#                           calling thread
# sums     its own          all-reduce of data that all ranks have, in   row exchanges that this rank waits for,
#                           chunks, in a background thread               before each chunk

JOIN_TIMEOUT_S = 5.0
"""Seconds to wait for the thread of a lane at shutdown."""
YIELD_TIMEOUT_S = 0.5
"""Maximum seconds for which a chunk gives way. The limit prevents deadlocks between ranks that take turns in
waiting."""


class RowPriority:
    """Counter of the row exchanges that this rank waits for, to which sums give way. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_waiting = 0

    @contextmanager
    def row_wait(self) -> Iterator[None]:
        """Context manager to enter while this rank waits for a row exchange."""
        with self._changed:
            self._num_waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_waiting -= 1
                self._changed.notify_all()

    def yield_to_row_exchange(self) -> None:
        """Block until this rank waits for no row exchange, at most `YIELD_TIMEOUT_S` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_waiting, YIELD_TIMEOUT_S)


class LaneWork:
    """Result of `Lane.submit`."""

    def __init__(self, lane: Lane, function: Callable[[], None]) -> None:
        self.done_s: float | None = None
        """Time at which the work finished, by `time.perf_counter`. `None` until then."""
        self._lane, self._function = lane, function
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Block until the work is done, and raise its error. Runs the queued work of the lane in this thread."""
        while self.done_s is None:
            self._lane.advance(self)
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error
            # After an error, the transport may still write to the scratch memory.
            self._lane.discard_scratch()
        # Release the buffers that the function refers to, so that only the caller holds them.
        del self._function
        self.done_s = time.perf_counter()


class Lane:
    """Thread-safe queue of collectives in one process group. They run one at a time, in the order of submission."""

    def __init__(self, name: str, group: Any) -> None:
        self.name, self.group = name, group
        self._queue: deque[LaneWork] = deque()
        """Work that has not started. Any thread may run the first entry if the lane is idle."""
        self._changed = threading.Condition()
        self._is_busy = False
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        """True to run the next entry in the lane's thread, False to stop the thread."""
        self._thread: threading.Thread | None = None
        self._scratch: Tensor | None = None

    def scratch(self, count: int, like: Tensor) -> Tensor:
        """Return memory for `count` received elements with the dtype and device of `like`.

        On CPUs, the next call returns the same memory.
        """
        # Memory is reused because touching fresh pages takes as long as a sum.
        if like.device.type != "cpu":
            return like.new_empty(count)
        num_bytes = count * like.element_size()
        if self._scratch is None or self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes].view(like.dtype)

    def submit(self, function: Callable[[], None], *, in_background: bool = True) -> LaneWork:
        """Queue `function`. It runs in the thread of this lane, or in the first thread that waits for the result."""
        work = LaneWork(self, function)
        self._queue.append(work)
        if in_background:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"meseta-{self.name}", daemon=True)
                self._thread.start()
            self._wakeups.put(True)
        return work

    def advance(self, awaited: LaneWork | None = None) -> None:
        """Run the next entry of the queue in this thread, as soon as the lane is idle.

        Returns when `awaited` is done, even if later entries are running.
        """
        # Other ranks may wait for this rank while a later entry runs.
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy or (awaited is not None and awaited.done_s is not None))
            if self._is_busy or not self._queue or (awaited is not None and awaited.done_s is not None):
                return
            work, self._is_busy = self._queue.popleft(), True
        try:
            work.run()
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def discard_scratch(self) -> None:
        self._scratch = None

    def shutdown(self) -> None:
        """Stop the thread of this lane. If it waits for ranks that do not respond, it is abandoned."""
        if self._thread is not None:
            self._wakeups.put(False)
            self._thread.join(JOIN_TIMEOUT_S)
            self._thread = None

    def _serve(self) -> None:
        while self._wakeups.get():
            self.advance()


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
        """Return the tag of this rank's message, a hash of all fields except `num_expected`."""
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

    The tensors of `peers` must be contiguous and have one dtype. `name` is a transfer of `meseta.spec.transfer`.
    `batch_tag` is the tag of the batch, or for a sum the negative number of elements, equal on all ranks. `tables` are
    named in error messages. `group` is a process group of torch.distributed, by default the default group.
    `row_priority` is incremented while this rank waits.

    Ranks in `announced_peers` know this exchange from an earlier announcement, as for the chunks of a sum. It is
    announced to the other peers, which are added to the set.
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
