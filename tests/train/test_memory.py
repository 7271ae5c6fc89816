"""Predicted bytes against the tensors that a run then holds, and runs that cannot fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset import Dataset
from meseta.measure.doctor.system import System
from meseta.spec import MesetaError
from meseta.train import memory
from meseta.train.build import make_sharded_model
from meseta.train.trainer import Trainer
from small_run import need_and_held, settings

GIB = 1 << 30


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam", "sgd", "rowwise_lamb", "lars"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_rows_and_states_are_predicted_to_the_byte(tmp_path: Path, tiny: Path, optimizer: str, dtype: str) -> None:
    document = settings(tiny, tmp_path / "run", embedding__optimizer={"name": optimizer}, embedding__dtype=dtype)
    tables, states, rows, held = need_and_held(document)
    assert (tables, states) == (rows, held) and tables > 0


def test_parts_of_a_batch_need_less_for_activations(tmp_path: Path, tiny: Path) -> None:
    needs = []
    for parts in (1, 4):
        document = settings(tiny, tmp_path / "run", train__accumulate_steps=parts, train__batch_size=4096)
        config, dataset = RunConfig.model_validate(document), Dataset.load(tiny)
        model = make_sharded_model(config, dataset, World.single())
        tables = {table.name: table for table in model.embeddings.tables}
        needs.append(memory.predict_memory(config, dataset, model, model.embeddings.plan, tables, 0))
    whole, part = needs
    ids = sum(column.statistics.mean_pooling_factor for column in dataset.sparse)
    kept = 4096 * (4 * 4 * len(dataset.sparse) + 8 * ids)  # gradients of bags of 4 columns, and ids
    assert part.activations == whole.activations // 4 + int(kept)
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
    assert "this run needs 5.00 TiB of memory on" in str(caught.value)  # 2**38 rows of 4 float32 and one sum
    assert "tables 4.00 TiB, optimizer state 1.00 TiB" in str(caught.value)
    assert "the largest table is 'city', 274,877,906,944 x 4" in str(caught.value)
    assert "embedding.dtype=bfloat16 needs 3.00 TiB; or prepare the data with fewer --hash-rows" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_ranks_of_a_host_share_its_memory(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.model_validate(settings(tiny, tmp_path / "run"))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    with pytest.raises(MesetaError, match="and 1000 B are free"):
        make_sharded_model(config, Dataset.load(tiny), World.current())
    make_sharded_model(config.model_copy(update={"check_memory": False}), Dataset.load(tiny), World.current())
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    make_sharded_model(config, Dataset.load(tiny), World.current())


def test_free_memory_is_what_the_tightest_limit_leaves(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\n")
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    assert memory.free_bytes(torch.device("cpu"), System(tmp_path)) == 6 * GIB
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(str(4 * GIB))
    (group / "memory.current").write_text(str(3 * GIB))
    (group / "memory.stat").write_text(f"inactive_file {GIB}\n")
    assert memory.free_bytes(torch.device("cpu"), System(tmp_path)) == 2 * GIB
