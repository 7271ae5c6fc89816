"""`meseta verify` accepts correct runs, and reports a fault on one rank with its table, row, column and step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meseta.cli import verify as command
from meseta.cli.main import main
from meseta.comm import World
from meseta.config import RunConfig
from meseta.embedding import ShardedEmbeddingBagCollection
from meseta.spec import MesetaError
from meseta.train.verify import Verification, compare, record, steps
from meseta.train.verify.compare import ToleranceRule, find_violations, max_difference
from small_run import settings, write_config

from .pool import RankPool

Ranks = Callable[[int], RankPool]
COLUMNS = {"tables": {"*": "column_wise"}}
MIXED = {"tables": {"city": "data_parallel", "item": "column_wise", "tags": "row_wise", "user": "table_wise"}}
HOSTS = {
    "devices_per_host": 2,
    "tables": {
        "city": {"sharding": "hot_replicated", "hot_rows": 3},
        "item": "table_column_wise",
        "tags": "grid",
        "user": "table_row_wise",
    },
}
WIDE = {"model__embedding_dim": 32, "model__bottom_mlp": [16], "checkpoint__resume": "never"}
AT = {"phase": "training", "step": 2}
"""Phase and step of the fault."""


def record_here(document: dict[str, Any], folder: Path, num_steps: int, fault: str | None = None) -> None:
    """Record steps for `meseta verify`, with a fault on rank 1. Runs on every rank."""
    world, run_steps, lr = World.current(), steps.run_steps, ShardedEmbeddingBagCollection.lr

    def with_fault(config: RunConfig, world: World, phase: str, *args: Any) -> Iterator[steps.RecordedStep]:
        for result in run_steps(config, world, phase, *args):
            if world.rank == 1 and fault is not None and {"phase": phase, "step": result.number} == AT:
                shard = next(s for s in result.shards if s.spec.name == "item")
                touched = set(result.touched_rows["item"].tolist())
                rows = [r for r in range(40) if (r in touched) == (fault != "stray")]
                if fault in ("row", "stray"):
                    shard.weight[rows[1], 3] += 0.001
                if fault == "state":
                    next(iter(shard.state.values()))[rows[2]] += 0.01
            yield result

    def double(self: ShardedEmbeddingBagCollection, context: Any, table: Any) -> float:
        return lr(self, context, table) * (2 if table.name == "city" and self.step == 2 else 1)

    if world.rank == 1 and fault == "optimizer":
        ShardedEmbeddingBagCollection.lr = double  # type: ignore[method-assign]
    steps.run_steps = with_fault
    try:
        record(RunConfig.model_validate(document), world, folder, num_steps)
    finally:
        steps.run_steps, ShardedEmbeddingBagCollection.lr = run_steps, lr  # type: ignore[method-assign]


def verify(
    ranks: Ranks, document: dict[str, Any], folder: Path, num_steps: int = 3, fault: str | None = None, size: int = 2
) -> Verification:
    folder.mkdir()
    ranks(size).run(record_here, document, folder, num_steps, fault)
    verification = compare(RunConfig.model_validate(document), folder, num_steps, size)
    assert list(folder.iterdir()) == []
    assert verification.num_steps == num_steps
    return verification


def touched_by(document: dict[str, Any], feature: str, step: int) -> list[int]:
    """Return the rows of a feature in a global batch, read independently of the code under test."""
    from meseta.data.dataset.dataset import Dataset
    from meseta.train.setup.build import make_reader

    config = RunConfig.model_validate(document)
    reader = make_reader(config, Dataset.load(config.data.dir), "train", World.single())
    batches = reader.epoch()
    for _ in range(step):
        batch = next(batches)
    batches.close()
    return sorted(set(batch.sparse[feature].values.tolist()))


@pytest.mark.parametrize(
    ("changes", "size", "bound"),
    [
        ({"plan": MIXED, "embedding__dtype": "float64", "embedding__pooling": "mean"}, 2, 1e-10),
        ({"plan": COLUMNS, "train__accumulate_steps": 2, "train__clip_norm": 0.05}, 2, 1e-5),
        ({"plan": {"tables": {"*": "row_wise"}}, "train__batch_size": 2}, 2, 1e-5),
        pytest.param(
            {"plan": MIXED, "embedding__dtype": "bfloat16", "embedding__optimizer__stepped_rows": "all"},
            2,
            1.0,
            marks=pytest.mark.soak,
        ),
        pytest.param(
            {"plan": MIXED, "embedding__pooling": "mean", "train__batch_size": 61}, 4, 1e-5, marks=pytest.mark.soak
        ),
        ({"plan": HOSTS, "dense__sharding": "fsdp"}, 4, 1e-5),
    ],
)
def test_correct_runs_are_equal(
    ranks: Ranks, tiny: Path, tmp_path: Path, changes: dict[str, Any], size: int, bound: float
) -> None:
    verification = verify(
        ranks, settings(tiny, tmp_path / "run", **{**WIDE, **changes}), tmp_path / "records", 2, size=size
    )
    assert verification.first_mismatch is None
    for phase in ("embedding", "training"):
        assert set(verification.tables[phase]) == {"user", "item", "city", "tags"}
        assert all(result.max_row_difference <= bound for result in verification.tables[phase].values())
    item = verification.tables["embedding"]["item"]
    assert item.rule == ToleranceRule("bits") and item.max_row_difference == item.max_state_difference == 0.0


def test_a_changed_row(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    document = settings(tiny, tmp_path / "run", **WIDE, plan=COLUMNS)
    verification = verify(ranks, document, tmp_path / "records", 2, fault="row")
    row = touched_by(document, "item", 2)[1]
    first = verification.first_mismatch
    assert first is not None and (first.phase, first.step) == ("training", 2)
    assert (first.table, first.row, first.column, first.rank) == ("item", row, 16 + 3, 1)
    assert first.values[0] - first.values[1] == pytest.approx(0.001, abs=1e-6)
    assert verification.tables["training"]["item"].max_row_difference == pytest.approx(0.001, abs=1e-5)
    assert str(first).startswith(f"step 2 (training): table 'item', row {row:,}, column 19, is ")


@pytest.mark.parametrize(("scheme", "size"), [("table_wise", 1), ("row_wise", 2)])
def test_offloaded_tables(ranks: Ranks, tiny: Path, tmp_path: Path, scheme: str, size: int) -> None:
    """The cache is little larger than a batch needs, and other tables are in memory."""
    tables = {
        "*": {"sharding": scheme, "tier": "disk", "cache_rows": 150},
        "tags": {"sharding": scheme, "tier": "cached", "cache_rows": 50},
        "city": scheme,
    }
    changes = {**WIDE, "plan": {"tables": tables}, "storage__dir": str(tmp_path / "scratch")}
    verification = verify(ranks, settings(tiny, tmp_path / "run", **changes), tmp_path / "records", 2, size=size)
    assert verification.first_mismatch is None
    assert all(
        result.max_row_difference == result.max_state_difference == 0.0
        for result in verification.tables["embedding"].values()
    )


@pytest.mark.parametrize("tier", [pytest.param("hbm", marks=pytest.mark.soak), "disk"])
def test_a_wrong_optimizer_on_one_rank(ranks: Ranks, tiny: Path, tmp_path: Path, tier: str) -> None:
    """Table 'city' has twice the rate in the third step. The embedding phase comes first and reports it."""
    plan = {"tables": {"*": {"sharding": "column_wise", "tier": tier}}}
    storage = {"storage__dir": str(tmp_path / "scratch"), "storage__cache_bytes": 1 << 20}
    document = settings(tiny, tmp_path / "run", **WIDE, **storage, plan=plan)
    first = verify(ranks, document, tmp_path / "records", fault="optimizer").first_mismatch
    assert first is not None and (first.phase, first.step, first.rule) == ("embedding", 3, ToleranceRule("bits"))
    assert (first.table, first.column // 16, first.rank) == ("city", 1, 1)
    assert first.row == touched_by(document, "city", 3)[0]


@pytest.mark.parametrize(("fault", "step", "what"), [("stray", 3, "which no batch read"), ("state", 2, "state")])
def test_changes_outside_touched_rows(
    ranks: Ranks, tiny: Path, tmp_path: Path, fault: str, step: int, what: str
) -> None:
    """A row that no batch looked up is reported at the end, and an optimizer state in its step."""
    plan = {"tables": {"*": "table_wise", "item": {"sharding": "table_wise", "ranks": [1]}}}
    document = settings(tiny, tmp_path / "run", **WIDE, plan=plan)
    document["train"]["batch_size"] = 9  # so that some rows are never looked up
    document["train"]["epochs"] = 1
    first = verify(ranks, document, tmp_path / "records", fault=fault).first_mismatch
    assert first is not None and (first.phase, first.step, first.table, first.rank) == ("training", step, "item", 1)
    assert what in first.description


def test_tolerance_rules() -> None:
    """Neighbours of 16 bits match torch.nextafter, and non-finite values are compared."""
    values = torch.tensor([-1.0, -0.0, 0.0, 0.5, 6e-8, 65504.0], dtype=torch.float16)
    up = torch.tensor([torch.nextafter(v, torch.tensor(torch.inf, dtype=torch.float16)) for v in values])
    up = up.to(torch.float16)
    for other, wrong in ((values, False), (up, False), (values + values.abs() * 0.01 + 1e-3, True)):
        assert find_violations(ToleranceRule("neighbours"), other, values, torch.zeros(6), False).any() == wrong
    nan, one = torch.tensor([torch.nan, torch.nan, torch.inf]), torch.tensor([torch.nan, 1.0, torch.inf])
    largest, difference = max_difference(nan, one)
    assert largest == torch.inf and difference.tolist() == [0.0, torch.inf, 0.0]
    assert find_violations(ToleranceRule("tolerance", 1e-5), nan, one, difference, False).tolist() == [
        False,
        True,
        False,
    ]
    assert find_violations(
        ToleranceRule("bits"), torch.tensor([0.0]), torch.tensor([-0.0]), torch.zeros(1), False
    ).all()


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["meseta", "verify", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.mark.parametrize(
    ("faults", "code"), [((None,), 0), (("row", "row"), 1), (("row", None), 0)], ids=["none", "a fault", "rounding"]
)
def test_the_command(
    ranks: Ranks, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    faults: tuple[str | None, ...], code: int,
) -> None:  # fmt: skip
    """The pool replaces new ranks, which docs/verify.md starts. A difference in float32 is checked again in float64. If
    it disappears there, as in the third case, it was rounding."""
    document = settings(tiny, tmp_path / "run", **WIDE)
    path, calls = write_config(tmp_path / "run.yaml", document), []

    def start(arguments: list[str], num_ranks: int, limits: object) -> int:
        calls.append(arguments)
        folder = Path(arguments[arguments.index("--record-to") + 1])
        wide = {"embedding__dtype": "float64"} if "--float64" in arguments else {}
        config = settings(tiny, tmp_path / "run", **WIDE, **wide)
        ranks(num_ranks).run(record_here, {**config, "plan": COLUMNS}, folder, 2, faults[len(calls) - 1])
        return 0

    monkeypatch.setattr(command, "run_ranks", start)
    monkeypatch.setattr(command, "exec_module", lambda _, words: sys.exit(call(monkeypatch, *words[1:])))
    assert call(monkeypatch, path, "--plan", "column_wise", "--nproc", 2, "--steps", 2) == code
    out = capsys.readouterr().out
    assert [config[:2] for config in calls] == [["verify", str(path)]] * len(faults)
    assert "item   column_wise" in out and "loss of step 2: " in out
    assert ("no difference exceeds the tolerances" in out) == (code == 0)
    assert out.count("differs first in step 2 (training): table 'item', row ") == faults.count("row")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.batchsize=3"], "did you mean 'batch_size'"),
        (["plan=[1]"], "key 'plan'"),
        (["embedding.dtype=float65"], "embedding.dtype"),
    ],
)
def test_an_invalid_argument_is_one_line(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], words: str,
) -> None:  # fmt: skip
    path = write_config(tmp_path / "run.yaml", settings(tiny, tmp_path / "run"))
    assert call(monkeypatch, path, *arguments) == 1
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


def test_under_torchrun(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MesetaError, match="instead of torchrun"):
        command.verify(write_config(tmp_path / "run.yaml", settings(tiny, tmp_path / "run")))
