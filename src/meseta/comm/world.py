"""Check that collectives are listed in `meseta.spec.transfer`, from which the planner predicts times."""

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
import torch.distributed.nn
from torch import Tensor

from meseta.comm.messages import (
    NULL_RECORDING,
    Lane,
    Peer,
    PendingExchange,
    RowPriority,
    dtype_name,
    record_transfer,
    register_lane,
    start_exchange,
)
from meseta.comm.sums import OrderedSum, SumCodec, ordered_sum
from meseta.ops.memory import empty
from meseta.ops.step_scalars import StepScalars
from meseta.spec import MesetaError, Plan
from meseta.spec.codecs import (
    FP32,
    AllReduceAlgorithm,
    CollectiveKind,
    all_reduce_algorithm,
    all_reduce_traffic_factors,
    traffic_factors,
)
from meseta.spec.transfer import NON_STEP_TRANSFERS, STEP_TRANSFERS
from meseta.system.environment_variables import environ
from meseta.system.processors import batch_scheduled_threads, bind_to_processors, undo_binding
from meseta.system.ranks import RENDEZVOUS_VARIABLE
from meseta.system.time_limits import transport_timeout
from meseta.telemetry.rank_record import CurrentRankRecord, TransferInfo
from meseta.telemetry.span import TransferSpan, TransferTimes


class UnknownCollectives:
    """Counter of collectives in this process whose names are not listed, such as those of a custom model.

    Predictions of the planner do not include them. Tests set `is_fatal` to raise an error instead.
    """

    count: int = 0
    is_fatal: bool = False


def check_known_collective(name: str) -> None:
    """Count a collective whose name is not listed. Raises MesetaError if `UnknownCollectives.is_fatal` is set."""
    if name not in STEP_TRANSFERS and name not in NON_STEP_TRANSFERS:
        UnknownCollectives.count += 1
        if UnknownCollectives.is_fatal:
            raise MesetaError(
                f"collective {name!r} is not listed in meseta.spec.transfer; add a transfer with this name"
            )


# torch imports this module later anyway. If a group already exists then, the default arguments of the module keep it
# alive for ever, and the threads of a group that is never freed sometimes abort a process that ends.


ResultT = TypeVar("ResultT")


@runtime_checkable  # required by beartype, with which tests check calls
class Work(Protocol):
    """Operation in flight: a collective of torch.distributed, an exchange, or work of a lane."""

    def wait(self) -> object:
        """Block until the operation is complete. On a GPU, only the current stream waits for it."""


@dataclass(eq=False)
class PendingCollective:
    """Collective in flight."""

    received: Tensor
    send: Tensor
    """Sent data. The transport reads it until `wait` returns."""
    work: Work | None
    end_span: Callable[[float, float | None], None] | None = None
    """Ends the timed span, given the start of `wait` and the time of completion if it is known."""
    recording: AbstractContextManager[None] = NULL_RECORDING
    """Context manager that records this rank as waiting for the collective."""

    def wait(self) -> Tensor:
        """Block until the data has arrived, and return it. On a GPU, only the current stream waits for it.

        Raises MesetaError if another rank takes part in another exchange.
        """
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
    """Ranks, tables and batch of an exchange."""

    ranks: Sequence[int] | None = None
    """Ranks that take part, including this rank. Each of them passes the same ranks. `None` means all ranks."""
    tables: Sequence[str] = ()
    batch_tag: int = 0
    """Batch tag, which identifies the batch in flight and is equal on all ranks. 0 if the exchange has no batch."""


ALL_RANKS = ExchangeScope()


