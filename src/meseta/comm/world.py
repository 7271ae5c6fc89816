"""The ranks of a run and the collectives between them, over gloo (CPU tensors) and nccl (GPU tensors)."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# torch imports this on its way to other things. Once there is a group, its default arguments would hold it for ever,
# and the threads of a group that is never freed abort a process that ends, now and then.
import torch.distributed.nn
from torch import Tensor

from meseta.comm.known_collectives import check_known_collective
from meseta.comm.lanes import Lane, RowPriority
from meseta.comm.messages import Peer, PendingExchange, start_exchange
from meseta.comm.recording import NULL_RECORDING, dtype_name, record_transfer, register_lane
from meseta.comm.sum_codec import SumCodec
from meseta.comm.sums import OrderedSum, ordered_sum
from meseta.comm.timeouts import transport_timeout
from meseta.machine.environment_variables import environ
from meseta.machine.processors import batch_scheduled_threads
from meseta.machine.rendezvous import RENDEZVOUS_VARIABLE
from meseta.ops.memory import empty
from meseta.spec import MesetaError, Plan
from meseta.spec.codecs import (
    FP32,
    AllReduceAlgorithm,
    CollectiveKind,
    all_reduce_algorithm,
    all_reduce_traffic_factors,
    traffic_factors,
)
from meseta.telemetry.rank_record import CurrentRankRecord, TransferInfo
from meseta.telemetry.transfers import TransferSpan, TransferTimes

ResultT = TypeVar("ResultT")


@runtime_checkable  # beartype asks for it where the tests check every call
class Work(Protocol):
    """What is under way: a collective of torch.distributed, messages, or what a lane does."""

    def wait(self) -> object:
        """Block until it is done (on a GPU: until the stream may go on)."""


@dataclass(eq=False)
class PendingCollective:
    """A collective in flight. `send` stays referenced until `wait`, since the transport reads it."""

    received: Tensor
    send: Tensor
    work: Work | None
    end_span: Callable[[float, float | None], None] | None = None
    """Ends its span, told since when this rank has waited, and when it was done where that is known."""
    recording: AbstractContextManager[None] = NULL_RECORDING
    """Its place in the record of this rank."""

    def wait(self) -> Tensor:
        """Block until the data is here (on a GPU: until the stream may use it) and return it. Raises MesetaError where
        another rank takes part in another exchange."""
        if self.work is not None:
            start_s = time.perf_counter()
            work, self.work = self.work, None
            with self.recording:
                work.wait()
            if self.end_span is not None:
                self.end_span(start_s, getattr(work, "done_s", None))
        return self.received


@dataclass(frozen=True)
class ExchangeScope:
    """Between whom an exchange takes place, and of what."""

    ranks: Sequence[int] | None = None
    """Those that meet, this one among them: all of them name the same, and nothing goes to others. None: all ranks."""
    tables: Sequence[str] = ()
    """Whose rows travel, for errors."""
    batch_tag: int = 0
    """Tells the batch that it belongs to from others, alike on all ranks; 0 where it belongs to none."""


ALL_RANKS = ExchangeScope()


@dataclass(frozen=True)
class World:
    """This rank among `size` ranks. With one rank every collective returns its input and touches no network."""

    rank: int
    size: int
    device: torch.device
    group: Any = None
    """Process group of torch.distributed; None: the one that `current` began."""
    plan_ranks_per_host: int | None = None
    """Ranks of a host, where a plan says it; None: as they were launched."""
    sum_algorithm: AllReduceAlgorithm = "cross_host"
    """Over which links sums go."""
    transfers: TransferTimes = field(default_factory=TransferTimes, compare=False, repr=False)
    """What this rank has sent."""

    @staticmethod
    def single(device: torch.device | str = "cpu") -> World:
        """One rank alone."""
        return World(rank=0, size=1, device=torch.device(device))

    @staticmethod
    def current(device: torch.device | str = "cpu") -> World:
        """The initialised process group, else that of a `Rendezvous`, else the one that torchrun's variables describe,
        else one rank alone.

        Where torchrun's ranks compute on CPUs, and there are enough for all their threads, each keeps to its share.
        """
        if not dist.is_initialized() and int(environ.get("WORLD_SIZE", "1")) <= 1:
            return World.single(device)
        with batch_scheduled_threads(TRANSPORT_THREAD_NAMES):  # of a group that somebody else has begun, too
            if not dist.is_initialized():
                _init_process_group(device)
        return World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device(device))

    @property
    def ranks_per_host(self) -> int:
        """As a plan says, else as torchrun tells every rank; all of them, where nobody did."""
        if self.plan_ranks_per_host is not None:
            return self.plan_ranks_per_host
        count = int(environ.get("LOCAL_WORLD_SIZE", self.size))
        return count if count > 0 and self.size % count == 0 else self.size

    @property
    def is_one_cpu_host(self) -> bool:
        """Whether nothing leaves a host, and the processors that compute copy what travels in it."""
        return self.device.type == "cpu" and self.ranks_per_host == self.size

    def with_plan(self, plan: Plan) -> World:
        """The same, on the hosts of a plan, with sums over the links that it names."""
        path = all_reduce_algorithm(plan.exchange, plan.dense_exchange, FP32)
        return replace(self.with_ranks_per_host(plan.devices_per_host), sum_algorithm=path)

    def with_ranks_per_host(self, per_host: int | None) -> World:
        """The same, on hosts of so many ranks, as a plan says it; None: as they were launched."""
        return self if per_host is None else replace(self, plan_ranks_per_host=per_host)

    def new_background_world(self) -> World:
        """The same ranks over gloo and on CPUs, for another thread: its collectives never meet those of this one.
        Collective."""
        cpu = torch.device("cpu")
        if self.size == 1:
            return World.single(cpu)
        with batch_scheduled_threads(), self._record_transfer("new group"):
            group = dist.new_group(backend="gloo", timeout=transport_timeout())
        register_lane(group, "background")
        return World(rank=self.rank, size=self.size, device=cpu, group=group)

    @staticmethod
    def destroy_process_group() -> None:
        """End the process group, if there is one; the process may use all its processors again."""
        while _sum_lanes:
            _sum_lanes.popitem()[1].shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()
        while _previous_affinity:
            os.sched_setaffinity(0, _previous_affinity.pop())

    def all_to_all(
        self,
        send: Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        name: str = "",
        *,
        scope: ExchangeScope = ALL_RANKS,
        keep: bool = True,
    ) -> PendingCollective:
        """Begin to send `send_splits[r]` leading entries of `send` [n, ...] to rank r; entries arrive ordered by rank.

        Args:
            send: its shape behind the first dimension, and its type, are those of all ranks.
            send_splits: by rank.
            receive_splits: by rank; what each of them sends to this one.
            name: of the transfer, here and below; see `meseta.spec.transfer`.
            scope: between whom, and of what.
            keep: what comes in leaves its memory for the next step, see `meseta.ops.memory.empty`.
        """
        if self.size == 1:
            return PendingCollective(received=send, send=send, work=None)
        check_known_collective(name)
        received = empty((sum(receive_splits), *send.shape[1:]), send.dtype, send.device, keep=keep)
        send = send.contiguous()
        host = self.rank - self.rank % self.ranks_per_host
        inside = sum(send_splits[host : host + self.ranks_per_host]) - send_splits[self.rank]
        across = sum(send_splits) - send_splits[self.rank] - inside
        entry_bytes = send[:1].nbytes
        ranks = range(self.size) if scope.ranks is None else scope.ranks
        end = self._start_span(name, inside * entry_bytes, across * entry_bytes, len(ranks) - 1)
        kept = self._record_transfer(name, send, "rows", scope, (inside + across) * entry_bytes)
        if send.device.type == "cuda":
            splits = list(receive_splits), list(send_splits)
            work = dist.all_to_all_single(received, send, *splits, self.group, async_op=True)
            return PendingCollective(received=received, send=send, work=work, end_span=end, recording=kept)
        there, here = send.split(list(send_splits)), received.split(list(receive_splits))
        peers = [Peer(r, there[r], here[r]) for r in ranks if r != self.rank]
        messages = start_exchange(
            self.rank,
            peers,
            name,
            batch_tag=scope.batch_tag,
            tables=scope.tables,
            group=self.group,
            row_priority=_row_priority,
        )
        here[self.rank].copy_(there[self.rank])
        return PendingCollective(received=received, send=send, work=messages, end_span=end, recording=kept)

    def start_all_reduce(
        self, tensor: Tensor, name: str = "", coding: SumCodec | None = None, *, in_background: bool = True
    ) -> PendingCollective:
        """Begin to sum over ranks, in place, in one order of additions: see `meseta.comm.sums`. `coding` says how
        numbers cross hosts; unless it goes on `in_background`, whoever waits for it carries it."""
        if self.size == 1:
            return PendingCollective(received=tensor, send=tensor, work=None)
        check_known_collective(name)
        end, buffer = self._start_replicated_span(name, tensor, "sum", coding), tensor.view(-1)
        kept = self._record_transfer(name, tensor, lane="sums")
        work = self._submit_sum(name, lambda sums: sums.all_reduce(buffer), buffer, coding, in_background=in_background)
        return PendingCollective(received=tensor, send=tensor, work=work, end_span=end, recording=kept)

    def reduce_scatter_intra_host(self, total: Tensor, pieces: Tensor, name: str = "") -> None:
        """[m] and [ranks_per_host, m]: the sum over the ranks of this host of the piece of this rank's place; in the
        same order."""
        check_known_collective(name)
        end, start_s = self._start_span(name, (self.ranks_per_host - 1) * total.nbytes, 0.0), time.perf_counter()
        with self._record_transfer(name, total, lane="sums"):
            self._submit_sum(
                name, lambda sums: sums.reduce_scatter_intra_host(total, pieces), total, in_background=False
            ).wait()
        end(start_s, None)

    def start_all_reduce_inter_host(
        self, total: Tensor, name: str = "", coding: SumCodec | None = None
    ) -> PendingCollective:
        """Begin the sum of [m], in place, over the ranks at this place of all hosts; in the same order. It goes on by
        itself."""
        if self.ranks_per_host == self.size:
            return PendingCollective(received=total, send=total, work=None)
        check_known_collective(name)
        way: CollectiveKind = "hosts chain" if self.sum_algorithm == "chain" and coding is None else "hosts sum"
        _, far = traffic_factors(way, self.size, self.ranks_per_host, self.rank // self.ranks_per_host)
        num_bytes = total.nbytes if coding is None else coding.encoded_bytes(coding.num_encoded)
        end, kept = self._start_span(name, 0.0, far * num_bytes), self._record_transfer(name, total, lane="sums")
        work = self._submit_sum(name, lambda sums: sums.all_reduce_inter_host(total), total, coding, in_background=True)
        return PendingCollective(received=total, send=total, work=work, end_span=end, recording=kept)

    def all_reduce(self, tensor: Tensor, name: str = "", coding: SumCodec | None = None) -> Tensor:
        """Sum over ranks, in place, in the same order."""
        return self.start_all_reduce(tensor, name, coding, in_background=False).wait()

    def new_host_group(self) -> Any:
        """The process group of the ranks of this host. Collective."""
        with batch_scheduled_threads(), self._record_transfer("new group"):
            group, _ = dist.new_subgroups(group_size=self.ranks_per_host, timeout=transport_timeout())
        return group

    def _submit_sum(
        self,
        name: str,
        add_up: Callable[[OrderedSum], None],
        buffer: Tensor,
        coding: SumCodec | None = None,
        *,
        in_background: bool,
    ) -> Work:
        """Begin a sum of `buffer` in the lane of sums; on a GPU it is begun in the order of the calls, in their
        stream."""
        on_cpu, known = buffer.device.type == "cpu", set[int]()
        lane = _get_sum_lane(self.group) if on_cpu else Lane("sums", self.group)

        def begin(peers: Sequence[Peer]) -> PendingExchange:
            _row_priority.yield_to_row_exchange()
            return start_exchange(
                self.rank, peers, name, batch_tag=-buffer.numel(), group=lane.group, announced_peers=known
            )

        path = self.sum_algorithm if coding is None else "cross_host"  # what is never encoded goes the same way
        sums = OrderedSum(self.rank, self.size, self.ranks_per_host, path, begin, lane.scratch, coding)
        return lane.submit(lambda: add_up(sums), in_background=in_background and on_cpu)

    def all_reduce_small(self, numbers: Tensor, name: str = "") -> Tensor:
        """The same sum of a few numbers, of which every rank sends all to all others."""
        return self.start_all_reduce_small(numbers, name)()

    def start_all_reduce_small(self, numbers: Tensor, name: str = "") -> Callable[[], Tensor]:
        """Begin it; what is returned waits for it."""
        pending, total = self.start_all_gather(numbers, name), torch.empty_like(numbers)

        def wait() -> Tensor:
            ordered_sum([*pending.wait().view(self.size, *numbers.shape)], total, self.ranks_per_host)
            return total

        return wait

    def all_gather(self, tensor: Tensor, name: str = "") -> Tensor:
        """[size, *shape]: the tensors of all ranks, which have one shape."""
        return self.start_all_gather(tensor, name).wait().view(self.size, *tensor.shape)

    def start_all_gather(self, tensor: Tensor, name: str = "") -> PendingCollective:
        """Begin it: [size, numbers]."""
        mine = tensor.contiguous().view(-1)
        if self.size == 1:
            return PendingCollective(received=mine.unsqueeze(0), send=mine, work=None)
        check_known_collective(name)
        end, gathered = (
            self._start_replicated_span(name, tensor, "gather"),
            tensor.new_empty((self.size, tensor.numel())),
        )
        kept = self._record_transfer(name, tensor)
        work: Work
        if tensor.device.type == "cuda":
            work = dist.all_gather_into_tensor(gathered.view(-1), mine, self.group, async_op=True)
        else:
            peers = [Peer(r, mine, gathered[r]) for r in range(self.size) if r != self.rank]
            work = start_exchange(self.rank, peers, name, group=self.group, row_priority=_row_priority)
            gathered[self.rank] = mine
        return PendingCollective(received=gathered, send=mine, work=work, end_span=end, recording=kept)

    def _start_span(
        self, name: str, intra_host_bytes: float, inter_host_bytes: float, num_peers: int | None = None
    ) -> Callable[[float, float | None], None]:
        """Begin a span of a transfer with so many other ranks, all where None; what is returned ends it."""
        begin_s, transfers = time.perf_counter(), self.transfers
        step, peers = transfers.step, self.size - 1 if num_peers is None else num_peers

        def end(start_s: float, done_s: float | None) -> None:
            done_s = time.perf_counter() if done_s is None else done_s
            waited_s = max(done_s - start_s, 0.0)
            span = TransferSpan(name, step, peers, intra_host_bytes, inter_host_bytes, begin_s, done_s, waited_s)
            transfers.add(span)

        return end

    def _record_transfer(
        self,
        name: str,
        like: Tensor | None = None,
        lane: str = "rows",
        scope: ExchangeScope | None = None,
        sent: float = 0.0,
    ) -> AbstractContextManager[None]:
        """The place of a transfer that begins in the record of this rank; numbers as those of `like`, as many on all
        ranks unless there is a `scope`."""
        if CurrentRankRecord.record is None:
            return NULL_RECORDING
        dtype, numbers = ("", None) if like is None else (dtype_name(like.dtype), like.numel())
        if scope is None:
            about = TransferInfo(name, dtype, numbers, num_peers=self.size - 1)
        else:
            ranks = scope.ranks
            num_peers = (self.size if ranks is None else len(ranks)) - 1
            about = TransferInfo(name, dtype, None, scope.batch_tag, sent, num_peers, scope.tables, ranks)
        return record_transfer(self.group, about, self.transfers.step, lane)

    def _start_replicated_span(
        self, name: str, tensor: Tensor, way: Literal["sum", "gather"], coding: SumCodec | None = None
    ) -> Callable[[float, float | None], None]:
        """The same of what every rank has alike, by the bytes that a plan is predicted to send."""
        per_host, across = self.ranks_per_host, float(tensor.nbytes)
        near, far = traffic_factors(way, self.size, per_host)
        if way == "sum":
            path = self.sum_algorithm if coding is None else "cross_host"
            near, far = all_reduce_traffic_factors(path, self.size, per_host, self.rank // per_host)
        if coding is not None:
            across += coding.encoded_bytes(coding.num_encoded) - coding.num_encoded * tensor.element_size()
        return self._start_span(name, near * tensor.nbytes, far * across)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's values, in place on every other rank."""
        if self.size > 1:
            with self._record_transfer("broadcast", tensor):
                dist.broadcast(tensor, 0, self.group)
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        """One picklable object of each rank, on every rank."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        with self._record_transfer("objects"):
            dist.all_gather_object(gathered, value, self.group)
        return gathered

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            with self._record_transfer("barrier"):
                dist.barrier(self.group)

    def run_on_rank_0(self, action: Callable[[], object]) -> None:
        """Run `action` on rank 0 alone; a MesetaError or OSError there is raised on all ranks. Collective."""
        problem: Exception | None = None
        if self.rank == 0:
            try:
                action()
            except (MesetaError, OSError) as error:
                problem = error
        self.raise_on_all_ranks(problem)

    def broadcast_from_rank_0(self, think: Callable[[], ResultT]) -> ResultT:
        """What `think` returns on rank 0, on every rank; a MesetaError there is raised on all, with its class and its
        attributes, and the system's error on the others as a MesetaError. Collective.

        For what other ranks would find too, and keep rank 0's processor busy meanwhile. The answer is picklable.
        """
        answer: ResultT | None = None
        problem: Exception | None = None
        if self.rank == 0:
            try:
                answer = think()
            except (MesetaError, OSError) as error:
                problem = error
        [(answer, told), *_] = self.all_gather_object((answer, None if problem is None else _as_meseta_error(problem)))
        if told is not None:
            raise told if problem is None else problem
        return cast(ResultT, answer)

    def raise_on_all_ranks(self, error: BaseException | None) -> None:
        """Raise on every rank when any rank met an error, so that none waits for ranks that have stopped.

        The message is the error of the lowest such rank, and names it, if an error that all ranks were told before
        does not name its own; its class and its attributes are kept where it is a MesetaError.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        for rank, problem in enumerate(self.all_gather_object(None if error is None else _as_meseta_error(error))):
            if problem is not None:
                told = problem.with_prefix("" if problem.rank is not None else f"rank {rank}: ")
                told.rank = rank if problem.rank is None else problem.rank
                raise told from error


