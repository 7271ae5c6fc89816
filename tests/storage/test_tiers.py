"""Tests of cached rows with a backing store: their bits are those of rows that are all in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meseta import (
    EmbeddingBagCollection,
    FeatureSpec,
    KeyedJaggedTensor,
    OptimizerSpec,
    Plan,
    TableSpec,
    ahead,
    checkpoint,
)
from meseta.checkpoint.background import BackgroundSaver
from meseta.comm import World
from meseta.ops.row_file import RowFile
from meseta.optim import make_row_optimizer, row_state
from meseta.optim.dense import GradientClipper
from meseta.spec import MesetaError
from meseta.spec.optimizer import USED_FIELDS
from meseta.spec.tiers import StorageOptions
from meseta.storage import ROW, Lease, TableShard, TieredShard, as_stored, fetch_rows
from meseta.storage.backing_store import HostBackingStoreSnapshot
from meseta.storage.tiered import check_row_init
from row_file_cases import damage
from sampling import sample

ROWS = {"big": 500, "small": 40}
FEATURES = ("pooled", "mean", "weighted", "single", "other")
CELLS = [
    {"optimizer": optimizer, "dtype": dtype, "tier": tier, "near": near}
    for optimizer in sorted(USED_FIELDS)
    for dtype in ("float32", "float16", "bfloat16", "float64")
    for tier in ("cached", "disk")
    for near in ("tight", "half")
]


LOOKUPS = OptimizerSpec(name="rowwise_adagrad", lr=0.05, weight_decay=0.1, l1=0.01, stepped_rows="looked_up")


def tables(optimizer: str, dtype: str, width: int = 24) -> list[TableSpec]:
    named: Any = {"name": optimizer} | ({} if optimizer == "frozen" else {"lr": 0.05})
    spec = OptimizerSpec(**named) if optimizer != "lookups" else LOOKUPS
    kind: Any = dtype
    return [
        TableSpec(name=name, num_embeddings=rows, embedding_dim=width, dtype=kind, optimizer=spec)
        for name, rows in ROWS.items()
    ]


def features() -> list[FeatureSpec]:
    return [
        FeatureSpec(name="pooled", table="big"),
        FeatureSpec(name="mean", table="big", pooling="mean"),
        FeatureSpec(name="weighted", table="small", weighted=True),
        FeatureSpec(name="single", table="big", pooling="none"),
        FeatureSpec(name="other", table="small"),
    ]


def batch(number: int, size: int = 6, drift: int = 37) -> KeyedJaggedTensor:
    """Return drifting ids, most of which were not in the batch before."""
    random = np.random.default_rng(number)
    lengths = random.integers(0, 4, (len(FEATURES), size))
    rows = [ROWS["big"], ROWS["big"], ROWS["small"], ROWS["big"], ROWS["small"]]
    ids = [(drift * number + random.zipf(1.6, of.sum()) * 7) % count for of, count in zip(lengths, rows, strict=True)]
    values = torch.from_numpy(np.concatenate(ids))
    weights = torch.from_numpy(random.standard_normal(len(values)).astype(np.float32))
    return KeyedJaggedTensor(FEATURES, values, torch.from_numpy(lengths.reshape(-1)), weights)


def collection(optimizer: str, dtype: str) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables(optimizer, dtype), features(), seed=7)


def placed(
    tier: str, cache_rows: dict[str, int], optimizer: str, dtype: str, folder: Path, lookahead: int | None = None
) -> EmbeddingBagCollection:
    made = collection(optimizer, dtype)
    entries = {name: {"sharding": "table_wise", "tier": tier, "cache_rows": rows} for name, rows in cache_rows.items()}
    made.apply_plan(
        Plan.from_dict({"tables": entries}, made.tables, 1), StorageOptions(dir=folder, lookahead=lookahead)
    )
    return made


@dataclass
class Sparse:
    sparse: Any


def weighed(made: EmbeddingBagCollection, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    assert kjt.weights is not None
    return replace(kjt, weights=kjt.weights.to(made.dtype))


def loss_of(made: EmbeddingBagCollection, kjt: KeyedJaggedTensor) -> Tensor:
    return loss_of_batch(made, weighed(made, kjt))


def loss_of_batch(made: EmbeddingBagCollection, sparse: Any) -> Tensor:
    embeddings = made(sparse)
    single: Any = embeddings["single"]
    return (embeddings.pooled.values.square().sum() + single.values.sin().sum()) / len(embeddings.pooled.values)


def train(made: EmbeddingBagCollection, num_steps: int = 12) -> list[float]:
    """Return the losses of steps. Every third step takes its batch in two parts, and an evaluation is in between."""
    losses = []
    for step in range(num_steps):
        if step % 3 == 2:
            with made.accumulate_gradients():
                loss_of(made, batch(1000 + step)).backward()
        loss = loss_of(made, batch(step))
        loss.backward()
        losses.append(float(loss.detach()))
        if step % 4 == 1:
            with torch.no_grad():
                losses.append(float(loss_of(made, batch(500 + step, size=40))))
    return losses


def contents(made: EmbeddingBagCollection) -> list[dict[str, Tensor]]:
    return [shard.read(0, shard.shard.num_rows) for shard in made.shards]


def same(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> bool:
    each = zip(a, b, strict=True)
    return all(x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x) for x, y in each)


@pytest.mark.parametrize("cell", sample(CELLS, 6, seed=0), ids=lambda cell: " ".join(cell.values()))
def test_losses_rows_and_states_are_those_of_resident_tables(cell: dict[str, Any], tmp_path: Path) -> None:
    """The cache has slots for little more than a step, or for half of the rows."""
    near = {"big": 80, "small": 36} if cell["near"] == "tight" else {"big": 250, "small": 40}
    resident = collection(cell["optimizer"], cell["dtype"])
    tiered = placed(cell["tier"], near, cell["optimizer"], cell["dtype"], tmp_path)
    assert train(tiered) == train(resident)
    assert all(isinstance(shard, TieredShard) for shard in tiered.shards)
    assert same(contents(tiered), contents(resident))


@pytest.mark.parametrize("tier", ["cached", "disk"])
def test_penalties_of_lookups_and_the_norm_of_all_rows_are_those_of_resident_tables(tier: str, tmp_path: Path) -> None:
    """The results are equal bit for bit, though rows have another order."""
    near = {"big": 80, "small": 36}
    assert train(placed(tier, near, "lookups", "float32", tmp_path / "a")) == train(collection("lookups", "float32"))
    tiered, resident = placed(tier, near, "lookups", "float32", tmp_path / "b"), collection("lookups", "float32")
    factors: list[list[float]] = [[], []]
    for step in range(8):
        for made, values in zip((tiered, resident), factors, strict=True):
            flight = made.start_input_dist(weighed(made, batch(step)))
            flight.clip = lambda rows, _, values=values: (
                values.append(GradientClipper(norm=0.5, includes_rows=True)([], rows)) or values[-1]
            )
            loss_of_batch(made, made.input_dist(flight)).backward()
            flight.finish_update()
    assert factors[0] == factors[1] and 0 < min(factors[0]) < 1
    assert same(contents(tiered), contents(resident))


def test_host_is_memory_where_the_rank_computes_on_a_cpu() -> None:
    resident, made = collection("adam", "float16"), collection("adam", "float16")
    made.apply_plan(Plan.from_dict({"tables": {"*": {"sharding": "table_wise", "tier": "host"}}}, made.tables, 1))
    assert (
        all(isinstance(shard, TableShard) and not shard.is_offloaded for shard in made.shards)
        and not made.has_offloaded_rows
    )
    assert train(made) == train(resident) and same(contents(made), contents(resident))


@pytest.mark.parametrize("tier", ["cached", "disk"])
def test_writes_reads_and_copies_for_saves(tier: str, tmp_path: Path) -> None:
    """All names and some names are read, from cached rows and others. A copy stays unchanged while training
    continues."""
    resident = collection("adam", "bfloat16")
    tiered = placed(tier, {"big": 90, "small": 40}, "adam", "bfloat16", tmp_path)
    for made in (resident, tiered):
        train(made, 5)
        values = {name: as_stored(value[3:70] * 0.5).numpy() for name, value in contents(made)[0].items()}
        made.shards[0].write(3, values)
        made.shards[0].write(40, {ROW: values[ROW][:20]})
        rows = torch.tensor([1, 7, 200, 499])
        made.shards[0].scatter(rows, {name: value[:4] for name, value in values.items()})
        made.shards[0].scatter(rows, {ROW: values[ROW][4:8]})
        made.shards[0].scatter(torch.tensor([], dtype=torch.int64), {ROW: values[ROW][:0]})
    assert same(contents(tiered), contents(resident))
    frozen = [made.shards[0].snapshot() for made in (resident, tiered)]
    before = [{name: value.clone() for name, value in one.read(0, ROWS["big"]).items()} for one in frozen]
    for made in (resident, tiered):
        train(made, 5)
    assert same(contents(tiered), contents(resident))
    after = [one.read(0, ROWS["big"]) for one in frozen]
    assert same([before[0]], [before[1]]) and same(before, after)
    rows = torch.tensor([0, 5, 77, 401])
    taken = [made.shards[0].gather(rows) for made in (resident, tiered)]
    assert same([taken[0]], [taken[1]])


def test_a_save_in_the_background_lets_its_copies_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a file is cleaned while a copy is held. Later rows are saved as well."""
    ended: list[HostBackingStoreSnapshot] = []

    def close(frozen: HostBackingStoreSnapshot) -> None:
        ended.append(frozen)

    monkeypatch.setattr(HostBackingStoreSnapshot, "close", close)
    tiered = placed("cached", {"big": 80, "small": 40}, "adam", "float32", tmp_path)
    background = BackgroundSaver(World.single())
    for number in (1, 2):
        train(tiered, 3)
        background.start(
            tmp_path / "saved",
            step=number,
            plan=tiered.plan,
            shards=tiered.shards,
            dense={},
            state={},
            on_saved=lambda world: None,
        )
        background.wait()
        assert len(ended) == 2 * number
    resident = collection("adam", "float32")
    checkpoint.load(tmp_path / "saved" / "step-000000002", world=World.single(), shards=resident.shards)
    assert same(contents(tiered), contents(resident))


