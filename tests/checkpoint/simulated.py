"""Ranks as threads of one process, tables of random bits, and their shards under any plan."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from meseta import EmbeddingBagCollection
from meseta.comm import PendingCollective, World
from meseta.optim import make_row_optimizer
from meseta.spec import OptimizerSpec, Plan, Shard, ShardingType, TablePlan, TableSpec
from meseta.storage import TableShard

T = TypeVar("T")
Tables = dict[str, dict[str, Tensor]]
"""Rows 'row' [V, D] and each optimizer state [V, D] or [V], by table."""


@dataclass(frozen=True)
class ThreadWorld(World):
    """The collectives of checkpoints between threads. A missing rank breaks the barrier."""

    slots: list[Any] = field(default_factory=list)
    gate: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))

    def all_gather_object(self, value: Any) -> list[Any]:
        self.slots[self.rank] = value
        self.gate.wait()
        gathered = list(self.slots)
        self.gate.wait()
        return gathered

    def barrier(self) -> None:
        self.gate.wait()

    def all_to_all(
        self,
        send: Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        name: str = "",
        *,
        keep: bool = True,
    ) -> PendingCollective:
        parts = [sent[self.rank] for sent in self.all_gather_object(send.split(list(send_splits)))]
        assert [len(part) for part in parts] == list(receive_splits)
        return PendingCollective(received=torch.cat(parts), send=send, work=None)


def on_ranks(size: int, run: Callable[[World], T]) -> list[T | Exception]:
    """Run a function on each of `size` ranks, and return its results or exceptions."""
    slots, gate = [None] * size, threading.Barrier(size, timeout=20)

    def guarded(rank: int) -> T | Exception:
        try:
            return run(ThreadWorld(rank=rank, size=size, device=torch.device("cpu"), slots=slots, gate=gate))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))


def returned(results: Sequence[T | Exception]) -> list[T]:
    """Return the results of all ranks, or raise the first error among them."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return list(results)  # type: ignore[arg-type]


def random_tables(specs: Sequence[TableSpec], seed: int) -> Tables:
    """Return random bits, among them -0.0, denormals, infinities and NaNs with payloads."""
    generator = torch.Generator().manual_seed(seed)

    def fill(like: Tensor) -> Tensor:
        size = like.numel() * like.element_size()
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(like.dtype).view(like.shape)

    tables: Tables = {}
    for spec in specs:
        weight = torch.zeros(spec.num_embeddings, spec.embedding_dim, dtype=getattr(torch, spec.dtype))
        state = make_row_optimizer(spec.optimizer).init(weight)
        tables[spec.name] = {name: fill(tensor) for name, tensor in {"row": weight, **state}.items()}
    return tables


def pieces(specs: Sequence[TableSpec], plan: Plan, rank: int, tables: Tables) -> list[TableShard]:
    """Return the shards of one rank with copies of their part of `tables`."""
    shards = []
    for spec in specs:
        for shard in plan[spec.name].shards:
            if rank in shard.ranks:
                rows, columns = slice(*shard.rows), slice(*shard.columns)
                values = {
                    n: (t[rows, columns] if t.dim() == 2 else t[rows]).clone() for n, t in tables[spec.name].items()
                }
                optimizer = make_row_optimizer(spec.optimizer)
                weight = values.pop("row")
                shards.append(TableShard(spec=spec, shard=shard, weight=weight, state=values, optimizer=optimizer))
    return shards


def placed(plan: Plan, shards: Sequence[TableShard]) -> EmbeddingBagCollection:
    """Return the part of a collection's interface that a save uses, for shards without a collection."""
    embeddings = EmbeddingBagCollection.__new__(EmbeddingBagCollection)
    embeddings.__dict__.update(plan=plan, shards=shards)
    return embeddings


def blank(specs: Sequence[TableSpec], plan: Plan, rank: int) -> list[TableShard]:
    """Return the shards of one rank, filled with a value that no test table holds."""
    return pieces(specs, plan, rank, random_tables(specs, seed=987_654_321))