@dataclass(frozen=True)
class World:
    """This rank and its collectives with the other ranks. With one rank, collectives return their input without using a
    network."""

    rank: int
    size: int
    device: torch.device
    group: Any = None
    """Process group of torch.distributed. `None` is the default group."""
    plan_ranks_per_host: int | None = None
    """Number of ranks per host according to the plan. `None` means as launched."""
    sum_algorithm: AllReduceAlgorithm = "cross_host"
    """Algorithm of sums without a codec."""
    transfers: TransferTimes = field(default_factory=TransferTimes, compare=False, repr=False)

    @staticmethod
    def single(device: torch.device | str = "cpu") -> World:
        return World(rank=0, size=1, device=torch.device(device))

    @staticmethod
    def current(device: torch.device | str = "cpu") -> World:
        """Return the world of the default process group, which is initialized if necessary.

        The group is initialized from a `Rendezvous`, or else from the environment variables of torchrun. Without them
        the world has one rank. On CPUs with enough processors for the threads of all local ranks, each rank is bound to
        its share of the processors.
        """
        if not dist.is_initialized() and int(environ.get("WORLD_SIZE", "1")) <= 1:
            return World.single(device)
        # A group that the caller initialized has transport threads too.
        with batch_scheduled_threads(TRANSPORT_THREAD_NAMES):
            if not dist.is_initialized():
                _init_process_group(device)
        return World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device(device))

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks per host according to the plan, or else to torchrun. By default all ranks share a host."""
        if self.plan_ranks_per_host is not None:
            return self.plan_ranks_per_host
        count = int(environ.get("LOCAL_WORLD_SIZE", self.size))
        return count if count > 0 and self.size % count == 0 else self.size

    @property
    def is_one_cpu_host(self) -> bool:
        """Whether all ranks are on one host and compute on CPUs, which then also copy the exchanged data."""
        return self.device.type == "cpu" and self.ranks_per_host == self.size

    def with_plan(self, plan: Plan) -> World:
        """Return this world with the hosts and the sum algorithm of a plan."""
        path = all_reduce_algorithm(plan.exchange, plan.dense_exchange, FP32)
        return replace(self.with_ranks_per_host(plan.devices_per_host), sum_algorithm=path)

    def with_ranks_per_host(self, per_host: int | None) -> World:
        """Return this world with `per_host` ranks per host. `None` leaves it unchanged."""
        return self if per_host is None else replace(self, plan_ranks_per_host=per_host)

    def new_background_world(self) -> World:
        """Return a world of the same ranks on CPUs with a new gloo group, for collectives of another thread.
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
        """Destroy the default process group, if there is one, and undo the binding to processors."""
        while _sum_lanes:
            _sum_lanes.popitem()[1].shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()
        undo_binding()

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
        """Start to send `send_splits[r]` consecutive entries of `send` [n, ...] to each rank r.

        Received entries are ordered by rank, `receive_splits[r]` from each. Entries have one shape and dtype on all
        ranks. `name` is a transfer of `meseta.spec.transfer`. With `keep`, the next step may reuse the memory of the
        received data, see `meseta.ops.memory.empty`.
        """
        if self.size == 1:
            return PendingCollective(received=send, send=send, work=None)
        check_known_collective(name)
        received = empty((sum(receive_splits), *send.shape[1:]), send.dtype, send.device, keep=keep)
        send = send.contiguous()
        host = self.rank - self.rank % self.ranks_per_host
        intra_host_entries = sum(send_splits[host : host + self.ranks_per_host]) - send_splits[self.rank]
        inter_host_entries = sum(send_splits) - send_splits[self.rank] - intra_host_entries
        entry_bytes = send[:1].nbytes
        ranks = range(self.size) if scope.ranks is None else scope.ranks
        end = self._start_span(name, intra_host_entries * entry_bytes, inter_host_entries * entry_bytes, len(ranks) - 1)
        recording = self._record_transfer(
            name, send, "rows", scope, (intra_host_entries + inter_host_entries) * entry_bytes
        )
        if send.device.type == "cuda":
            splits = list(receive_splits), list(send_splits)
            work = dist.all_to_all_single(received, send, *splits, self.group, async_op=True)
            return PendingCollective(received=received, send=send, work=work, end_span=end, recording=recording)
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
        return PendingCollective(received=received, send=send, work=messages, end_span=end, recording=recording)

    def start_all_reduce(
        self, tensor: Tensor, name: str = "", coding: SumCodec | None = None, *, in_background: bool = True
    ) -> PendingCollective:
        """Start to sum `tensor` over all ranks in place, in the order of `meseta.comm.sums`.

        `coding` encodes data between hosts. If not `in_background`, the sum runs in the thread that waits.
        """
        if self.size == 1:
            return PendingCollective(received=tensor, send=tensor, work=None)
        check_known_collective(name)
        end, buffer = self._start_replicated_span(name, tensor, "sum", coding), tensor.view(-1)
        recording = self._record_transfer(name, tensor, lane="sums")
        work = self._submit_sum(name, lambda sums: sums.all_reduce(buffer), buffer, coding, in_background=in_background)
        return PendingCollective(received=tensor, send=tensor, work=work, end_span=end, recording=recording)

    def reduce_scatter_intra_host(self, total: Tensor, pieces: Tensor, name: str = "") -> None:
        """Sum row i of `pieces` [ranks_per_host, m] over this host into `total` [m], with i the local index of this
        rank."""
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
        """Start to sum `total` [m] over the cross-host peers in place. The sum runs in the background."""
        if self.ranks_per_host == self.size:
            return PendingCollective(received=total, send=total, work=None)
        check_known_collective(name)
        kind: CollectiveKind = "hosts chain" if self.sum_algorithm == "chain" and coding is None else "hosts sum"
        _, inter_host_factor = traffic_factors(kind, self.size, self.ranks_per_host, self.rank // self.ranks_per_host)
        num_bytes = total.nbytes if coding is None else coding.encoded_bytes(coding.num_encoded)
        end, recording = (
            self._start_span(name, 0.0, inter_host_factor * num_bytes),
            self._record_transfer(name, total, lane="sums"),
        )
        work = self._submit_sum(name, lambda sums: sums.all_reduce_inter_host(total), total, coding, in_background=True)
        return PendingCollective(received=total, send=total, work=work, end_span=end, recording=recording)

    def all_reduce(self, tensor: Tensor, name: str = "", coding: SumCodec | None = None) -> Tensor:
        """Sum `tensor` over all ranks in place, in the order of `meseta.comm.sums`, and return it."""
        return self.start_all_reduce(tensor, name, coding, in_background=False).wait()

    def new_host_group(self) -> Any:
        """Return a process group of the ranks of this host. Collective."""
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
        # A GPU has no lane thread: its sums start in the order of the calls, in their stream.
        on_cpu, announced_peers = buffer.device.type == "cpu", set[int]()
        lane = _get_sum_lane(self.group) if on_cpu else Lane("sums", self.group)

        def begin(peers: Sequence[Peer]) -> PendingExchange:
            _row_priority.yield_to_row_exchange()
            return start_exchange(
                self.rank, peers, name, batch_tag=-buffer.numel(), group=lane.group, announced_peers=announced_peers
            )

        # With a codec, there is one inter-host algorithm. Elements that are never encoded use it too.
        path = self.sum_algorithm if coding is None else "cross_host"
        sums = OrderedSum(self.rank, self.size, self.ranks_per_host, path, begin, lane.scratch, coding)
        return lane.submit(lambda: add_up(sums), in_background=in_background and on_cpu)

    def all_reduce_small(self, numbers: Tensor, name: str = "") -> Tensor:
        """Return the sum of a few numbers over all ranks. Each rank sends its numbers directly to all other ranks."""
        return self.start_all_reduce_small(numbers, name)()

    def start_all_reduce_small(self, numbers: Tensor, name: str = "") -> Callable[[], Tensor]:
        """Start to sum a few numbers over all ranks. Returns a function that waits for the sum."""
        pending, total = self.start_all_gather(numbers, name), torch.empty_like(numbers)

        def wait() -> Tensor:
            ordered_sum([*pending.wait().view(self.size, *numbers.shape)], total, self.ranks_per_host)
            return total

        return wait

    def all_gather(self, tensor: Tensor, name: str = "") -> Tensor:
        """Return the tensors of all ranks [size, *shape], which must have one shape."""
        return self.start_all_gather(tensor, name).wait().view(self.size, *tensor.shape)

    def start_all_gather(self, tensor: Tensor, name: str = "") -> PendingCollective:
        """Start to gather tensors as [size, numel]."""
        flat = tensor.contiguous().view(-1)
        if self.size == 1:
            return PendingCollective(received=flat.unsqueeze(0), send=flat, work=None)
        check_known_collective(name)
        end, gathered = (
            self._start_replicated_span(name, tensor, "gather"),
            tensor.new_empty((self.size, tensor.numel())),
        )
        recording = self._record_transfer(name, tensor)
        work: Work
        if tensor.device.type == "cuda":
            work = dist.all_gather_into_tensor(gathered.view(-1), flat, self.group, async_op=True)
        else:
            peers = [Peer(r, flat, gathered[r]) for r in range(self.size) if r != self.rank]
            work = start_exchange(self.rank, peers, name, group=self.group, row_priority=_row_priority)
            gathered[self.rank] = flat
        return PendingCollective(received=gathered, send=flat, work=work, end_span=end, recording=recording)

    def _start_span(
        self, name: str, intra_host_bytes: float, inter_host_bytes: float, num_peers: int | None = None
    ) -> Callable[[float, float | None], None]:
        """Start a timed span with `num_peers` peers, or all if `None`. Returns a function that ends it."""
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
        """Record the start of a transfer of elements like `like`. Without `scope`, all ranks send the same number."""
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
        per_host, inter_host_bytes = self.ranks_per_host, float(tensor.nbytes)
        intra_host_factor, inter_host_factor = traffic_factors(way, self.size, per_host)
        if way == "sum":
            path = self.sum_algorithm if coding is None else "cross_host"
            intra_host_factor, inter_host_factor = all_reduce_traffic_factors(
                path, self.size, per_host, self.rank // per_host
            )
        if coding is not None:
            inter_host_bytes += coding.encoded_bytes(coding.num_encoded) - coding.num_encoded * tensor.element_size()
        return self._start_span(name, intra_host_factor * tensor.nbytes, inter_host_factor * inter_host_bytes)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Copy the values of rank 0 to all ranks in place."""
        if self.size > 1:
            with self._record_transfer("broadcast", tensor):
                dist.broadcast(tensor, 0, self.group)
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the picklable objects of all ranks, in rank order."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        with self._record_transfer("objects"):
            dist.all_gather_object(gathered, value, self.group)
        return gathered

    def barrier(self) -> None:
        if self.size > 1:
            with self._record_transfer("barrier"):
                dist.barrier(self.group)

    def run_on_rank_0(self, action: Callable[[], object]) -> None:
        """Call `action` on rank 0 only. Its MesetaError or OSError is raised on all ranks. Collective."""
        problem: Exception | None = None
        if self.rank == 0:
            try:
                action()
            except (MesetaError, OSError) as error:
                problem = error
        self.raise_on_all_ranks(problem)

    def broadcast_from_rank_0(self, think: Callable[[], ResultT]) -> ResultT:
        """Return on all ranks the result of calling `think` on rank 0. The result must be picklable. Collective.

        A MesetaError of `think` is raised on all ranks with its class and attributes. An OSError is raised as it is on
        rank 0, and as a MesetaError on the other ranks. Use this method if the other ranks would compute the same
        result and compete with rank 0 for processors.
        """
        answer: ResultT | None = None
        problem: Exception | None = None
        if self.rank == 0:
            try:
                answer = think()
            except (MesetaError, OSError) as error:
                problem = error
        [(answer, remote_error), *_] = self.all_gather_object(
            (answer, None if problem is None else _as_meseta_error(problem))
        )
        if remote_error is not None:
            raise remote_error if problem is None else problem
        return cast(ResultT, answer)

    def raise_on_all_ranks(self, error: BaseException | None) -> None:
        """Raise an error on all ranks if any rank passes one, so that no rank waits for one that failed. Collective.

        The lowest failing rank determines the error, and its message starts with that rank, unless it already names the
        rank that raised it. The class and the attributes of a MesetaError are kept. Other errors become a MesetaError.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        for rank, problem in enumerate(self.all_gather_object(None if error is None else _as_meseta_error(error))):
            if problem is not None:
                named_error = problem.with_prefix("" if problem.rank is not None else f"rank {rank}: ")
                named_error.rank = rank if problem.rank is None else problem.rank
                raise named_error from error


def _as_meseta_error(error: BaseException) -> MesetaError:
    return error if isinstance(error, MesetaError) else MesetaError(str(error))


# The gloo_tcp_loop thread reads and writes, and spins for the locks of the other threads without sleeping.
TRANSPORT_THREAD_NAMES = ("gloo_tcp_loop", "pt_gloo_runloop")
"""Names that gloo and torch give to their transport threads."""
_num_groups = itertools.count()


def _init_process_group(device: torch.device | str) -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    if backend == "gloo":
        _bind_to_cpu_share()
    # Given rank -1, torch reports which variables are missing.
    size, rank = int(environ["WORLD_SIZE"]), int(environ.get("RANK", "-1"))
    with record_transfer(None, TransferInfo("join")):
        dist.init_process_group(
            backend, store=_make_store(size), rank=rank, world_size=size, timeout=transport_timeout()
        )


def _make_store(size: int) -> dist.Store | None:
    """Return the file store of the local ranks, or `None` if torchrun's variables describe a store."""
    path = environ.get(RENDEZVOUS_VARIABLE)
    if path is None:
        return None
    # The file still has the keys of earlier groups of these processes.
    store = dist.PrefixStore(str(next(_num_groups)), dist.FileStore(path, size))
    store.set_timeout(transport_timeout())
    return store


_row_priority = RowPriority()
_sum_lanes: WeakKeyDictionary[Any, Lane] = WeakKeyDictionary()


def _get_sum_lane(group: Any) -> Lane:
    """Return the lane of sums of a group, creating it at the first sum. Collective."""
    group = dist.group.WORLD if group is None else group
    if group not in _sum_lanes:
        with batch_scheduled_threads(), record_transfer(group, TransferInfo("new group")):
            _sum_lanes[group] = Lane("sums", dist.new_group(backend="gloo", timeout=transport_timeout()))
    return _sum_lanes[group]


def _bind_to_cpu_share() -> None:
    # Otherwise a transport thread wakes up on a processor on which another rank computes, and waits for the end of its
    # time slice. This takes some milliseconds in every collective.
    num_ranks, rank = (int(environ.get(name, "0")) for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    if not hasattr(os, "sched_setaffinity") or not 0 <= rank < num_ranks:
        return
    processors = sorted(os.sched_getaffinity(0))
    share = len(processors) // num_ranks
    if share >= torch.get_num_threads():
        bind_to_processors(processors[rank * share : (rank + 1) * share])


@dataclass(frozen=True)
class BatchTotals:
    """Sizes of a global batch, or of the part that one rank has."""

    num_samples: int
    """Number of samples, including padding."""
    num_padding: int
    weight: float
    """Sum of the sample weights."""

    @staticmethod
    def sum_over_ranks(totals: Sequence[BatchTotals], per_host: int) -> BatchTotals:
        """Return the totals of a global batch, given those of each rank. Weights are added by `ordered_sum`."""
        weights = torch.tensor([entry.weight for entry in totals], dtype=torch.float64)
        weight = weights.new_empty(1)
        ordered_sum(list(weights.split(1)), weight, per_host)
        return BatchTotals(sum(t.num_samples for t in totals), sum(t.num_padding for t in totals), weight.item())


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """Slice of a global batch that one rank trains, with all that a layer needs to compute as in one process."""

    world: World
    step: int
    batch_size_per_rank: tuple[int, ...]
    """Number of samples of each rank in the global batch, or in the micro-batch with gradient accumulation."""
    offset: int | None = None
    """Index of the first sample of this rank in the global batch. `None` if the slices of the ranks follow each other
    in rank order."""
    scalars: StepScalars | None = field(default=None, compare=False)
    """Numbers of the step on a GPU, see `BatchContext.scalars`."""

    @property
    def num_samples(self) -> int:
        return sum(self.batch_size_per_rank)

    @property
    def first_sample(self) -> int:
        return sum(self.batch_size_per_rank[: self.world.rank]) if self.offset is None else self.offset

    @property
    def local_share(self) -> float:
        """Share of this rank in the samples of all ranks. It weights a mean over this rank's samples in the global
        mean."""
        # All ranks may be without samples.
        return self.batch_size_per_rank[self.world.rank] / max(self.num_samples, 1)