def test_a_batch_that_does_not_fit_is_named(tmp_path: Path) -> None:
    tiered = placed("cached", {"big": 4, "small": 36}, "sgd", "float32", tmp_path)
    refusal = (
        r"table 'big', rows 0\.\.499: a batch looks up \d+ distinct rows, but the cache has 4 slots; set cache_rows of"
    )
    with pytest.raises(MesetaError, match=refusal):
        loss_of(tiered, batch(0))
    assert same(contents(tiered), contents(collection("sgd", "float32")))
    with torch.no_grad():  # rows of a separate read have separate slots
        assert float(loss_of(tiered, batch(0))) == float(loss_of(collection("sgd", "float32"), batch(0)))


def test_a_damaged_row_fails_both_leases_of_it(tmp_path: Path) -> None:
    """Both leases fail. The intact row of the second one is cached and correct."""
    big = placed("disk", {"big": 80, "small": 40}, "sgd", "float32", tmp_path).shards[0]
    assert isinstance(big, TieredShard) and isinstance(big.backing_store, RowFile)
    values = big.read(0, ROWS["big"])
    big.write(0, {name: value.numpy() for name, value in values.items()})
    big.backing_store.flush()
    damage(Path(big.backing_store.path), values[ROW][7].numpy().tobytes())
    leases = [Lease([big], fetch_rows([big], [(0, torch.tensor(rows))])) for rows in ([7, 8], [8, 9])]
    for lease in leases:
        with pytest.raises(MesetaError, match="the checksum of row 7 is wrong"):
            lease.wait()
    for lease in leases:
        lease.release()
    assert big.cache.cached_rows().tolist() == [9] and big.cache.num_pinned == 0
    assert same([big.read(8, 60)], [{name: value[8:60] for name, value in values.items()}])