def assert_holds(shards: Sequence[TableShard], tables: Tables) -> None:
    """Check that every shard holds its part of `tables` bit for bit."""
    for piece in shards:
        rows, columns = slice(*piece.shard.rows), slice(*piece.shard.columns)
        for name, tensor in {"row": piece.weight, **piece.state}.items():
            whole = tables[piece.spec.name][name]
            expected = whole[rows, columns] if whole.dim() == 2 else whole[rows]
            assert torch.equal(bits(tensor), bits(expected)), (piece.spec.name, name, piece.shard)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def random_plan(specs: Sequence[TableSpec], num_ranks: int, seed: int) -> Plan:
    """Return a random plan with replicas, or grids of random row and aligned column splits with random owners. The
    first rows of some tables are replicas."""
    rng = random.Random(seed)
    entries = []
    for spec in specs:
        kind, everywhere = rng.random(), tuple(rng.sample(range(num_ranks), num_ranks))
        columns = (0, spec.embedding_dim)
        if kind < 0.2:
            whole = Shard(table=spec.name, rows=(0, spec.num_embeddings), columns=columns, ranks=everywhere)
            entries.append(TablePlan(table=spec.name, sharding=ShardingType.DATA_PARALLEL, shards=(whole,)))
            continue
        row_spans, hot = _cut(rng, spec.num_embeddings, 1), []
        sharding = ShardingType.ROW_WISE
        if kind < 0.4 and len(row_spans) > 1:
            sharding = ShardingType.HOT_REPLICATED
            hot = [Shard(table=spec.name, rows=row_spans.pop(0), columns=columns, ranks=everywhere)]
        shards = [
            Shard(table=spec.name, rows=rows, columns=columns, ranks=(rng.randrange(num_ranks),))
            for rows in row_spans
            for columns in _cut(rng, spec.embedding_dim, 16)
        ]
        entries.append(TablePlan(table=spec.name, sharding=sharding, shards=(*hot, *shards)))
    plan = Plan(num_ranks=num_ranks, tables=tuple(entries))
    plan.check(specs)
    return plan


def _cut(rng: random.Random, total: int, align: int) -> list[tuple[int, int]]:
    possible = range(align, total, align)
    cuts = [0, *sorted(rng.sample(possible, min(rng.randrange(4), len(possible)))), total]
    return list(itertools.pairwise(cuts))


def plain_plan(specs: Sequence[TableSpec], num_ranks: int, sharding: str) -> Plan:
    """Return a plan with one sharding type for all tables and ranks."""
    return Plan.from_dict({"tables": {"*": sharding}}, specs, num_ranks)


def some_specs() -> list[TableSpec]:
    """Return a table per row optimizer, with odd sizes, another dtype and a name that is no file name."""
    return [
        TableSpec(name="user", num_embeddings=203, embedding_dim=40, optimizer=OptimizerSpec(name="adam")),
        TableSpec(name="item/..", num_embeddings=97, embedding_dim=16, optimizer=OptimizerSpec(name="rowwise_adagrad")),
        TableSpec(name="..", num_embeddings=1, embedding_dim=1, optimizer=OptimizerSpec(name="sgd")),
        TableSpec(
            name="wide", num_embeddings=31, embedding_dim=33, dtype="float64", optimizer=OptimizerSpec(name="adagrad")
        ),
        TableSpec(
            name="half",
            num_embeddings=71,
            embedding_dim=24,
            dtype="float16",
            optimizer=OptimizerSpec(name="rowwise_adam"),
        ),
        TableSpec(name="brain", num_embeddings=64, embedding_dim=17, dtype="bfloat16", optimizer=OptimizerSpec()),
    ]


def flip_middle(file: Path) -> None:
    """Change one bit of a value in the middle of the file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def many_files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder by path."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
