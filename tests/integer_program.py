"""The placement of a planner's problem as an integer program, which HiGHS solves: an oracle that shares no search."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from meseta.planner.layout import NO_LIMIT
from meseta.planner.problem import Problem


class Rows:
    """Linear constraints, row by row."""

    def __init__(self) -> None:
        self.row: list[int] = []
        self.column: list[int] = []
        self.value: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: dict[int, float], low: float, high: float) -> None:
        """low <= the sum of value * variable <= high."""
        self.row += [len(self.low)] * len(terms)
        self.column += terms.keys()
        self.value += terms.values()
        self.low.append(low)
        self.high.append(high)

    def matrix(self, num_columns: int) -> coo_array:
        return coo_array((self.value, (self.row, self.column)), shape=(len(self.low), num_columns))


class Program:
    """Variables, in this order: z[piece, rank] and y[way], 0 or 1; h[block, host], 0 or 1, for pieces that share one;
    the slowest rank of each component; whether each avoidable collective is used."""

    def __init__(self, problem: Problem) -> None:
        ways, machine = problem.ways, problem.machine
        self.problem, self.ways, self.machine = problem, ways, machine
        self.ranks = machine.num_ranks
        self.blocks = [
            (way, range(start, start + int(ways.block[way])))
            for way in range(len(ways.unit))
            for start in range(ways.first[way], ways.first[way + 1], max(int(ways.block[way]), 1))
            if ways.block[way]
        ]
        self.hosts = len(machine.host_room)
        self.y = len(ways.seconds) * self.ranks
        self.h = self.y + len(ways.unit)
        self.top = self.h + len(self.blocks) * self.hosts
        self.use = self.top + ways.seconds.shape[1]
        self.size = self.use + len(ways.use_s)
        self.rows = Rows()
        self._choose()
        self._share_hosts()
        self._measure()
        self._keep_to_room()
        self._order_ranks()

    def z(self, piece: int, rank: int) -> int:
        return piece * self.ranks + rank

    def _choose(self) -> None:
        """One way of every unit; its pieces on different ranks, those of other ways nowhere."""
        ways = self.ways
        for unit in range(ways.num_units):
            self.rows.add({self.y + way: 1.0 for way in ways.of_unit(unit)}, 1.0, 1.0)
        for way in range(len(ways.unit)):
            pieces = range(ways.first[way], ways.first[way + 1])
            for piece in pieces:
                self.rows.add({**{self.z(piece, r): 1.0 for r in range(self.ranks)}, self.y + way: -1.0}, 0.0, 0.0)
            size = int(ways.block[way]) or max(len(pieces), 1)
            for start in range(pieces.start, pieces.stop, size):
                for rank in range(self.ranks):
                    own = {self.z(piece, rank): 1.0 for piece in range(start, start + size)}
                    self.rows.add({**own, self.y + way: -1.0}, -np.inf, 0.0)
            for collective in np.flatnonzero(ways.uses[way]):
                self.rows.add({self.y + way: 1.0, self.use + int(collective): -1.0}, -np.inf, 0.0)

    def _share_hosts(self) -> None:
        per_host = self.machine.devices_per_host
        for number, (way, pieces) in enumerate(self.blocks):
            first = self.h + number * self.hosts
            self.rows.add({**{first + host: 1.0 for host in range(self.hosts)}, self.y + way: -1.0}, 0.0, 0.0)
            for piece in pieces:
                for host in range(self.hosts):
                    own = {self.z(piece, host * per_host + r): 1.0 for r in range(per_host)}
                    self.rows.add({**own, first + host: -1.0}, 0.0, 0.0)

    def _measure(self) -> None:
        """In milliseconds: no rank of a component is slower than its slowest, and no piece takes longer than that. The
        latter follows for whole numbers, but not for the fractions that the solver begins with."""
        ways = self.ways
        longest = 1e3 * ways.longest
        for span in map(ways.of_unit, range(ways.num_units)):
            for part in range(ways.seconds.shape[1]):
                own = {self.y + way: float(longest[way, part]) for way in span}
                self.rows.add({**own, self.top + part: -1.0}, -np.inf, 0.0)
        for part in range(ways.seconds.shape[1]):
            for rank in range(self.ranks):
                own = {self.z(p, rank): 1e3 * s for p, s in enumerate(ways.seconds[:, part].tolist()) if s}
                self.rows.add({**own, self.top + part: -1.0}, -np.inf, 0.0)

    def _keep_to_room(self) -> None:
        """Bytes of every device, as parts of its room."""
        room = int(self.machine.rank_room[0, 0])
        if room >= NO_LIMIT:
            return
        for rank in range(self.ranks):
            own = {self.z(p, rank): n / room for p, n in enumerate(self.ways.rank_need[:, 0].tolist()) if n}
            common = {self.y + w: n / room for w, n in enumerate(self.ways.common_need[:, 0].tolist()) if n}
            self.rows.add({**own, **common}, -np.inf, 1.0)

    def _order_ranks(self) -> None:
        """Ranks of a host are alike, and hosts are: the one that computes longest comes first."""
        compute, per_host = 1e3 * self.ways.seconds[:, 0], self.machine.devices_per_host
        pairs = [(rank, rank + 1) for rank in range(self.ranks - 1) if (rank + 1) % per_host]
        pairs += [(rank, rank + per_host) for rank in range(0, self.ranks - per_host, per_host)]
        for one, other in pairs:
            first = {self.z(p, one): -float(s) for p, s in enumerate(compute) if s}
            second = {self.z(p, other): float(s) for p, s in enumerate(compute) if s}
            self.rows.add({**first, **second}, -np.inf, 0.0)

    def solve(self, limit_s: float, gap: float) -> tuple[float, float]:
        """Seconds of (the best layout found, the bound below which no layout goes), beside what is fixed."""
        cost = np.zeros(self.size)
        cost[self.y : self.h] = 1e3 * self.ways.common_seconds.sum(axis=1)
        cost[self.top : self.use] = 1.0
        cost[self.use :] = 1e3 * self.ways.use_s
        whole = np.ones(self.size)
        whole[self.top :] = 0.0
        highest = np.ones(self.size)
        highest[self.top : self.use] = np.inf
        rows = self.rows
        solved = milp(
            cost,
            constraints=LinearConstraint(rows.matrix(self.size).tocsr(), rows.low, rows.high),
            integrality=whole,
            bounds=Bounds(0.0, highest),
            options={"time_limit": limit_s, "mip_rel_gap": gap},
        )
        best = np.inf if solved.x is None else float(solved.fun)
        return best / 1e3, float(solved.mip_dual_bound) / 1e3