def _as_meseta_error(error: BaseException) -> MesetaError:
    return error if isinstance(error, MesetaError) else MesetaError(str(error))


TRANSPORT_THREAD_NAMES = ("gloo_tcp_loop", "pt_gloo_runloop")
"""As gloo and torch call those that carry messages: the first reads and writes, and tries for the locks of the others
without sleeping."""
_num_groups = itertools.count()


def _init_process_group(device: torch.device | str) -> None:
    """Begin the process group that the launcher's variables describe."""
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    if backend == "gloo":
        _bind_to_cpu_share()
    # Of a rank of -1 torch says which variables are missing.
    size, rank = int(environ["WORLD_SIZE"]), int(environ.get("RANK", "-1"))
    with record_transfer(None, TransferInfo("join")):
        dist.init_process_group(
            backend, store=_make_store(size), rank=rank, world_size=size, timeout=transport_timeout()
        )


def _make_store(size: int) -> dist.Store | None:
    """Where the ranks of this machine meet; None where torchrun's variables say it."""
    path = environ.get(RENDEZVOUS_VARIABLE)
    if path is None:
        return None
    # The file keeps what former groups of these processes wrote.
    store = dist.PrefixStore(str(next(_num_groups)), dist.FileStore(path, size))
    store.set_timeout(transport_timeout())
    return store