def test_a_pass_that_never_comes_back_pins_nothing(tmp_path: Path) -> None:
    tiered = placed("cached", {"big": 80, "small": 40}, "sgd", "float32", tmp_path)
    for number in range(40):
        loss_of(tiered, batch(number))
    assert train(tiered) == train(collection("sgd", "float32"))


def test_an_evaluation_pushes_nothing_out(tmp_path: Path) -> None:
    tiered = placed("cached", {"big": 100, "small": 40}, "sgd", "float32", tmp_path)
    train(tiered, 6)
    [big, _] = tiered.shards
    assert isinstance(big, TieredShard)
    before = big.cache.cached_rows()
    with torch.no_grad():
        for number in range(20):
            loss_of(tiered, batch(900 + number, size=50))
    assert torch.equal(before, big.cache.cached_rows())


@pytest.mark.parametrize("tier", ["cached", "disk"])
def test_traffic_is_that_of_the_ids(tier: str, tmp_path: Path) -> None:
    """With room for all rows, each is missed once. With room for one batch, each row that the batch before did not
    contain is missed."""
    batches = [batch(number) for number in range(5)]
    of_big = [np.unique(np.concatenate([kjt[name].values.numpy() for name in FEATURES[:2] + FEATURES[3:4]]))
              for kjt in batches]  # fmt: skip
    made = placed(tier, {"big": ROWS["big"], "small": 40}, "adagrad", "float32", tmp_path)
    for kjt in batches:
        loss_of(made, kjt).backward()
    traffic = made.row_traffic["big"]
    assert traffic.num_rows == sum(map(len, of_big)) and traffic.num_misses == len(np.unique(np.concatenate(of_big)))
    assert traffic.num_evicted == traffic.read_bytes == traffic.written_bytes == 0
    made.shards[0].snapshot().close()
    assert made.row_traffic["big"].num_evicted == traffic.num_misses
    assert made.row_traffic["big"].evicted_bytes == traffic.num_misses * 2 * 24 * 4


