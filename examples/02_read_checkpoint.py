"""Read a checkpoint with pyarrow and numpy, without meseta and torch.

    python examples/02_read_checkpoint.py [runs/main/checkpoints/step-000000500]

Without an argument, it first saves a small model, for which it needs meseta.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa


def read_table(checkpoint: Path, entry: dict) -> dict[str, np.ndarray]:
    """Return rows and optimizer states of a table by name: [rows, D], or [rows] for states with one value per row.

    Rows of a block may be in several files, of this checkpoint and of older ones. The manifest lists them from oldest
    to newest, and the newest file with a row has its values.
    """
    columns: dict[str, np.ndarray] = {}
    for file in entry["blocks"]:
        batch = pa.ipc.open_file(pa.memory_map(str(checkpoint / file["path"]))).get_batch(0)
        ids = batch.column("id").to_numpy()
        rows = ids if batch.schema.field("id").type == pa.int64() else file["first_row"] + ids.astype(np.int64)
        for column in entry["columns"]:
            values = read_column(batch, column, entry["embedding_dim"])
            shape = (entry["num_embeddings"], *values.shape[1:])
            columns.setdefault(column["name"], np.empty(shape, values.dtype))[rows] = values
    return columns


def read_column(batch: pa.RecordBatch, column: dict, dim: int) -> np.ndarray:
    """Return the values of one column of a file. bfloat16 becomes float32, whose upper half it is."""
    values, metadata = batch.column(column["name"]), batch.schema.field(column["name"]).metadata or {}
    if column["kind"] == "row":
        return values.to_numpy()
    numbers = values.flatten().to_numpy().reshape(len(values), -1)
    if b"codes" in metadata:
        restored = restore(numbers, metadata[b"codes"].decode(), dim)
        return restored.astype(np.float32 if column["dtype"] == "bfloat16" else column["dtype"])
    return (numbers.astype(np.uint32) << 16).view(np.float32) if column["dtype"] == "bfloat16" else numbers


def restore(codes: np.ndarray, form: str, dim: int) -> np.ndarray:
    """Convert the bytes [n, k] of a quantized column to float32 [n, dim].

    A row has codes, then a scale and an offset. A value is code * scale + offset. bf16 is the upper half of a float32.
    """
    if form == "bf16":
        return (np.ascontiguousarray(codes).view("<u2").astype(np.uint32) << 16).view(np.float32)
    bits, kind = int(form.removeprefix("int")), "<f4" if form == "int8" else "<f2"
    packed, scales = np.split(codes, [(dim * bits + 7) // 8], axis=1)
    scale, offset = np.split(np.ascontiguousarray(scales).view(kind).astype(np.float32), 2, axis=1)
    stream = np.unpackbits(packed, axis=1, count=dim * bits, bitorder="little").reshape(len(codes), dim, bits)
    return (stream << np.arange(bits)).sum(axis=2).astype(np.float32) * scale + offset


def checksum(checkpoint: Path, entry: dict, file: dict) -> str:
    """Return the SHA-256 of the columns of a file, one after the other, as in the manifest.

    If a file has only some rows of its block, their ids come first.
    """
    batch = pa.ipc.open_file(pa.memory_map(str(checkpoint / file["path"]))).get_batch(0)
    digest = hashlib.sha256()
    if batch.schema.field("id").type == pa.uint32():
        digest.update(batch.column("id").to_numpy())
    for column in entry["columns"]:
        values = batch.column(column["name"])
        digest.update(values.flatten().to_numpy() if column["kind"] == "element" else values.to_numpy())
    return digest.hexdigest()


def show(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    digest = manifest.get("checksum") or manifest["chain"]
    print(f"{manifest['format']}, step {manifest['step']}, model {digest[:16]}")
    for name, entry in manifest["tables"].items():
        table = read_table(checkpoint, entry)
        states = [column["name"] for column in entry["columns"][1:]]
        blocks = {file["first_row"] for file in entry["blocks"]}
        print(f"table {name}: {len(table['row'])} x {entry['embedding_dim']}, {len(blocks)} blocks, state {states}")
        middle = len(table["row"]) // 2
        print(f"  row {middle}: {[round(float(x), 4) for x in table['row'][middle][:4]]} ...")
        for column, error in manifest.get("quantised", {}).get(name, {}).items():
            print(f"  {column} is quantized, with errors of at most {error:.3g}")
        for file in entry["blocks"]:
            assert checksum(checkpoint, entry, file) == file["checksum"], file["path"]
    print("all blocks match the checksums of the manifest")


def make_checkpoint(folder: Path) -> Path:
    """Save a small model at step 0, as training does."""
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
