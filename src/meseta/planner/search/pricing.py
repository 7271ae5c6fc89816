"""Seconds and bytes of pieces and replicas that any assignment adds up: what `predict` says of a whole plan, per piece.

All but three parts of `predict` are sums over the pieces of a rank, so that the cost of an assignment follows from its
pieces. The three: the rows that a cache keeps, which all pieces of a rank share, and the bytes that a rank holds are
taken as of an average rank; and the pieces of a host are taken to lie evenly on its ranks where those hand on what is
the host's. Beside its seconds a piece has what it takes at least, wherever its rank and its host have the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meseta.planner.cost.exchange import (
    NOT_CUT,
    OF_REPLICAS,
    PAIRS,
    bytes_of,
    call_seconds,
    chain_share,
    codec_seconds,
    links,
    pair_bytes,
    peers_of,
)
from meseta.planner.cost.loads import Loads, Pieces, WorkloadLoads
from meseta.planner.cost.memory import SORT_BYTES, RunBytes, fixed_bytes, gradient_bytes, received_bytes
from meseta.planner.cost.operators import operator_seconds
from meseta.planner.cost.placement import Placement
from meseta.planner.cost.predict import replica_seconds
from meseta.planner.search.assignment import Floats, Ints
from meseta.spec import CostModel, Topology
from meseta.spec.codecs import DensePath, Exchange, SumPath, Way, alike_shares
from meseta.spec.tiers import memory_shares
from meseta.spec.transfer import ROW_STATISTICS, Each, Part, Transfer, step_transfers

COMPONENTS = ("compute", "ids", "answers", "partial bags", "summed bags", "row statistics")
"""What every rank does in step with the others; the slowest ends it. With two levels 'answers' are the ids that cross
hosts, since all bags and rows are of the two behind it."""
USES = ("partial bags", "row statistics", "replicas", "owners", "answers")
"""What takes place only where some table needs it: collectives, calls, and bytes between hosts in those that all steps
have."""
NUM_AVOIDABLE = 3
"""The first of USES, without which a search tries to do."""


Ways = tuple[Exchange | None, DensePath | None]
"""Which way rows, and sums, take between hosts; None: where nobody chooses, see `meseta.spec.Plan`."""


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """How the table of each piece is cut, [n] each."""

    host_parts: Ints
    """Row ranges in the piece's host, of schemes that sum bags there; else 0."""
    column_parts: Ints
    """Ranges of columns."""
    host_columns: Ints | Floats
    """Pieces of the piece's host that hold columns of the same rows."""
    row_parts: Ints
    """Ranges of rows that lie on one rank."""
    most_parts: Ints | None = None
    """Row ranges that the piece's host may have at most; None: it has `host_parts`."""
    most_columns: Ints | None = None
    """The same of `host_columns`."""
    together: Ints | int = 1
    """Pieces of the table that are sure to lie in one host, this one among them."""

    def least_share(self, each: Each) -> Floats | float:
        """What a piece has at least of the host's, over what `host_parts` and `host_columns` say."""
        if each.startswith("host ") and self.most_columns is not None:
            return np.asarray(self.host_columns, np.float64) / self.most_columns
        if each == "whole bag number" and self.most_parts is not None:
            return np.asarray(self.host_parts, np.float64) / np.maximum(self.most_parts, 1)
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Priced:
    """Of n pieces."""

    seconds: Floats
    """[n, K]: of the rank that holds the piece."""
    least_s: Floats
    """[n, 2]: at least, were the piece alone on its rank: what all ranks together have more to do, and the rank that
    holds it."""
    common_seconds: Floats
    """[n, K]: of every rank."""
    rank_bytes: Ints
    """[n]: of the device."""
    host_bytes: Ints
    """[n, 2]: of DRAM and disk of the host."""
    common_bytes: Ints
    """[n]: of every device."""


