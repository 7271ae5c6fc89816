"""Seconds and bytes of pieces and replicas that any assignment adds up: what `predict` says of a whole plan, per piece.

All but three parts of `predict` are sums over the pieces of a rank, so that the cost of an assignment follows from its
pieces. The three: the rows that a cache keeps, which all pieces of a rank share, and the bytes that a rank holds are
taken as of an average rank; and the pieces of a host are taken to lie evenly on its ranks where those hand on what is
the host's. Beside its seconds a piece has what it takes at least, wherever its rank and its host have the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meseta.planner.cost.exchange import (
    NOT_CUT,
    OF_HOSTS,
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
from meseta.planner.cost.exposed import dense_pieces, schedule_of
from meseta.planner.cost.loads import Loads, Pieces, WorkloadLoads
from meseta.planner.cost.memory import (
    SORT_BYTES,
    RunBytes,
    fixed_bytes,
    gradient_bytes,
    received_bytes,
    stored_bytes,
)
from meseta.planner.cost.operators import disk_seconds, operator_seconds
from meseta.planner.cost.placement import Placement
from meseta.planner.cost.predict import dense_seconds, replica_seconds
from meseta.planner.cost.schedule import PACKING, WHOLE, WITH_IDS, Schedule
from meseta.planner.search.assignment import Floats, Ints, Mask, Options, StepPaths
from meseta.planner.search.paths import COMPUTE, Durations, find_paths
from meseta.spec import CostModel, Topology, Workload
from meseta.spec.codecs import DensePath, Exchange, SumPath, Way, alike_shares
from meseta.spec.tiers import MEMORIES
from meseta.spec.transfer import GRADIENTS_OF, ROW_STATISTICS, Each, Part, Transfer, step_transfers

COMPONENTS = ("compute", "ids", "answers", "partial bags", "summed bags", "row statistics")
"""What every rank does in step with the others; the slowest ends it. With two levels 'answers' are the ids that cross
hosts, since all bags and rows are of the two behind it."""
USES = ("partial bags", "row statistics", "replicas", "owners", "answers")
"""What takes place only where some table needs it: collectives, calls, and bytes between hosts in those that all steps
have."""
NUM_AVOIDABLE = 3
"""The first of USES, without which a search tries to do."""


Column = tuple[int, float, float]
"""A component, and the seconds of a byte there: of the rank that has the piece, and of every rank."""
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
        if each in OF_HOSTS and self.most_columns is not None:
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
    """[n, 2, L]: at least, were the piece alone on its rank: what all ranks together have more to do, and the rank that
    holds it; L is K where something is hidden, else 1, of all together."""
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
        self.schedules = hidden_schedules(loads.workload, self.transfers, self.is_two_level)
        """Where something is hidden: of a step, and of one that uses more; with what of USES each needs."""
        self.components = COMPONENTS if self.schedules is None else hidden_components(self.transfers)
        """K of them; where something is hidden, the names that a schedule has for their seconds, by way."""
        inside, across = links(cost_model, topology, False)
        self._copy_s = cost_model.exchange.copy_byte_s
        self._owner_s = max((per_host - 1) / inside.bytes_per_s, (ranks - per_host) / across.bytes_per_s) / ranks
        self._inside_s, self._across_s = 1.0 / inside.bytes_per_s, 1.0 / across.bytes_per_s

    def pieces(self, pieces: Pieces, cuts: Cuts) -> Priced:
        """Price pieces that lie on one rank each."""
        loads, model, ranks = self.loads, self.cost_model, self.topology.num_ranks
        cache_bytes, n = model.cache.cache_bytes, len(pieces.table)
        held = self._held
        alone = loads.held_samples(pieces, np.arange(n), n, cache_bytes) if n else np.zeros(0)
        load = loads.loads(pieces, held_samples=held, rank_bytes=self._rank_bytes, num_ranks=ranks)
        both = operator_seconds(model, load)
        least = loads.loads(pieces, held_samples=np.maximum(alone, held), rank_bytes=loads.stored_bytes(pieces))
        least_of_both = operator_seconds(model, least)
        own, common = (np.zeros((n, len(self.components))) for _ in range(2))
        saved_s, shared_s = self._exchange(load, cuts, own, common)
        # What disks take is hidden behind the step, up to its length: here it is added, so that tables of many misses
        # stay near, and left out of what a piece takes at least.
        disk_s = load.tier_misses * disk_seconds(model, load, self.topology.devices_per_host)
        self._put_computed(own, (both[0] + disk_s, both[1]))
        least_s = self._least(own, both, least_of_both) - saved_s
        wire, answered = received_bytes(self.transfers, load, cuts, ranks)
        device, host, disk = (stored_bytes(load, memory, is_cpu=self.topology.device == "cpu") for memory in MEMORIES)
        buffers = SORT_BYTES * load.ids
        if ranks > 1:
            buffers = buffers + 2 * wire + 8 * load.lengths + answered
        common_bytes = (wire + answered) / ranks
        return Priced(
            seconds=own,
            least_s=np.stack([least_s, least_s - shared_s], axis=1),
            common_seconds=common,
            rank_bytes=_whole(device + buffers),
            host_bytes=np.stack([_whole(host), _whole(disk)], axis=1),
            common_bytes=_whole(common_bytes),
        )

    def _exchange(self, load: Loads, cuts: Cuts, own: Floats, common: Floats) -> tuple[Floats, Floats]:
        """Add the seconds of the transfers: their bytes, at what a byte takes on its way. Returns [n, L] and [n, L]:
        what of them may be less, and what other ranks of the host may take on."""
        rows_are_cut, ranks, per_host = cuts.row_parts > 1, self.topology.num_ranks, self.topology.devices_per_host
        width = 1 if self.schedules is None else len(self.components)
        (saved_s, shared_s), cost = np.zeros((2, len(load.ids), width)), self.cost_model.exchange
        for transfer in self.transfers:
            for part in transfer.parts:
                if part.way in _COMPONENT and part.each not in PAIRS:
                    num_bytes = bytes_of(part, load, cuts, ranks)
                    for component, owner_s, common_s in self._columns(transfer, part):
                        own[:, component] += num_bytes * owner_s
                        common[:, component] += num_bytes * common_s
                        column = component if width > 1 else 0
                        if part.way == "hosts":
                            least = num_bytes * owner_s * cuts.least_share(part.each)
                            saved_s[:, column] += num_bytes * owner_s - least
                            shared_s[:, column] += least * (1.0 - cuts.together / per_host)
                    if part.way == "host":  # what the rank itself asks for is less where it holds more
                        shared_s[:, column] += num_bytes * self._copy_s * leaving_share("host", ranks, per_host)
            if transfer.name == "ids":
                column = 1 if self.schedules is None else self.components.index(PACKING + "ids")
                common[:, column] += cost.bucket_id_s * load.ids * rows_are_cut / ranks
        return saved_s, shared_s

    def _columns(self, transfer: Transfer, part: Part) -> list[Column]:
        """Where the bytes of a part go: on links, and then in packing, where these are told apart."""
        ranks, cost = self.topology.num_ranks, self.cost_model.exchange
        owner_s, common_s = self._byte_s(part.way)
        holder_s, askers_s = codec_seconds(part, transfer.to_owners, cost, self.topology.num_hosts)
        if self.schedules is None:
            component = self._component(transfer, part.way)
            return [(component, owner_s + holder_s, common_s + askers_s / ranks)]
        link_s, first = self._link_byte_s(part.way), WITH_IDS.get(transfer.name, transfer.name)
        link, packing = self.components.index(first), self.components.index(PACKING + first)
        return [(link, link_s, 0.0), (packing, owner_s - link_s + holder_s, common_s + askers_s / ranks)]

    def _component(self, transfer: Transfer, way: Way) -> int:
        if transfer.stage != "input_dist":
            return _COMPONENT[way]
        return COMPONENTS.index("answers" if self.is_two_level and way == "hosts" else "ids")

    def _put_computed(self, found: Floats, both: tuple[Floats, Floats]) -> None:
        """Seconds of lookup and of update, [n] each, into components [n, K]."""
        found[:, 0] = both[0] + both[1]
        if self.schedules is not None:
            found[:, 1], found[:, 2] = both

    def _least(self, own: Floats, both: tuple[Floats, Floats], least: tuple[Floats, Floats]) -> Floats:
        """[n, L]: of seconds `own` [n, K], what is left where lookup and update take their `least`. No more than that
        is known of the update alone."""
        together = np.minimum(least[0] + least[1], both[0] + both[1])
        if self.schedules is None:
            added: Floats = together + own[:, 1:].sum(axis=1)
            return added[:, None]
        return np.column_stack([together, np.minimum(least[0], both[0]), np.zeros(len(own)), own[:, 3:]])

    def spent(self, seconds: Floats) -> Floats:
        """[n]: all that is done for pieces, and waited for, were nothing hidden."""
        if self.schedules is None:
            return seconds.sum(axis=1)
        return seconds[:, 0] + seconds[:, len(COMPUTE) :].sum(axis=1)

    def paths(self, options: Options) -> tuple[StepPaths, float]:
        """What a step of these options is the longest of, and its seconds without any table."""
        assert self.schedules is not None
        uses = self._use_parts()
        durations = Durations(
            components=self.components, fixed_s=self._fixed_parts(), use_s=[uses[name] for name in USES]
        )
        averages = options.total / self.topology.num_ranks + options.common_seconds
        starts = np.searchsorted(options.unit, np.arange(options.num_units))
        if not len(starts):
            expected = np.zeros((1, len(self.components)))
        else:
            whole = self.spent(averages)
            least = np.minimum.reduceat(whole, starts)
            cheapest = np.unique(options.unit[whole == least[options.unit]], return_index=True)[1]
            chosen = np.flatnonzero(whole == least[options.unit])[cheapest]
            sizes = np.diff(np.append(starts, len(whole)))
            mean = (np.add.reduceat(averages, starts) / sizes[:, None]).sum(axis=0)
            expected = np.stack([averages[chosen].sum(axis=0), mean])
        return find_paths(self.schedules, durations, expected, (averages, starts))

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

    def _link_byte_s(self, way: Way) -> float:
        """Of these of the rank that has the piece, those on links."""
        if way == "owners":
            return self._owner_s
        if way == "hosts":
            return self._across_s * (self.topology.num_hosts - 1) / self.topology.num_hosts
        link_s = self._inside_s if way == "host" or self.topology.num_hosts == 1 else self._across_s
        return link_s * leaving_share(way, self.topology.num_ranks, self.topology.devices_per_host)

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
        empty = Pieces(*[nothing] * 7)
        placement = Placement(
            empty, nothing, nothing, nothing, nothing, nothing, pieces, ranks, topology.devices_per_host
        )
        common = np.zeros((n, len(self.components)))
        self._put_computed(common, replica_seconds(self.loads, placement, model, topology))
        load = self.loads.loads(pieces)
        gradients = gradient_bytes(self.transfers, load)
        for transfer in self.transfers:
            if transfer.name == "replicas":
                amounts = [bytes_of(part, load, NOT_CUT, ranks) for part in transfer.parts]
                link_s, packing_s, codec_s = self._alike_seconds(transfer, amounts)
                if self.schedules is None:
                    common[:, 5] = link_s + packing_s + codec_s
                else:
                    common[:, self.components.index("replicas")] = link_s + codec_s
                    common[:, self.components.index(PACKING + "replicas")] = packing_s
        return Priced(
            seconds=np.zeros((n, len(self.components))),
            least_s=np.zeros((n, 2, 1)),
            common_seconds=common,
            rank_bytes=np.zeros(n, np.int64),
            host_bytes=np.zeros((n, 2), np.int64),
            common_bytes=_whole(load.stored_bytes + gradients + SORT_BYTES * load.ids / ranks),
        )

    def fixed_seconds(self) -> float:
        """Of every plan, added up: the dense part, the least latencies of the transfers of tables that it cannot do
        without, their headers, and the transfers of the dense part."""
        workload = self.loads.workload
        return dense_seconds(workload, self.topology, self.cost_model) + sum(s for _, s in self._fixed())

    def _fixed(self) -> Iterator[tuple[str, float]]:
        """Seconds of transfers that every plan has, with the name of a schedule for each."""
        for transfer in self.transfers:
            name = WITH_IDS.get(transfer.name, transfer.name)
            if not transfer.is_of_tables:
                is_far = transfer.parts[0].way not in ("host gather", "host scatter")
                yield name, self._call_s(transfer, is_far=is_far)
                amounts = [np.array(float(part.num_bytes)) for part in transfer.parts]
                link_s, packing_s, codec_s = self._alike_seconds(transfer, amounts)
                yield name, float(link_s + codec_s)
                yield PACKING + name, float(packing_s)
            elif self._is_always(transfer):
                headers = [part for part in transfer.parts if part.each in PAIRS]
                yield name, self._call_s(transfer, is_far=True) if headers else self._least_call_s(transfer)
                for part in headers:
                    on_links_s = self._header_link_seconds(part)
                    yield name, on_links_s
                    yield PACKING + name, self._header_seconds(part) - on_links_s

    def _fixed_parts(self) -> dict[str, float]:
        """The same by the names of a schedule, with the dense part."""
        workload = self.loads.workload
        found = dense_pieces(workload, dense_seconds(workload, self.topology, self.cost_model))
        for name, seconds in self._fixed():
            found[name] = found.get(name, 0.0) + seconds
        return found

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

    def _header_link_seconds(self, part: Part) -> float:
        """The same on links."""
        num_bytes = pair_bytes(part, self.topology.num_ranks, self.topology.devices_per_host)
        return num_bytes * self._link_byte_s(part.way)

    def _alike_seconds(self, transfer: Transfer, amounts: Sequence[Floats]) -> tuple[Floats, Floats, Floats]:
        """Of the bytes of each part that every rank has alike, without latencies: on links, in packing, in codecs."""
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
        return np.asarray(spent), np.asarray(2 * (near + far) * self._copy_s), np.asarray(codec_s)

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
        parts = self._use_parts()
        return np.array([float(sum(parts[name].values())) for name in USES])

    def _use_parts(self) -> dict[str, dict[str, float]]:
        """The same, of each use by the names of a schedule."""
        lookup_s, update_s = self.cost_model.lookup.call_s, self.cost_model.update.call_s
        found: dict[str, dict[str, float]] = {name: {} for name in USES}
        found["owners"] = {"lookup": lookup_s, "update": update_s}
        if self.topology.num_ranks == 1:
            return found
        found["replicas"] = {"update": 2 * update_s, "lookup": lookup_s}

        def add(use: str, transfer: Transfer, seconds: float) -> None:
            name = WITH_IDS.get(transfer.name, transfer.name)
            found[use][name] = found[use].get(name, 0.0) + seconds

        for transfer in self.transfers:
            far_s = self._call_s(transfer, is_far=True)
            if transfer.name in ("row statistics", "replicas"):
                add(transfer.name, transfer, far_s)
            elif transfer.is_of_tables and not self._is_always(transfer):
                add("partial bags", transfer, far_s)
            elif transfer.is_of_tables and not any(part.each in PAIRS for part in transfer.parts):
                use = "owners" if transfer.stage == "input_dist" else "answers"
                add(use, transfer, far_s - self._least_call_s(transfer))
        return found

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


def hidden_schedules(
    workload: Workload, transfers: Sequence[Transfer], is_two_level: bool
) -> list[tuple[Schedule, Mask]] | None:
    """Of a step that uses nothing which only some tables need; and of those that add up bags inside hosts, exchange row
    statistics, or both, each with what of USES it needs. None where nothing is hidden."""
    found = []
    names = [transfer.name for transfer in transfers]
    partial = () if is_two_level else (WHOLE, GRADIENTS_OF[WHOLE])
    optional = {"partial bags": partial, "row statistics": ("row statistics",)}
    for needed in ((), ("partial bags",), ("row statistics",), ("partial bags", "row statistics")):
        if any(not set(optional[use]) & set(names) for use in needed):
            continue
        absent = {name for use, of_use in optional.items() if use not in needed for name in of_use}
        schedule = schedule_of(workload, [name for name in names if name not in absent])
        if schedule is None:
            return None
        found.append((schedule, np.isin(USES, needed)))
    return found


def hidden_components(transfers: Sequence[Transfer]) -> tuple[str, ...]:
    """What ranks do in step with each other where something is hidden: lookups, updates, and of each transfer of tables
    what is on links and what is not."""
    names = dict.fromkeys(WITH_IDS.get(one.name, one.name) for one in transfers if one.is_of_tables)
    return (*COMPUTE, *(prefix + name for name in names for prefix in ("", PACKING)))


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
