"""A checkpoint read with pyarrow and the standard library alone: no meseta, no torch.

    python examples/02_read_checkpoint.py [runs/main/checkpoints/step-000000500]

Without an argument it first saves a small model, which is the only part that needs meseta.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa


def read_table(checkpoint: Path, entry: dict) -> pa.Table:
    """All blocks of one table as an Arrow table: id, row, optimizer state. Memory-mapped: nothing is copied."""
    blocks = [pa.ipc.open_file(pa.memory_map(str(checkpoint / block["path"]))).read_all() for block in entry["blocks"]]
    return pa.concat_tables(blocks)


def restore(codes: np.ndarray, form: str, dim: int) -> np.ndarray:
    """float32 [n, dim] of the codes [n, bytes] of a quantised column: a number of the column's metadata times the scale
    of its row, plus the offset, both behind the codes; bf16 is the upper half of a float32."""
    if form == "bf16":
        return (np.ascontiguousarray(codes).view("<u2").astype(np.uint32) << 16).view(np.float32)
    bits, kind = int(form.removeprefix("int")), "<f4" if form == "int8" else "<f2"
    packed, scales = np.split(codes, [(dim * bits + 7) // 8], axis=1)
    scale, offset = np.split(np.ascontiguousarray(scales).view(kind).astype(np.float32), 2, axis=1)
    stream = np.unpackbits(packed, axis=1, count=dim * bits, bitorder="little").reshape(len(codes), dim, bits)
    return (stream << np.arange(bits)).sum(axis=2).astype(np.float32) * scale + offset


def checksum(checkpoint: Path, entry: dict, block: dict) -> str:
    """SHA-256 of the columns of a block, one after the other, as the manifest must have it."""
    batch = pa.ipc.open_file(pa.memory_map(str(checkpoint / block["path"]))).get_batch(0)
    digest = hashlib.sha256()
    for column in entry["columns"]:
        values = batch.column(column["name"])
        digest.update(values.flatten().to_numpy() if column["kind"] == "element" else values.to_numpy())
    return digest.hexdigest()


def show(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    print(f"{manifest['format']}, step {manifest['step']}, model {manifest['checksum'][:16]}")
    for name, entry in manifest["tables"].items():
        table = read_table(checkpoint, entry)
        states = [column["name"] for column in entry["columns"][1:]]
        print(
            f"table {name}: {table.num_rows} x {entry['embedding_dim']}, {len(entry['blocks'])} blocks, state {states}"
        )
        # One row, wherever it lies: ids rise from 0 without a gap.
        row = table.slice(table.num_rows // 2, 1).to_pylist()[0]
        print(f"  row {row['id']}: {[round(float(x), 4) for x in row['row'][:4]]} ...")
        for block in entry["blocks"]:
            assert checksum(checkpoint, entry, block) == block["checksum"], block["path"]
    print("every block has the checksum that the manifest says")


def make_checkpoint(folder: Path) -> Path:
    """A small model at step 0, saved as the trainer does."""
    from meseta.checkpoint import save
    from meseta.comm import World
    from meseta.optim import make_row_optimizer
    from meseta.spec import Plan, TableSpec
    from meseta.storage import TableShard

    tables = [
        TableSpec(name="user_id", num_embeddings=1000, embedding_dim=16),
        TableSpec(name="item_id", num_embeddings=300, embedding_dim=32),
    ]
    plan = Plan.from_dict({"tables": {"*": "table_wise"}}, tables, num_ranks=1)
    shards = [
        TableShard.create(
            spec,
            plan[spec.name].shards[0],
            make_row_optimizer(spec.optimizer),
            seed=0,
            device="cpu",
        )
        for spec in tables
    ]
    return save(folder, world=World.single(), step=0, plan=plan, shards=shards, dense={}, state={})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        show(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            show(make_checkpoint(Path(folder)))
