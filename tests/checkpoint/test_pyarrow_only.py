"""Tests that a checkpoint is readable without this package."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest
from safetensors.numpy import load_file

from checkpoint.simulated import bits, pieces, plain_plan, random_tables, some_specs
from meseta.checkpoint import save
from meseta.checkpoint.files import layout
from meseta.comm import World
from source_tree import ROOT

SPECS = some_specs()
TABLES = random_tables(SPECS, seed=2)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(layout, "BLOCK_BYTES", 16_384)
    plan = plain_plan(SPECS, 1, "table_wise")
    dense = {"over.weight": TABLES["item/.."]["row"]}
    shards = pieces(SPECS, plan, 0, TABLES)
    return save(tmp_path, world=World.single(), step=12, plan=plan, shards=shards, dense=dense, state={})


def test_every_bit_through_pyarrow(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest["tables"]) == set(TABLES)
    for name, entry in manifest["tables"].items():
        table = pa.concat_tables(
            pa.ipc.open_file(pa.memory_map(str(path / b["path"]))).read_all() for b in entry["blocks"]
        )
        assert table["id"].to_pylist() == list(range(entry["num_embeddings"]))
        assert table.column_names == ["id", *(column["name"] for column in entry["columns"])]
        for column, tensor in TABLES[name].items():
            values = table[column].combine_chunks()
            flat = values.flatten() if tensor.dim() == 2 else values
            assert flat.to_numpy().tobytes() == bits(tensor).numpy().tobytes()


def test_blocks_are_the_files_that_arrow_writes(path: Path) -> None:
    blocks = list(path.glob("tables/*/*.arrow"))
    assert len(blocks) > len(SPECS)  # full and last rows
    for block in blocks:
        with pa.ipc.open_file(str(block)) as reader:
            batch, sink = reader.get_batch(0), pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        assert block.read_bytes() == sink.getvalue().to_pybytes()


def test_rows_of_16_bits(path: Path) -> None:
    def first_block(table: str) -> pa.RecordBatch:
        return pa.ipc.open_file(str(path / "tables" / table / "block-00000.arrow")).get_batch(0)

    assert first_block("half").schema.field("row").type.value_type == pa.float16()
    # bfloat16 is the upper half of a float32.
    batch = first_block("brain")
    assert batch.schema.field("row").type.value_type == pa.uint16()
    assert batch.schema.field("row").metadata == {b"dtype": b"bfloat16"}
    values = (batch["row"].flatten().to_numpy().astype(np.uint32) << 16).view(np.float32)
    expected = TABLES["brain"]["row"][: batch.num_rows].float().numpy().reshape(-1)
    np.testing.assert_array_equal(values, expected)


def test_as_a_dataset(path: Path) -> None:
    table = pa.dataset.dataset(path / "tables" / "user", format="ipc").to_table(filter=pa.dataset.field("id") == 200)
    assert table["id"].to_pylist() == [200]
    row = np.array(table["row"].to_pylist()[0], dtype=np.float32)
    np.testing.assert_array_equal(row, TABLES["user"]["row"][200].numpy())


def test_dense_through_safetensors(path: Path) -> None:
    dense = load_file(path / "dense.safetensors")
    assert dense["over.weight"].tobytes() == TABLES["item/.."]["row"].numpy().tobytes()


def test_the_example_needs_neither_meseta_nor_torch(path: Path) -> None:
    program = (
        "import sys, runpy; sys.modules['meseta'] = sys.modules['torch'] = None; "
        "sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", program, str(ROOT / "examples/02_read_checkpoint.py"), str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "table user: 203 x 40, 7 blocks, state ['exp_avg', 'exp_avg_sq']" in run.stdout
    assert "all blocks match the checksums of the manifest" in run.stdout
