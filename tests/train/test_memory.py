"""Predicted memory against the tensors that a run holds, and refusal of runs that do not fit."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meseta.comm import BatchSlice, World
from meseta.config import RunConfig
from meseta.config.models import MODEL_NAMES
from meseta.data.dataset.dataset import Dataset
from meseta.embedding import EmbeddingBagCollection
from meseta.embedding.batch_context import BatchContext
from meseta.spec import MesetaError
from meseta.system.kernel import KernelFiles
from meseta.train.setup import memory
from meseta.train.setup.build import make_sharded_model
from meseta.train.setup.meta_model import make_meta_model, make_unsharded_model, step_peak_bytes
from meseta.train.setup.specs import make_specs
from meseta.train.trainer import Trainer
from small_run import need_and_held, predicted_memory, settings

GIB = 1 << 30


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam", "sgd", "rowwise_lamb", "lars"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_rows_and_states_are_predicted_to_the_byte(tmp_path: Path, tiny: Path, optimizer: str, dtype: str) -> None:
    document = settings(tiny, tmp_path / "run", embedding__optimizer={"name": optimizer}, embedding__dtype=dtype)
    tables, states, rows, held = need_and_held(document)
    assert (tables, states) == (rows, held) and tables > 0


def predicted(data: Path, document: dict[str, Any]) -> memory.MemoryDemand:
    config, dataset = RunConfig.model_validate(document), Dataset.load(data)
    specs, features = make_specs(config, dataset)
    collection = EmbeddingBagCollection(specs, features)
    outline = make_meta_model(config, dataset, collection)
    return predicted_memory(config, dataset, outline, collection.plan, 0)


MODELS = {
    **{name: {} for name in MODEL_NAMES},
    "dlrm in bfloat16": {"dense__dtype": "bfloat16", "dense__check_speed": False},
    "dlrm with dropout": {"model__dropout": 0.2},
    "dlrm with batch norm": {"model__batch_norm": True},
}


def test_a_dense_part_in_float64_takes_twice_the_bytes(tmp_path: Path, tiny: Path) -> None:
    needs = [predicted(tiny, settings(tiny, tmp_path / "run", embedding__dtype=d)) for d in ("float32", "float64")]
    assert needs[1].dense_part == 2 * needs[0].dense_part


@pytest.mark.parametrize("case", MODELS)
def test_activations_of_a_step_match_the_prediction(tmp_path: Path, tiny: Path, case: str) -> None:
    """The prediction is at least the bytes that autograd saves for the backward pass, and not much more."""
    document = settings(tiny, tmp_path / "run", model__name=case.split(maxsplit=1)[0], **MODELS[case])
    batch_size, config, dataset = 512, RunConfig.model_validate(document), Dataset.load(tiny)
    collection = EmbeddingBagCollection(*make_specs(config, dataset))
    model = make_unsharded_model(config, dataset, collection)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch: BatchContext[Any] = BatchContext(
        batch_slice=BatchSlice(world=World.single(), step=0, batch_size_per_rank=(batch_size,))
    )
    dense = torch.rand(batch_size, len(dataset.dense))
    pooled = torch.rand(batch_size, sum(table.embedding_dim for table in collection.tables), requires_grad=True)
    with collection.active_batch(batch), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model.score(dense, pooled)  # its graph keeps the saved tensors alive
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    outline = make_meta_model(config, dataset, EmbeddingBagCollection(*make_specs(config, dataset)))
    assert all(parameter.is_meta for parameter in outline.parameters())
    whole = step_peak_bytes(outline, batch_size, len(dataset.dense))
    assert sum(kept.values()) <= whole <= 5 * sum(kept.values()) + 8 * pooled.nbytes + 8 * logits.nbytes
    assert whole >= 2 * pooled.nbytes  # the pooled embeddings and their gradient


def test_row_gradients_that_wait_for_one_norm_are_predicted(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"train__batch_size": 1000, "train__max_steps": 1, "train__eval_batch_size": 1000}
    clipped = settings(tiny, tmp_path / "run", **few, train__clip_norm=1e9)
    plain = settings(tiny, tmp_path / "run", **few)
    kept, clip = list[int](), EmbeddingBagCollection._clip_gradients

    def measure(*arguments: Any) -> Any:
        sums, factor = clip(*arguments)
        for one in sums.values():
            kept.extend(tensor.untyped_storage().nbytes() for tensor in (one.rows, one.gradient))
        return sums, factor

    monkeypatch.setattr(EmbeddingBagCollection, "_clip_gradients", measure)
    Trainer(RunConfig.model_validate(clipped), World.single()).run()
    need = predicted(tiny, clipped).activations - predicted(tiny, plain).activations
    assert sum(kept) == pytest.approx(need, rel=0.05)


def test_no_parameter_is_allocated_before_memory_is_checked(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the check, torch allocates only small tensors, although one layer alone exceeds the memory."""
    document = settings(tiny, tmp_path / "run", model__name="dlrm", model__top_mlp=[1 << 20, 1 << 20])
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made.extend(t.nbytes for t in tree_leaves(result) if isinstance(t, torch.Tensor) and not t.is_meta)
            return result

    with Watch(), pytest.raises(MesetaError) as caught:
        make_sharded_model(RunConfig.model_validate(document), Dataset.load(tiny), World.single())
    assert max(made, default=0) < 1000
    assert "). prepare the data with fewer --hash-rows" in str(caught.value)  # no other row type would help
    assert "dense part 17.6 TB" in str(caught.value)  # 2**40 weights of 4 bytes, gradients and two moments
    assert "the largest dense parameter 'top_mlp.2.weight', 1,048,576 x 1,048,576" in str(caught.value)


