"""Seconds and bytes of pieces and replicas that any assignment adds up: what `predict` says of a whole plan, per piece.

All but three parts of `predict` are sums over the pieces of a rank, so that the cost of an assignment follows from its
pieces. The three: the rows that a cache keeps, which all pieces of a rank share, and the bytes that a rank holds are
taken as of an average rank; and the pieces of a host are taken to lie evenly on its ranks where their bags are summed
there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meseta.planner.cost.exchange import PAIRS, bytes_of, links, pair_bytes, piece_bytes
from meseta.planner.cost.loads import Loads, Pieces, WorkloadLoads
from meseta.planner.cost.memory import SORT_BYTES, RunBytes, fixed_bytes, received_bytes
from meseta.planner.cost.operators import operator_seconds
from meseta.planner.cost.placement import Placement
from meseta.planner.cost.predict import replica_seconds
from meseta.planner.search.assignment import Floats, Ints
from meseta.spec import CostModel, Topology
from meseta.spec.codecs import Exchange
from meseta.spec.tiers import memory_shares
from meseta.spec.transfer import ROW_STATISTICS, Transfer, Way, alike_shares, step_transfers

COMPONENTS = ("compute", "ids", "answers", "partial bags", "summed bags", "row statistics")
"""What every rank does in step with the others; the slowest ends it."""
USES = ("partial bags", "row statistics", "replicas", "owners", "answers")
"""What takes place only where some table needs it: collectives, calls, and bytes between hosts in those that all steps
have."""
NUM_AVOIDABLE = 3
"""The first of USES, without which a search tries to do."""


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


@dataclass(frozen=True, kw_only=True)
class Priced:
    """Of n pieces."""

    seconds: Floats
    """[n, K]: of the rank that holds the piece."""
    least_s: Floats
    """[n]: of its first component, were the piece alone on its rank."""
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
        exchange: Exchange | None = None,
    ) -> None:
        """`held_samples`: for how many a cache keeps rows; None: as on a rank with an equal part of all tables. `run`:
        what a run adds to the memory of its plan. `exchange`: which way rows take between hosts."""
        self.loads, self.topology, self.cost_model, self.run = loads, topology, cost_model, run or RunBytes()
        whole = loads.whole()
        owners, cache_bytes = np.zeros(len(whole.table), np.int64), cost_model.cache.cache_bytes * topology.num_ranks
        self._held = loads.held_samples(whole, owners, 1, cache_bytes)[0] if held_samples is None else held_samples
        self._rank_bytes = loads.stored_bytes(whole).sum() / topology.num_ranks
        ranks, per_host = topology.num_ranks, topology.devices_per_host
        self.transfers = step_transfers(loads.workload, None, ranks, per_host, exchange)
        """All that a plan may need."""
        inside, across = links(cost_model, topology, False)
        self._copy_s = cost_model.exchange.copy_byte_s
        self._owner_s = max((per_host - 1) / inside.bytes_per_s, (ranks - per_host) / across.bytes_per_s) / ranks
        self._inside_s, self._across_s = 1.0 / inside.bytes_per_s, 1.0 / across.bytes_per_s
        self.base_latency_s = inside.latency_s if topology.num_hosts == 1 else across.latency_s
        """Of a collective that all ranks take part in."""
        self.inside_latency_s = inside.latency_s

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
        self._exchange(load, cuts, own, common)
        own[:, 0] = compute
        wire, answered = received_bytes(self.transfers, load, cuts, ranks)
        device, host, disk = np.array(memory_shares(share))[:, pieces.tier]
        buffers = SORT_BYTES * load.ids
        if ranks > 1:
            buffers = buffers + 2 * wire + 8 * load.lengths + answered
        common_bytes = (wire + answered) / ranks
        return Priced(
            seconds=own,
            least_s=np.minimum(least_s, compute),
            common_seconds=common,
            rank_bytes=_whole(device * load.stored_bytes + buffers),
            host_bytes=np.stack([_whole(host * load.stored_bytes), _whole(disk * load.stored_bytes)], axis=1),
            common_bytes=_whole(common_bytes),
        )

    def _exchange(self, load: Loads, cuts: Cuts, own: Floats, common: Floats) -> None:
        """Seconds of the transfers: their bytes, at what a byte takes on its way."""
        rows_are_cut, ranks = cuts.row_parts > 1, self.topology.num_ranks
        for transfer in self.transfers:
            for part in transfer.parts:
                if part.way in _COMPONENT and part.each not in PAIRS:
                    num_bytes = bytes_of(part, load, cuts, ranks)
                    component = _component(transfer, part.way)
                    owner_s, common_s = self._byte_s(part.way)
                    own[:, component] += num_bytes * owner_s
                    common[:, component] += num_bytes * common_s
            if transfer.name == "ids":
                common[:, 1] += self.cost_model.exchange.bucket_id_s * load.ids * rows_are_cut / ranks

    def _byte_s(self, way: Way) -> tuple[float, float]:
        """Seconds of a byte on its way: of the rank that has the piece, and of every rank."""
        copy_s, ranks, per_host = self._copy_s, self.topology.num_ranks, self.topology.devices_per_host
        if way == "owners":
            return self._owner_s + copy_s * (ranks - 2) / ranks, copy_s / ranks
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
                    num_bytes = float(bytes_of(part, everywhere if part.way == "sum" else own, cuts, ranks).sum())
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
        gradients = piece_bytes(self.transfers, ["replicas"], load, placement, ranks)
        common[:, 5] = gradients * self._alike_byte_s("sum", True)
        return Priced(
            seconds=np.zeros((n, len(COMPONENTS))),
            least_s=np.zeros(n),
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
                total += self._alike_seconds(transfer)
            elif _is_always(transfer):
                total += transfer.times * self.inside_latency_s
            total += sum(self._header_seconds(part.num_bytes) for part in transfer.parts if part.each == "pair")
        return total

    def _header_seconds(self, num_bytes: float) -> float:
        """Of so many bytes from each rank to each."""
        ranks = self.topology.num_ranks
        return num_bytes * ranks * (self._owner_s + 2.0 * self._copy_s * (1 - 1 / ranks))

    def _alike_seconds(self, transfer: Transfer) -> float:
        """Of what does not depend on where tables lie."""
        [part] = transfer.parts
        inside, across = links(self.cost_model, self.topology, transfer.is_sum)
        _, far = alike_shares(part.way, self.topology.num_ranks, self.topology.devices_per_host)
        latency_s = across.latency_s if far else inside.latency_s
        return transfer.times * latency_s + part.num_bytes * self._alike_byte_s(part.way, transfer.is_sum)

    def _alike_byte_s(self, way: Way, is_sum: bool) -> float:
        """Seconds of a byte that every rank has alike."""
        inside, across = links(self.cost_model, self.topology, is_sum)
        near, far = alike_shares(way, self.topology.num_ranks, self.topology.devices_per_host)
        return max(near / inside.bytes_per_s, far / across.bytes_per_s) + 2 * (near + far) * self._copy_s

    def uses(self, cuts: Cuts, pieces: Pieces) -> Ints:
        """[n, len(USES)]: 1 where a piece needs the collective."""
        known = np.array([ROW_STATISTICS.get(name, (0, 0))[0] for name in self.loads.optimizers], np.int64)
        statistics = (cuts.column_parts > 1) & (known[self.loads.optimizer[pieces.table]] > 0)
        read = self.loads.num_features[pieces.table] > 0
        none = np.zeros_like(statistics)
        return np.stack([cuts.host_parts > 0, statistics, none, read, read & (cuts.host_parts == 0)], axis=1).astype(
            np.int64
        )

    def use_seconds(self) -> Floats:
        """[len(USES)]: of these collectives forwards and backwards, and of calls."""
        calls = self.cost_model.lookup.call_s + self.cost_model.update.call_s
        if self.topology.num_ranks == 1:
            return np.array([0.0, 0.0, 0.0, calls, 0.0])
        reduce_inside, reduce_across = links(self.cost_model, self.topology, True)
        is_one, update = self.topology.num_hosts == 1, self.cost_model.update
        times = {transfer.name: transfer.times for transfer in self.transfers}
        replicas = times.get("replicas", 0) * (reduce_inside if is_one else reduce_across).latency_s
        farther = self.base_latency_s - self.inside_latency_s
        to_owners = sum(t.times for t in self.transfers if _is_always(t) and t.stage == "input_dist")
        answers = sum(t.times for t in self.transfers if _is_always(t) and t.stage != "input_dist")
        summed = sum(t.times for t in self.transfers if any(part.way == "hosts" for part in t.parts))
        return np.array(
            [
                summed * self.base_latency_s,
                times.get("row statistics", 0) * self.base_latency_s,
                replicas + 2 * update.call_s + self.cost_model.lookup.call_s,
                calls + to_owners * farther,
                answers * farther,
            ]
        )

    def bytes_anyway(self) -> tuple[int, int]:
        """Bytes of its device and of its host's memory that every rank holds beside tables and what their exchange
        takes."""
        return fixed_bytes(self.loads, self.topology.num_ranks, self.run)


_COMPONENT: dict[Way, int] = {"owners": 2, "host": 3, "hosts": 4, "columns": 5}
"""Index in COMPONENTS of what travels on each way between a piece's owner and others; ids are apart."""


def _component(transfer: Transfer, way: Way) -> int:
    return COMPONENTS.index("ids") if transfer.stage == "input_dist" else _COMPONENT[way]


def _is_always(transfer: Transfer) -> bool:
    """Whether every step has a transfer of tables, wherever they lie."""
    return any(part.way == "owners" for part in transfer.parts)


def leaving_share(way: Way, num_ranks: int, per_host: int) -> float:
    """Of the bytes of a piece, what does not stay on the rank where it is; of a sum, what all ranks send."""
    hosts = num_ranks // per_host
    shares = {
        "owners": (num_ranks - 1) / num_ranks,
        "host": (per_host - 1) / per_host,
        "hosts": (hosts - 1) / hosts,
        "sum": num_ranks * sum(alike_shares("sum", num_ranks, per_host)),
    }
    return shares.get(way, 1.0)


def _whole(values: Floats) -> Ints:
    return np.ceil(values).astype(np.int64)