_row_priority = RowPriority()
"""Of this process."""
_sum_lanes: WeakKeyDictionary[Any, Lane] = WeakKeyDictionary()
"""The lane of sums of a process group."""


def _get_sum_lane(group: Any) -> Lane:
    """Made at the first sum. Collective."""
    group = dist.group.WORLD if group is None else group
    if group not in _sum_lanes:
        with batch_scheduled_threads(), record_transfer(group, TransferInfo("new group")):
            _sum_lanes[group] = Lane("sums", dist.new_group(backend="gloo", timeout=transport_timeout()))
    return _sum_lanes[group]


_previous_affinity: list[set[int]] = []
"""What this process might use before it kept to its share."""


def _bind_to_cpu_share() -> None:
    """Bind this process to its part of the processors that the ranks of this machine share.

    A thread of the transport else wakes up beside another rank's computation and waits for its slice to end, some
    milliseconds in every collective.
    """
    num_ranks, rank = (int(environ.get(name, "0")) for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    if not hasattr(os, "sched_setaffinity") or not 0 <= rank < num_ranks:
        return
    processors = sorted(os.sched_getaffinity(0))
    share = len(processors) // num_ranks
    if share >= torch.get_num_threads():
        _previous_affinity.append(set(processors))
        os.sched_setaffinity(0, processors[rank * share : (rank + 1) * share])