def test_plans_that_cannot_be_are_named() -> None:
    made = collection("sgd", "float32")
    one = partial(Plan.from_dict, tables=made.tables, num_ranks=1)
    with pytest.raises(MesetaError, match="data_parallel supports only tier 'hbm'"):
        Plan.from_dict({"tables": {"*": {"sharding": "data_parallel", "tier": "disk"}}}, made.tables, 2)
    with pytest.raises(MesetaError, match=r"table 'big' has shards in tier 'disk', which requires storage\.dir"):
        made.apply_plan(one({"tables": {"*": {"sharding": "table_wise", "tier": "disk"}}}))
    all_rows = [replace(t, optimizer=OptimizerSpec(name="adam", lr=0.1, stepped_rows="all")) for t in made.tables]
    with pytest.raises(MesetaError, match="stepped_rows 'all' of its optimizer requires tier 'hbm'"):
        Plan.from_dict({"tables": {"*": {"sharding": "table_wise", "tier": "cached"}}}, all_rows, 1)
    with pytest.raises(MesetaError, match="only tiers 'cached' and 'disk' have a cache"):
        one({"tables": {"*": {"sharding": "table_wise", "cache_rows": 3}}})
    with pytest.raises(MesetaError, match=r"cache_rows must be an integer in 1\.\.500"):
        one({"tables": {"*": {"sharding": "table_wise", "tier": "cached", "cache_rows": 0}}})


def test_an_optimizer_whose_states_cannot_be_made_row_by_row_is_named() -> None:
    spec = tables("adam", "float32")[0]
    sound = make_row_optimizer(spec.optimizer)
    check_row_init(spec, sound)
    for init in (
        lambda weight: {"mean": row_state(weight, float(weight.mean()))},
        lambda weight: {"count": torch.zeros(3)},
        lambda weight: {"first": row_state(weight)} if len(weight) > 3 else {},
    ):
        with pytest.raises(
            MesetaError, match=r"table 'big': .* `init` of optimizer 'adam' the state of a row depends on other rows"
        ):
            check_row_init(spec, replace(sound, init=init))


@pytest.mark.parametrize("tier", ["cached", "disk"])
@pytest.mark.parametrize("near", [120, 250])
def test_rows_prefetched_while_another_batch_is_trained(tier: str, near: int, tmp_path: Path) -> None:
    """Two batches are prefetched that share many rows, and a shared row takes one slot. Evaluations, reads and frozen
    copies come in between, and some batches are dropped."""
    resident = collection("adam", "bfloat16")
    tiered = placed(tier, {"big": near, "small": 40}, "adam", "bfloat16", tmp_path)
    results = []
    for made in (resident, tiered):
        open_: list[Any] = []
        losses, copies = [], []
        for number in range(14):
            context = made.input_dist(made.start_input_dist(weighed(made, batch(number, drift=11))))
            made.prefetch(context)
            open_.append(context)
            if number % 5 == 3:
                dropped = made.input_dist(made.start_input_dist(weighed(made, batch(300 + number))))
                made.prefetch(dropped)
                made.drop(dropped)
            if len(open_) < 3:
                continue
            if number % 4 == 0:
                with torch.no_grad():
                    losses.append(float(loss_of(made, batch(700 + number, size=30))))
                frozen = made.shards[0].snapshot()
                copies.append({name: value.clone() for name, value in frozen.read(0, ROWS["big"]).items()})
            loss = loss_of_batch(made, open_.pop(0))
            loss.backward()
            losses.append(float(loss.detach()))
        results.append((losses, copies, contents(made)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1]) and same(results[0][2], results[1][2])


@pytest.mark.parametrize(("lookahead", "near"), [(0, 60), (1, 120), (8, 40), (8, 300)])
def test_a_custom_loop_prefetches(lookahead: int, near: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Prefetching stops when the cache is full, and one note says so."""
    losses = []
    for made in (
        collection("adagrad", "float16"),
        placed("disk", {"big": near, "small": 40}, "adagrad", "float16", tmp_path, lookahead),
    ):
        model, batches = torch.nn.Module(), [Sparse(weighed(made, batch(number))) for number in range(12)]
        model.embeddings = made
        of_model = []
        for one in ahead(batches, model):
            loss = loss_of_batch(made, one.sparse)
            loss.backward()
            of_model.append(float(loss.detach()))
        losses.append((of_model, contents(made)))
    assert losses[0][0] == losses[1][0] and same(losses[0][1], losses[1][1])
    said = capfd.readouterr().err.count("note: fewer than 8 batches are prefetched")
    assert said == int((lookahead, near) == (8, 40))
