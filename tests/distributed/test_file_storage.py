"""Rows in file storage, which has another order and lends copies to operators, have the bits of resident rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from file_storage import FileStorage, files_for_rows
from meseta import checkpoint
from meseta.checkpoint.exporting import export
from meseta.comm import World
from meseta.config import RunConfig
from meseta.spec.optimizer import USED_FIELDS
from meseta.storage import ROW
from meseta.train import verify
from meseta.train.interop.importing import import_model
from meseta.train.trained_model import load_trained
from sampling import product, sample
from small_run import final_checksum, metrics, settings, tiny_data, train, without_times

from .pool import RankPool
from .scenario import IS_SOAK, Scenario
from .scenario import train as train_scenario

Ranks = Callable[[int], RankPool]
OPTIMIZERS = sorted(USED_FIELDS)
CELLS = [
    {"sharding": sharding, "optimizer": optimizer, "pooling": pooling}
    for optimizer in OPTIMIZERS
    for sharding, pooling in (("mixed", "mean"), ("mixed of hosts", "none"))
]
WIDE = {"model__embedding_dim": 32, "model__bottom_mlp": [8, 32]}
REPLICAS = {"user": "row_wise", "item": "data_parallel", "city": "column_wise", "tags": "data_parallel"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.getbasetemp() / "data")


def in_files(call: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Return the result of a call whose rows are in files, and the number of copies lent. All copies are returned."""
    with files_for_rows() as made:
        result = call(*arguments)
        assert made and all(isinstance(piece, FileStorage) and piece.num_lent == 0 for piece in made)
        return result, sum(piece.num_copies for piece in made)


def scenario_in_files(scenario: Scenario) -> Any:
    return in_files(train_scenario, scenario)


@pytest.mark.parametrize("cell", sample(CELLS, 4, seed=3), ids=lambda cell: " ".join(cell.values()))
def test_all_row_optimizers_update_lent_rows_identically(ranks: Ranks, cell: dict[str, Any]) -> None:
    scenario = Scenario(weighted=cell["pooling"] != "none", **cell)
    size = 4 if "hosts" in scenario.sharding else 2
    expected = ranks(size).run(train_scenario, scenario)
    for (got, num_copies), resident in zip(ranks(size).run(scenario_in_files, scenario), expected, strict=True):
        assert got["losses"] == resident["losses"]
        assert num_copies == scenario.num_steps * len(resident["shards"])
        for (place, weight, state), (other, rows, states) in zip(got["shards"], resident["shards"], strict=True):
            assert place == other and torch.equal(weight, rows) and state.keys() == states.keys()
            assert all(torch.equal(state[name], value) for name, value in states.items())


def train_in_files(document: dict[str, Any]) -> Any:
    return in_files(train, document)


def runs(ranks: Ranks, size: int, document: dict[str, Any], files: bool) -> list[Any]:
    """Run the config on `size` ranks."""
    if size == 1:
        return [train_in_files(document)[0] if files else train(document)]
    return ranks(size).run(train_in_files if files else train, document)


def plan_for(size: int) -> dict[str, Any]:
    return {} if size == 1 else {"plan": {"tables": REPLICAS}}


@pytest.mark.parametrize("case", sample(product(size=[1, 2], background=["always", "never"]), 1, seed=3))
def test_a_run_resumes_under_another_plan_and_storage(
    ranks: Ranks, tiny: Path, tmp_path: Path, case: dict[str, Any]
) -> None:
    """Each run has two parts, in files or resident, with micro-batches, replicas and saves."""
    saves = {"checkpoint__every_steps": 2, "checkpoint__background": case["background"]}
    common, size = {**WIDE, "train__accumulate_steps": 2, **saves}, case["size"]
    other = 3 - size
    one_in_files = [(True, False), (False, True)] if IS_SOAK else []
    for files in ((False, False), (True, True), *one_in_files):
        run = tmp_path / "-".join(map(str, files))
        first = settings(tiny, run, **common, **plan_for(size), train__max_steps=3)
        runs(ranks, size, first, files[0])
        runs(ranks, other, settings(tiny, run, **common, **plan_for(other), train__max_steps=5), files[1])
    resident, *others = [(final_checksum(run), without_times(metrics(run))) for run in sorted(tmp_path.iterdir())]
    assert all(result == resident for result in others)


def record_in_files(document: dict[str, Any], folder: Path, files: bool) -> None:
    """Record steps for `meseta verify`. Runs on every rank."""
    with files_for_rows() if files else nullcontext():
        verify.record(RunConfig.model_validate(document), World.current(), folder, 3)


@pytest.mark.parametrize("files", [(True, False), (False, True)])
def test_verify_accepts_both_storages(ranks: Ranks, tiny: Path, tmp_path: Path, files: tuple[bool, bool]) -> None:
    document = settings(tiny, tmp_path / "run", **WIDE, **plan_for(2))
    (tmp_path / "records").mkdir()
    ranks(2).run(record_in_files, document, tmp_path / "records", files[0])
    with files_for_rows() if files[1] else nullcontext():
        verification = verify.compare(RunConfig.model_validate(document), tmp_path / "records", 3, 2)
    assert verification.first_mismatch is None and set(verification.tables["training"]) == set(REPLICAS)


def test_imports_and_exports(tiny: Path, tmp_path: Path) -> None:
    """Rows of another model in float32 are rounded to those of the tables."""
    source = settings(tiny, tmp_path / "source", train__max_steps=3)
    train(source)
    model = load_trained(tmp_path / "source", "test", World.single()).model
    pieces = [(s.spec.name, s.read(0, s.shard.num_rows)[ROW]) for s in model.embeddings.shards]
    tensors = {f"embeddings.{name}.weight": rows for name, rows in pieces} | dict(model.state_dict())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    checksums, exported = [], []
    for files in (False, True):
        run = tmp_path / f"run {files}"
        document = settings(tiny, run, train__max_steps=3, embedding__dtype="bfloat16")
        with files_for_rows() if files else nullcontext():
            import_model(tmp_path / "model.safetensors", "torch", RunConfig.model_validate(document))
            train(document)
        checksums.append(final_checksum(run))
        saved, out = checkpoint.latest_complete(run / "checkpoints"), tmp_path / f"exported {files}"
        assert saved is not None
        export(saved, out, "safetensors", states=True)
        exported.append({path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()})
    assert checksums[0] == checksums[1]
    assert exported[0] == exported[1] and exported[0]
