"""Tables in caches and backing stores, on several ranks and in whole runs, have the bits of tables in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meseta.spec import Communication, MesetaError
from meseta.spec.optimizer import USED_FIELDS
from meseta.spec.stages import OVERLAPS
from sampling import product, sample
from small_run import final_checksum, metrics, settings, tiny_data, train, without_times

from .pool import RankPool
from .scenario import IS_SOAK, Scenario
from .scenario import train as train_scenario

Ranks = Callable[[int], RankPool]
CELLS = product(
    optimizer=sorted(USED_FIELDS),
    dtype=["float32", "float64"],
    sharding=["mixed", "mixed of hosts", "column_wise", "row_wise", "grid", "table_wise"],
    tier=["cached", "disk"],
    pooling=["mean", "none"],
)
SCHEMES = {"user": "row_wise", "item": "table_wise", "city": "column_wise", "tags": "row_wise"}
WIDE = {"model__embedding_dim": 32, "model__bottom_mlp": [8, 32]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.getbasetemp() / "data")


@pytest.mark.parametrize("cell", sample(CELLS, 5, seed=189))
def test_offloaded_shards_of_any_scheme_have_the_bits_of_resident_ones(
    ranks: Ranks, cell: dict[str, Any], tmp_path: Path
) -> None:
    """Every other cell has a hierarchical exchange, and some have codecs."""
    kinds = {"optimizer": cell["optimizer"], "dtype": cell["dtype"], "sharding": cell["sharding"]}
    scenario = Scenario(
        weighted=cell["pooling"] != "none", pooling=cell["pooling"], num_steps=4 if IS_SOAK else 3, **kinds
    )
    if cell["optimizer"] < "l":
        scenario = scenario.but(exchange="hierarchical")
    if cell["dtype"] == "float32" and cell["tier"] == "disk":
        scenario = scenario.but(comm=Communication(precision="int8"))
    size = 2 if cell["sharding"] in ("mixed", "row_wise") else 4
    tiered = scenario.but(tier=cell["tier"], cache_rows=72, folder=str(tmp_path))
    expected, results = (ranks(size).run(train_scenario, one) for one in (scenario, tiered))
    for got, resident in zip(results, expected, strict=True):
        assert got["losses"] == resident["losses"]
        for (place, weight, state), (other, rows, states) in zip(got["shards"], resident["shards"], strict=True):
            assert (place.table, place.rows, place.columns) == (other.table, other.rows, other.columns)
            assert torch.equal(weight, rows) and state.keys() == states.keys()
            assert all(torch.equal(state[name], value) for name, value in states.items())
    assert not [*tmp_path.iterdir()] or cell["tier"] == "disk"


def fails(scenario: Scenario) -> str:
    with pytest.raises(MesetaError) as raised:
        train_scenario(scenario)
    return str(raised.value)


def test_a_full_cache_on_one_rank_raises_on_all(ranks: Ranks, tmp_path: Path) -> None:
    """Table 'wide' is cut by rows and has one slot on each rank. Table 'tiny' has one row, on rank 0."""
    scenario = Scenario("row_wise", "sum", False, "sgd", tier="cached", cache_rows=1)
    first, second = ranks(2).run(fails, scenario)
    assert first == second and first.startswith("rank 0: table 'small', rows 0..3: a batch looks up ")
    assert "but the cache has 1 slots; set cache_rows of the table" in first


def document(tiny: Path, run: Path, size: int, tier: str, lookahead: Any, **changes: Any) -> dict[str, Any]:
    """Return the config of a run with tables in this tier. Its cache is little larger than a batch needs."""
    placement = {} if tier == "hbm" else {"tier": tier, "cache_rows": 150}
    storage = {"dir": str(run.parent / "scratch"), "lookahead": lookahead}
    tables = {name: {"sharding": sharding, **placement} for name, sharding in SCHEMES.items()}
    return settings(tiny, run, **WIDE, **changes, plan={"tables": tables}, storage=storage)


@pytest.mark.parametrize(
    ("size", "overlap"),
    [
        pytest.param(1, "off", marks=pytest.mark.soak),
        pytest.param(2, "off", marks=pytest.mark.soak),
        (2, list(OVERLAPS)),
    ],
    ids=["1-off", "2-off", "2-all"],
)
def test_a_run_ends_with_the_checksum_of_one_in_memory(
    ranks: Ranks, tiny: Path, tmp_path: Path, size: int, overlap: Any
) -> None:
    """Runs have two parts in different tiers, micro-batches, background saves and evaluations. No file is left."""
    common = {
        "train__accumulate_steps": 2,
        "train__eval_every_steps": 2,
        "checkpoint__every_steps": 2,
        "checkpoint__background": "always",
        "embedding__dtype": "bfloat16",
        **({} if size == 1 else {"pipeline__overlap": overlap}),
    }
    cases: list[Any] = [(("hbm", "hbm"), "auto"), (("disk", "cached"), 3), (("cached", "disk"), 0)]
    for tiers, lookahead in cases if IS_SOAK else cases[:2]:
        run = tmp_path / "-".join(tiers)
        for tier, last in zip(tiers, (3, 5) if IS_SOAK else (3, 4), strict=True):
            one = document(tiny, run, size, tier, lookahead, **common, train__max_steps=last)
            _ = [train(one)] if size == 1 else ranks(size).run(train, one)
            noted = json.loads((run / "environment.json").read_text()).get("row_files")
            assert noted is None if tier != "disk" else re.search("direct, blocks of|page cache", noted)
        lines = [line for line in metrics(run) if line["kind"] == "train"]
        is_offloaded = tiers != ("hbm", "hbm")
        assert ("Cache traffic per step" in (run / "report.html").read_text()) == is_offloaded
        assert all(
            (set(line["row_traffic"]) == set(SCHEMES)) if is_offloaded else "row_traffic" not in line for line in lines
        )
        for traffic in (of_table for line in lines if is_offloaded for of_table in line["row_traffic"].values()):
            assert 0 <= traffic["num_misses"] <= traffic["num_rows"] and traffic["wait_s"] >= 0
    runs = [run for run in sorted(tmp_path.iterdir()) if run.name != "scratch"]
    first, *others = [(final_checksum(run), without_times(metrics(run))) for run in runs]
    assert all(result == first for result in others)