@pytest.mark.parametrize("name", ["AsksForNumbers", "KeepsNumbers"])
def test_a_model_that_reads_values_is_built_first(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delitem(sys.modules, "own_models", raising=False)  # a fresh import, since the module has state
    document = settings(tiny, tmp_path / "run", model__name=f"own_models:{name}")
    need = predicted(tiny, document)
    assert need.dense_part > 0 and need.activations > 0
    make_sharded_model(RunConfig.model_validate(document), Dataset.load(tiny), World.single())


def test_parts_of_a_batch_need_less_for_activations(tmp_path: Path, tiny: Path) -> None:
    needs = []
    for parts in (1, 4):
        sizes = {"train__batch_size": 4096, "train__eval_batch_size": 64}
        needs.append(predicted(tiny, settings(tiny, tmp_path / "run", train__accumulate_steps=parts, **sizes)))
    whole, part = needs
    dataset = Dataset.load(tiny)
    ids = sum(column.statistics.mean_pooling_factor for column in dataset.sparse)
    kept = 4096 * (4 * 4 * len(dataset.sparse) + 8 * ids)  # gradients of embeddings with 4 columns, and ids
    assert abs(part.activations - whole.activations / 4 - kept) <= 0.01 * whole.activations  # except the ends of blocks
    assert (part.tables, part.reading) == (whole.tables, whole.reading)


def test_a_table_beyond_all_memory_is_refused_with_numbers(tmp_path: Path, tiny: Path) -> None:
    shutil.copytree(tiny, tmp_path / "data")
    described = json.loads((tiny / "dataset.json").read_text())
    [city] = [feature for feature in described["sparse"] if feature["name"] == "city"]
    city["num_embeddings"] = 2**38
    (tmp_path / "data/dataset.json").write_text(json.dumps(described))
    document = settings(tmp_path / "data", tmp_path / "run")
    with pytest.raises(MesetaError) as caught:
        Trainer(RunConfig.model_validate(document), World.current())
    assert "this run needs 5.50 TB of memory on" in str(caught.value)  # 2**38 rows of 4 float32 and one sum
    assert "tables 4.40 TB, optimizer state 1.10 TB" in str(caught.value)
    assert "the largest table is 'city', 274,877,906,944 x 4" in str(caught.value)
    assert "embedding.dtype=bfloat16 needs 3.30 TB; or prepare the data with fewer --hash-rows" in str(caught.value)
    assert not (tmp_path / "run").exists()
    averaged = RunConfig.model_validate({**document, "train": {**document["train"], "average_weights": "swa"}})
    with pytest.raises(MesetaError, match=r"needs 9\.90 TB .* train\.average_weights=null needs 5\.50 TB; or"):
        Trainer(averaged, World.current())


def test_ranks_of_a_host_share_its_memory(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.model_validate(settings(tiny, tmp_path / "run"))
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000)
    with pytest.raises(MesetaError, match=r"but 1\.00 kB are free"):
        make_sharded_model(config, Dataset.load(tiny), World.current())
    make_sharded_model(config.model_copy(update={"check_memory": False}), Dataset.load(tiny), World.current())
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)
    make_sharded_model(config, Dataset.load(tiny), World.current())


def test_free_memory_follows_the_tightest_limit(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\n")
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    assert memory.available_bytes(torch.device("cpu"), KernelFiles(tmp_path)) == 6 * GIB
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(str(4 * GIB))
    (group / "memory.current").write_text(str(3 * GIB))
    (group / "memory.stat").write_text(f"inactive_file {GIB}\n")
    assert memory.available_bytes(torch.device("cpu"), KernelFiles(tmp_path)) == 2 * GIB
