"""Integer program of a placement problem, solved by HiGHS: an oracle that is independent of the search."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from meseta.planner.search.assignment import UNLIMITED
from meseta.planner.search.problem import PlacementProblem


class Rows:
    """Linear constraints, added row by row."""

    def __init__(self) -> None:
        self.row: list[int] = []
        self.column: list[int] = []
        self.value: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: dict[int, float], low: float, high: float) -> None:
        """Add low <= sum of value * variable <= high."""
        self.row += [len(self.low)] * len(terms)
        self.column += terms.keys()
        self.value += terms.values()
        self.low.append(low)
        self.high.append(high)

    def matrix(self, num_columns: int) -> coo_array:
        return coo_array((self.value, (self.row, self.column)), shape=(len(self.low), num_columns))


class Program:
    """Integer program of a placement problem.

    Its variables are, in this order: z[shard, rank] and y[option], 0 or 1; h[block, host], 0 or 1, for shards that
    share a host; the slowest rank of each component; whether each avoidable collective is used; the longest path, if
    some components overlap.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        options, machine = problem.options, problem.cluster
        self.problem, self.options, self.machine = problem, options, machine
        self.ranks = machine.num_ranks
        self.blocks = [
            (option, range(start, start + int(options.block_size[option])))
            for option in range(len(options.unit_index))
            for start in range(
                options.first_shard[option], options.first_shard[option + 1], max(int(options.block_size[option]), 1)
            )
            if options.block_size[option]
        ]
        self.hosts = len(machine.host_capacity)
        self.y = len(options.seconds) * self.ranks
        self.h = self.y + len(options.unit_index)
        self.top = self.h + len(self.blocks) * self.hosts
        self.use = self.top + options.seconds.shape[1]
        self.step = self.use + len(options.optional_s)
        self.size = self.step + (options.paths is not None)
        self.rows = Rows()
        self._choose()
        self._share_hosts()
        self._measure()
        self._keep_to_room()
        self._order_ranks()
        if options.paths is not None:
            self._follow_paths()

    def z(self, piece: int, rank: int) -> int:
        return piece * self.ranks + rank

    def _choose(self) -> None:
        """Choose one option of every unit, with its shards on different ranks, and place no shard of other options."""
        options = self.options
        for unit in range(options.num_units):
            self.rows.add({self.y + option: 1.0 for option in options.unit_options(unit)}, 1.0, 1.0)
        for option in range(len(options.unit_index)):
            pieces = range(options.first_shard[option], options.first_shard[option + 1])
            for piece in pieces:
                self.rows.add({**{self.z(piece, r): 1.0 for r in range(self.ranks)}, self.y + option: -1.0}, 0.0, 0.0)
            size = int(options.block_size[option]) or max(len(pieces), 1)
            for start in range(pieces.start, pieces.stop, size):
                for rank in range(self.ranks):
                    terms = {self.z(piece, rank): 1.0 for piece in range(start, start + size)}
                    self.rows.add({**terms, self.y + option: -1.0}, -np.inf, 0.0)
            for collective in np.flatnonzero(options.optional_costs[option]):
                self.rows.add({self.y + option: 1.0, self.use + int(collective): -1.0}, -np.inf, 0.0)

    def _share_hosts(self) -> None:
        per_host = self.machine.devices_per_host
        for number, (option, pieces) in enumerate(self.blocks):
            first = self.h + number * self.hosts
            self.rows.add({**{first + host: 1.0 for host in range(self.hosts)}, self.y + option: -1.0}, 0.0, 0.0)
            for piece in pieces:
                for host in range(self.hosts):
                    terms = {self.z(piece, host * per_host + r): 1.0 for r in range(per_host)}
                    self.rows.add({**terms, first + host: -1.0}, 0.0, 0.0)

    def _measure(self) -> None:
        """Bound each rank and each shard by the slowest rank of each component, in milliseconds.

        The bound of shards follows for integers, but not for the fractions of the solver's relaxation.
        """
        options = self.options
        longest = 1e3 * options.max_seconds
        for span in map(options.unit_options, range(options.num_units)):
            for part in range(options.seconds.shape[1]):
                terms = {self.y + option: float(longest[option, part]) for option in span}
                self.rows.add({**terms, self.top + part: -1.0}, -np.inf, 0.0)
        for part in range(options.seconds.shape[1]):
            for rank in range(self.ranks):
                terms = {self.z(p, rank): 1e3 * s for p, s in enumerate(options.seconds[:, part].tolist()) if s}
                self.rows.add({**terms, self.top + part: -1.0}, -np.inf, 0.0)

    def _keep_to_room(self) -> None:
        """Limit the bytes of every device, relative to its capacity."""
        room = int(self.machine.rank_capacity[0, 0])
        if room >= UNLIMITED:
            return
        for rank in range(self.ranks):
            terms = {self.z(p, rank): n / room for p, n in enumerate(self.options.rank_demand[:, 0].tolist()) if n}
            common = {self.y + w: n / room for w, n in enumerate(self.options.common_demand[:, 0].tolist()) if n}
            self.rows.add({**terms, **common}, -np.inf, 1.0)

    def _order_ranks(self) -> None:
        """Order interchangeable ranks and hosts by decreasing compute time."""
        compute, per_host = 1e3 * self.options.seconds[:, 0], self.machine.devices_per_host
        pairs = [(rank, rank + 1) for rank in range(self.ranks - 1) if (rank + 1) % per_host]
        pairs += [(rank, rank + per_host) for rank in range(0, self.ranks - per_host, per_host)]
        for one, other in pairs:
            first = {self.z(p, one): -float(s) for p, s in enumerate(compute) if s}
            second = {self.z(p, other): float(s) for p, s in enumerate(compute) if s}
            self.rows.add({**first, **second}, -np.inf, 0.0)

    def _follow_paths(self) -> None:
        """Bound each path by the step, in milliseconds.

        A path that needs an unused collective is exempt, by subtracting the sum of all times.
        """
        paths, common = self.options.paths, 1e3 * self.options.common_seconds
        assert paths is not None
        longest = (
            1e3 * (self.options.seconds.sum() + np.abs(paths.fixed_s).max() + paths.optional_s.sum()) + common.sum()
        )
        for coefs, fixed_s, use_s, needs in zip(
            paths.coefs, paths.fixed_s, paths.optional_s, paths.required_costs, strict=True
        ):
            terms = {self.top + part: float(share) for part, share in enumerate(coefs)}
            terms |= {self.y + option: float(spent) for option, spent in enumerate(common @ coefs)}
            terms |= {self.use + number: 1e3 * float(spent) for number, spent in enumerate(use_s)}
            for number in np.flatnonzero(needs):
                terms[self.use + int(number)] += float(longest)
            self.rows.add({**terms, self.step: -1.0}, -np.inf, -1e3 * float(fixed_s) + needs.sum() * float(longest))

    def solve(self, limit_s: float, gap: float) -> tuple[float, float]:
        """Return seconds of (best assignment, lower bound of all assignments), without the fixed part."""
        cost = np.zeros(self.size)
        if self.options.paths is None:
            cost[self.y : self.h] = 1e3 * self.options.common_seconds.sum(axis=1)
            cost[self.top : self.use] = 1.0
            cost[self.use :] = 1e3 * self.options.optional_s
        else:
            cost[self.step] = 1.0
        whole = np.ones(self.size)
        whole[self.top :] = 0.0
        highest, lowest = np.ones(self.size), np.zeros(self.size)
        highest[self.top : self.use] = highest[self.step :] = np.inf
        lowest[self.step :] = -np.inf
        rows = self.rows
        solved = milp(
            cost,
            constraints=LinearConstraint(rows.matrix(self.size).tocsr(), rows.low, rows.high),
            integrality=whole,
            bounds=Bounds(lowest, highest),
            options={"time_limit": limit_s, "mip_rel_gap": gap},
        )
        best = np.inf if solved.x is None else float(solved.fun)
        return best / 1e3, float(solved.mip_dual_bound) / 1e3