class Prices:
    """Prices of one workload on one set of machines."""

    def __init__(
        self,
        loads: WorkloadLoads,
        topology: Topology,
        cost_model: CostModel,
        held_samples: float | None = None,
        run: RunBytes | None = None,
        ways: Ways = (None, None),
    ) -> None:
        """`held_samples`: for how many a cache keeps rows; None: as on a rank with an equal part of all tables. `run`:
        what a run adds to the memory of its plan. `ways`: which way rows and sums take between hosts."""
        self.ways = ways
        self.loads, self.topology, self.cost_model, self.run = loads, topology, cost_model, run or RunBytes()
        whole = loads.whole()
        owners, cache_bytes = np.zeros(len(whole.table), np.int64), cost_model.cache.cache_bytes * topology.num_ranks
        self._held = loads.held_samples(whole, owners, 1, cache_bytes)[0] if held_samples is None else held_samples
        self._rank_bytes = loads.stored_bytes(whole).sum() / topology.num_ranks
        ranks, per_host = topology.num_ranks, topology.devices_per_host
        self.transfers = step_transfers(loads.workload, None, ranks, per_host, *ways)
        """All that a plan may need."""
        self.is_two_level = ways[0] == "two_level" and 1 < per_host < ranks
        inside, across = links(cost_model, topology, False)
        self._copy_s = cost_model.exchange.copy_byte_s
        self._owner_s = max((per_host - 1) / inside.bytes_per_s, (ranks - per_host) / across.bytes_per_s) / ranks
        self._inside_s, self._across_s = 1.0 / inside.bytes_per_s, 1.0 / across.bytes_per_s

    def pieces(self, pieces: Pieces, cuts: Cuts) -> Priced:
        """Price pieces that lie on one rank each."""
        loads, model, ranks = self.loads, self.cost_model, self.topology.num_ranks
        share, per_host = model.tiers.cached_share, self.topology.devices_per_host
        cache_bytes, n = model.cache.cache_bytes, len(pieces.table)
        held = self._held
        alone = loads.held_samples(pieces, np.arange(n), n, cache_bytes) if n else np.zeros(0)
        load = loads.loads(pieces, held_samples=held, rank_bytes=self._rank_bytes, cached_share=share, num_ranks=ranks)
        compute = sum(operator_seconds(model, load, per_host))
        least = loads.loads(
            pieces, held_samples=np.maximum(alone, held), rank_bytes=loads.stored_bytes(pieces), cached_share=share
        )
        least_s = sum(operator_seconds(model, least, per_host))
        own, common = (np.zeros((n, len(COMPONENTS))) for _ in range(2))
        saved_s, shared_s = self._exchange(load, cuts, own, common)
        own[:, 0] = compute
        least_s = np.minimum(least_s, compute) + own[:, 1:].sum(axis=1) - saved_s
        wire, answered = received_bytes(self.transfers, load, cuts, ranks)
        device, host, disk = np.array(memory_shares(share))[:, pieces.tier]
        buffers = SORT_BYTES * load.ids
        if ranks > 1:
            buffers = buffers + 2 * wire + 8 * load.lengths + answered
        common_bytes = (wire + answered) / ranks
        return Priced(
            seconds=own,
            least_s=np.stack([least_s, least_s - shared_s], axis=1),
            common_seconds=common,
            rank_bytes=_whole(device * load.stored_bytes + buffers),
            host_bytes=np.stack([_whole(host * load.stored_bytes), _whole(disk * load.stored_bytes)], axis=1),
            common_bytes=_whole(common_bytes),
        )

    def _exchange(self, load: Loads, cuts: Cuts, own: Floats, common: Floats) -> tuple[Floats, Floats]:
        """Add the seconds of the transfers: their bytes, at what a byte takes on its way. Returns [n] and [n]: what of
        them may be less, and what other ranks of the host may take on."""
        rows_are_cut, ranks, per_host = cuts.row_parts > 1, self.topology.num_ranks, self.topology.devices_per_host
        saved_s, shared_s, cost = np.zeros(len(load.ids)), np.zeros(len(load.ids)), self.cost_model.exchange
        for transfer in self.transfers:
            for part in transfer.parts:
                if part.way in _COMPONENT and part.each not in PAIRS:
                    num_bytes = bytes_of(part, load, cuts, ranks)
                    component = self._component(transfer, part.way)
                    owner_s, common_s = self._byte_s(part.way)
                    holder_s, askers_s = codec_seconds(part, transfer.to_owners, cost, self.topology.num_hosts)
                    own[:, component] += num_bytes * (owner_s + holder_s)
                    common[:, component] += num_bytes * (common_s + askers_s / ranks)
                    if part.way == "hosts":
                        least = num_bytes * (owner_s + holder_s) * cuts.least_share(part.each)
                        saved_s += num_bytes * (owner_s + holder_s) - least
                        shared_s += least * (1.0 - cuts.together / per_host)
                    elif part.way == "host":  # what the rank itself asks for is less where it holds more
                        shared_s += num_bytes * self._copy_s * leaving_share("host", ranks, per_host)
            if transfer.name == "ids":
                common[:, 1] += cost.bucket_id_s * load.ids * rows_are_cut / ranks
        return saved_s, shared_s

    def _component(self, transfer: Transfer, way: Way) -> int:
        if transfer.stage != "input_dist":
            return _COMPONENT[way]
        return COMPONENTS.index("answers" if self.is_two_level and way == "hosts" else "ids")

    def _byte_s(self, way: Way) -> tuple[float, float]:
        """Seconds of a byte on its way: of the rank that has the piece, and of every rank."""
        copy_s, ranks, per_host = self._copy_s, self.topology.num_ranks, self.topology.devices_per_host
        if way == "owners":
            return self._owner_s + copy_s * (ranks - 2) / ranks, copy_s / ranks
        if way == "hosts":
            hosts = self.topology.num_hosts
            return (self._across_s * (hosts - 1) + copy_s * (hosts - 2)) / hosts, copy_s / ranks
        link_s = self._inside_s if way == "host" or self.topology.num_hosts == 1 else self._across_s
        return (link_s + 2.0 * copy_s) * leaving_share(way, ranks, per_host), 0.0

    def sent_bytes(self, pieces: Pieces, cuts: Cuts, replicas: Pieces) -> dict[str, float]:
        """By transfer of tables: what all ranks together send to others for these pieces, as it is priced."""
        found: dict[str, float] = {}
        ranks, per_host = self.topology.num_ranks, self.topology.devices_per_host
        own, everywhere = self.loads.loads(pieces, num_ranks=ranks), self.loads.loads(replicas)
        for transfer in self.transfers:
            for part in transfer.parts if transfer.is_of_tables else ():
                if part.each in PAIRS:
                    num_bytes = ranks * pair_bytes(part, ranks, per_host)
                else:
                    is_replica = part.each in OF_REPLICAS
                    load, cut = (everywhere, NOT_CUT) if is_replica else (own, cuts)
                    num_bytes = float(bytes_of(part, load, cut, ranks).sum())
                share = leaving_share(part.way, ranks, per_host)
                found[transfer.name] = found.get(transfer.name, 0.0) + share * num_bytes
        return found

    def replicas(self, pieces: Pieces) -> Priced:
        """Price pieces that every rank holds; all of it is common."""
        model, topology, ranks = self.cost_model, self.topology, self.topology.num_ranks
        n, nothing = len(pieces.table), np.zeros(0, np.int64)
        empty = Pieces(*[nothing] * 6)
        placement = Placement(
            empty, nothing, nothing, nothing, nothing, nothing, pieces, ranks, topology.devices_per_host
        )
        common = np.zeros((n, len(COMPONENTS)))
        common[:, 0] = sum(replica_seconds(self.loads, placement, model, topology))
        load = self.loads.loads(pieces)
        gradients = gradient_bytes(self.transfers, load)
        for transfer in self.transfers:
            if transfer.name == "replicas":
                amounts = [bytes_of(part, load, NOT_CUT, ranks) for part in transfer.parts]
                common[:, 5] = self._alike_seconds(transfer, amounts)
        return Priced(
            seconds=np.zeros((n, len(COMPONENTS))),
            least_s=np.zeros((n, 2)),
            common_seconds=common,
            rank_bytes=np.zeros(n, np.int64),
            host_bytes=np.zeros((n, 2), np.int64),
            common_bytes=_whole(load.stored_bytes + gradients + SORT_BYTES * load.ids / ranks),
        )

    def fixed_seconds(self) -> float:
        """Of what every plan sends: the least latencies of the transfers of tables that it cannot do without, their
        headers, and the transfers of the dense part."""
        total = 0.0
        for transfer in self.transfers:
            if not transfer.is_of_tables:
                total += self._call_s(transfer, is_far=transfer.parts[0].way not in ("host gather", "host scatter"))
                total += float(
                    self._alike_seconds(transfer, [np.array(float(part.num_bytes)) for part in transfer.parts])
                )
            elif self._is_always(transfer):
                headers = [part for part in transfer.parts if part.each in PAIRS]
                total += self._call_s(transfer, is_far=True) if headers else self._least_call_s(transfer)
                total += sum(self._header_seconds(part) for part in headers)
        return total

    def _call_s(self, transfer: Transfer, *, is_far: bool) -> float:
        """Latencies of a transfer, and what its peers take; `is_far`: where ranks of other hosts are among those."""
        topology, per_host = self.topology, self.topology.devices_per_host
        call = _Call(transfer.path, peers_of(transfer, topology.num_ranks, per_host))
        both = links(self.cost_model, topology, transfer.is_sum)
        return transfer.times * call_seconds(call, both, topology, is_far and call.peers[1] > 0)

    def _least_call_s(self, transfer: Transfer) -> float:
        """The same, whether anything crosses hosts or not."""
        return min(self._call_s(transfer, is_far=True), self._call_s(transfer, is_far=False))

    def _is_always(self, transfer: Transfer) -> bool:
        """Whether every step has a transfer of tables, wherever they lie."""
        if self.is_two_level:
            return transfer.name not in ("replicas", "row statistics")
        return any(part.way == "owners" for part in transfer.parts)

    def _header_seconds(self, part: Part) -> float:
        """Of what travels whatever pieces there are."""
        ranks = self.topology.num_ranks
        owner_s, common_s = self._byte_s(part.way)
        return pair_bytes(part, ranks, self.topology.devices_per_host) * (owner_s + ranks * common_s)

    def _alike_seconds(self, transfer: Transfer, amounts: Sequence[Floats]) -> Floats:
        """Of the bytes of each part that every rank has alike, without latencies."""
        ranks, per_host, hosts = self.topology.num_ranks, self.topology.devices_per_host, self.topology.num_hosts
        inside, across = links(self.cost_model, self.topology, transfer.is_sum)
        near = far = codec_s = np.zeros(())
        for part, num_bytes in zip(transfer.parts, amounts, strict=True):
            shares = alike_shares(part.way, ranks, per_host, min(1, hosts - 1))
            near, far = near + shares[0] * num_bytes, far + shares[1] * num_bytes
            codec_s = codec_s + num_bytes * codec_seconds(part, True, self.cost_model.exchange, hosts)[0]
        near_s, far_s = near / inside.bytes_per_s, far / across.bytes_per_s
        if transfer.path == "chain":
            far_s = far_s * chain_share(hosts)
        spent = near_s + far_s if transfer.path in ("twins", "chain") else np.maximum(near_s, far_s)
        total: Floats = np.asarray(spent + 2 * (near + far) * self._copy_s + codec_s)
        return total

    def uses(self, cuts: Cuts, pieces: Pieces) -> Ints:
        """[n, len(USES)]: 1 where a piece needs the collective."""
        known = np.array([ROW_STATISTICS.get(name, (0, 0))[0] for name in self.loads.optimizers], np.int64)
        statistics = (cuts.column_parts > 1) & (known[self.loads.optimizer[pieces.table]] > 0)
        read = self.loads.num_features[pieces.table] > 0
        none = np.zeros_like(statistics)
        partial = none if self.is_two_level else cuts.host_parts > 0
        return np.stack([partial, statistics, none, read, read & ~partial], axis=1).astype(np.int64)

    def use_seconds(self) -> Floats:
        """[len(USES)]: of these collectives forwards and backwards, and of calls."""
        calls = self.cost_model.lookup.call_s + self.cost_model.update.call_s
        if self.topology.num_ranks == 1:
            return np.array([0.0, 0.0, 0.0, calls, 0.0])
        seconds = dict.fromkeys(USES, 0.0)
        seconds["owners"] = calls
        seconds["replicas"] = 2 * self.cost_model.update.call_s + self.cost_model.lookup.call_s
        for transfer in self.transfers:
            if transfer.name in ("row statistics", "replicas"):
                seconds[transfer.name] += self._call_s(transfer, is_far=True)
            elif transfer.is_of_tables and not self._is_always(transfer):
                seconds["partial bags"] += self._call_s(transfer, is_far=True)
            elif transfer.is_of_tables and not any(part.each in PAIRS for part in transfer.parts):
                seconds["owners" if transfer.stage == "input_dist" else "answers"] += self._call_s(
                    transfer, is_far=True
                ) - self._least_call_s(transfer)
        return np.array([seconds[name] for name in USES])

    def bytes_anyway(self) -> tuple[int, int]:
        """Bytes of its device and of its host's memory that every rank holds beside tables and what their exchange
        takes."""
        return fixed_bytes(self.loads, self.topology.num_ranks, self.run)


_COMPONENT: dict[Way, int] = {"owners": 2, "host": 3, "hosts": 4, "columns": 5}
"""Index in COMPONENTS of what travels on each way between a piece's owner and others; ids are apart."""


@dataclass(frozen=True)
class _Call:
    """A collective by its latency alone."""

    path: SumPath | None
    peers: tuple[int, int]


def leaving_share(way: Way, num_ranks: int, per_host: int) -> float:
    """Of the bytes of a piece, what does not stay on the rank where it is; of a sum, what all ranks send."""
    hosts = num_ranks // per_host
    shares: dict[Way, float] = {
        "owners": (num_ranks - 1) / num_ranks,
        "host": (per_host - 1) / per_host,
        "hosts": (hosts - 1) / hosts,
        "columns": 1.0,
    }
    return shares[way] if way in shares else num_ranks * sum(alike_shares(way, num_ranks, per_host))


def _whole(values: Floats) -> Ints:
    return np.ceil(values).astype(np.int64)
