"""Stale embeddings against a plain loop that keeps the previous rows, over ranks and over checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meseta.comm import World
from meseta.data.read.batch import Batch, split_batch
from meseta.pipeline import Pipeline
from meseta.spec import MesetaError
from meseta.spec.stages import OVERLAPS, Overlap
from meseta.storage import ROW
from sampling import product, sample
from small_run import final_checksum, metrics, settings, train, without_times

from .pool import RankPool
from .scenario import IS_SOAK
from .test_overlap import PRECISIONS, SIZES, checksum, make_model, slices
from .test_training import MIXED, ROW_WISE, WIDE, message_of, train_on, train_until

Ranks = Callable[[int], RankPool]
CASES = product(size=[2, 4, 8], exchange=["flat", "hierarchical"], precision=[*PRECISIONS], accumulate_steps=[1, 3])


def make(exchange: str, precision: str) -> tuple[Any, World]:
    return make_model(exchange, PRECISIONS[precision])  # type: ignore[arg-type]


def make_pipeline(model: Any, world: World, accumulate_steps: int, *, overlap: Any = (), stale: bool) -> Pipeline:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    pipeline = Pipeline(model, optimizer, world, accumulate_steps=accumulate_steps, overlap=overlap)
    pipeline.uses_stale_embeddings = stale
    return pipeline


def train_late(exchange: str, precision: str, accumulate_steps: int, overlap: tuple[Overlap, ...]) -> Any:
    """Return losses and checksum after training with stale embeddings. Runs on every rank."""
    model, world = make(exchange, precision)
    pipeline = make_pipeline(model, world, accumulate_steps, overlap=overlap, stale=True)
    return [step.loss for step in pipeline.steps(slices(world, SIZES))], checksum(model)


def train_plainly(exchange: str, precision: str, accumulate_steps: int) -> Any:
    """Return losses and checksum of a loop without look-ahead. A second model, with the rows of one update before,
    looks up each batch."""
    model, world = make(exchange, precision)
    former, _ = make(exchange, precision)
    pipeline, score = make_pipeline(model, world, accumulate_steps, stale=False), model.score
    parts: Iterator[Batch]

    def score_late(dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        pooled.data.copy_(former.embeddings(next(parts).sparse).pooled.values.detach())
        return score(dense, pooled)  # type: ignore[no-any-return]

    model.score, losses = score_late, []
    for batch in slices(world, SIZES):
        parts = iter(split_batch(batch, accumulate_steps))
        rows = [shard.read(0, shard.shard.num_rows) for shard in model.embeddings.shards]
        rows = [{name: value.clone() for name, value in one.items()} for one in rows]
        losses.append(pipeline(batch).loss)
        for shard, one in zip(former.embeddings.shards, rows, strict=True):
            shard.write(0, {ROW: one[ROW].numpy()})
    return losses, checksum(model)


def test_one_process_looks_up_one_update_late() -> None:
    expected = train_plainly("flat", "fp32", 1)
    assert train_late("flat", "fp32", 1, ()) == expected
    model, world = make("flat", "fp32")
    plain = make_pipeline(model, world, 1, stale=False)
    fresh = [step.loss for step in plain.steps(slices(world, SIZES))]
    assert fresh[:1] == expected[0][:1] and fresh[2:] != expected[0][2:]  # the first has no update before it


@pytest.mark.parametrize("case", sample(CASES, 1, seed=11))
def test_ranks_look_up_one_update_late(ranks: Ranks, case: dict[str, Any]) -> None:
    """Overlap changes no bit."""
    size, run = case["size"], (case["exchange"], case["precision"], case["accumulate_steps"])
    plain = ranks(size).run(train_plainly, *run)
    for overlap in ((), ("embeddings", "agree"), OVERLAPS) if IS_SOAK else ((), OVERLAPS):
        assert ranks(size).run(train_late, *run, overlap) == plain, overlap


def leave_and_continue(overlap: tuple[Overlap, ...]) -> Any:
    """Run two loops over the batches. The second one continues with the embeddings that the first has prefetched."""
    model, world = make("hierarchical", "paper")
    pipeline, batches = make_pipeline(model, world, 2, overlap=overlap, stale=True), [*slices(world, SIZES)]
    losses = []
    with closing(pipeline.steps(iter(batches))) as steps:
        losses += [next(steps).loss for _ in range(2)]
        pipeline.snapshot_prefetched()
    losses += [step.loss for step in pipeline.steps(iter(batches[2:]))]
    return losses, checksum(model)


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.soak) for size in (1, 4))])
def test_a_loop_continues_with_prefetched_embeddings(ranks: Ranks, size: int) -> None:
    expected = ranks(size).run(train_late, "hierarchical", "paper", 2, ())
    assert ranks(size).run(leave_and_continue, ()) == expected
    assert ranks(size).run(leave_and_continue, OVERLAPS) == expected


def give_other_batch() -> str:
    """Return the error if rank 0 alone receives another batch than the prefetched one."""
    model, world = make("flat", "fp32")
    pipeline, batches = make_pipeline(model, world, 1, stale=True), [*slices(world, SIZES)]
    with closing(pipeline.steps(iter(batches))) as steps:
        next(steps)
        pipeline.snapshot_prefetched()
    if world.rank == 0:
        batches[1].sparse.values[0] = (batches[1].sparse.values[0] + 1) % 6
    return message_of(lambda: [*pipeline.steps(iter(batches[1:]))])


def test_embeddings_of_another_batch_are_rejected_on_all_ranks(ranks: Ranks) -> None:
    [first, second] = ranks(2).run(give_other_batch)
    assert (
        first == second
        and "differs from that of the prefetched embeddings" in first
        and "pipeline.staleness=0" in first
    )


# Runs

COMMON = {
    **WIDE,
    "train__batch_size": 250,
    "train__epochs": 2,
    "checkpoint__every_steps": 3,
    "checkpoint__keep_last": 9,
    "pipeline__staleness": 1,
}


def manifest(run_dir: Path, step: int) -> dict[str, Any]:
    path = run_dir / "checkpoints" / f"step-{step:09}" / "manifest.json"
    document: dict[str, Any] = json.loads(path.read_text())
    return document


@pytest.mark.parametrize(("size", "when"), [pytest.param(1, 5, marks=pytest.mark.soak), (2, 8 if IS_SOAK else 5)])
def test_an_interrupted_run_resumes_identically(ranks: Ranks, tiny: Path, tmp_path: Path, size: int, when: int) -> None:
    common = {**COMMON, "plan": MIXED if size > 1 else "auto", **({} if IS_SOAK else {"train__max_steps": 7})}
    train_on(ranks, size, settings(tiny, tmp_path / "whole", **common))
    if size == 1:
        train_until(settings(tiny, tmp_path / "cut", **common), when)
    else:
        ranks(size).run(train_until, settings(tiny, tmp_path / "cut", **common), when)
    train_on(ranks, size, settings(tiny, tmp_path / "cut", **common))
    assert without_times(metrics(tmp_path / "cut")) == without_times(metrics(tmp_path / "whole"))
    assert final_checksum(tmp_path / "cut") == final_checksum(tmp_path / "whole")
    for step in (3, 6, 9) if IS_SOAK else (3, 6):
        resumed, whole = (manifest(tmp_path / name, step) for name in ("cut", "whole"))
        assert resumed["carried"] == whole["carried"] and resumed["format"] == "meseta.checkpoint/2"
        assert resumed["features"] == ["carried"]


def test_an_extended_run_equals_a_longer_one(tiny: Path, tmp_path: Path) -> None:
    """A run is extended in the middle of an epoch, and by a whole epoch."""
    train(settings(tiny, tmp_path / "whole", **COMMON))
    for limit in ({"train__max_steps": 3}, {"train__epochs": 1}, {}):
        train(settings(tiny, tmp_path / "more", **{**COMMON, **limit}))
    assert final_checksum(tmp_path / "more") == final_checksum(tmp_path / "whole")


def test_another_number_of_ranks_resumes_with_prefetched_embeddings(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """Sums of float64 over expected ranks differ by less than a lookup after one more update."""
    common = {**COMMON, "embedding__dtype": "float64", "train__log_every_steps": 1}
    last = 10 if IS_SOAK else 6
    train(settings(tiny, tmp_path / "alone", **common, train__max_steps=last))
    first, second = (4, 2) if IS_SOAK else (2, 1)
    train_on(ranks, first, settings(tiny, tmp_path / "moved", **common, plan=MIXED, train__max_steps=4))
    train_on(ranks, second, settings(tiny, tmp_path / "moved", **common, plan=ROW_WISE, train__max_steps=last))
    [losses, expected] = (
        [line["loss"] for line in metrics(tmp_path / n) if "loss" in line] for n in ("moved", "alone")
    )
    assert losses == pytest.approx(expected, abs=1e-9)
    [moved, alone] = (
        load_file(tmp_path / name / "checkpoints" / f"step-{6:09}" / "carried.safetensors")
        for name in ("moved", "alone")
    )
    assert torch.equal(moved["ids"], alone["ids"])
    torch.testing.assert_close(moved["pooled"], alone["pooled"], rtol=0, atol=1e-9)


def test_a_run_without_staleness_writes_the_first_format(tiny: Path, tmp_path: Path) -> None:
    """A run without staleness ignores the prefetched embeddings of a checkpoint."""
    train(settings(tiny, tmp_path / "run", **{**COMMON, "train__max_steps": 3}))
    train(settings(tiny, tmp_path / "run", **{**COMMON, "pipeline__staleness": 0, "train__max_steps": 6}))
    assert manifest(tmp_path / "run", 6)["format"] == "meseta.checkpoint/1"
    assert manifest(tmp_path / "run", 6).keys() & {"carried", "features"} == set()
    assert not (tmp_path / "run/checkpoints" / f"step-{6:09}" / "carried.safetensors").exists()


def test_unusable_prefetched_embeddings_are_rejected(tiny: Path, tmp_path: Path) -> None:
    from meseta.checkpoint.files import digest

    document = settings(tiny, tmp_path / "run", **{**COMMON, "train__max_steps": 3})
    train(document)
    folder = tmp_path / "run/checkpoints" / f"step-{3:09}"
    tensors = {**load_file(folder / "carried.safetensors"), "pooled": torch.zeros(3, 2)}
    save_file(tensors, folder / "carried.safetensors")
    written = manifest(tmp_path / "run", 3)
    size = (folder / "carried.safetensors").stat().st_size
    written["carried"] |= {"num_bytes": size, "checksum": digest.hash_tensors(tensors)}
    written["manifest_checksum"] = digest.hash_manifest(written)
    (folder / "manifest.json").write_text(json.dumps(written))
    with pytest.raises(MesetaError, match=r"prefetched embeddings must be \[B, 128\].*got \[3, 2\]"):
        train({**document, "train": {**document["train"], "max_steps": 5}})
