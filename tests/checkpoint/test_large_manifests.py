"""Tests of manifests with many tables and files: they stay small, and a delta that they could not name becomes a full
checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint.running import SPECS, Run
from checkpoint.simulated import plain_plan
from meseta.checkpoint import policy, summarize
from meseta.checkpoint.files.layout import BlockSchema, Column
from meseta.checkpoint.files.paths import block_path, rows_path, sibling_path
from meseta.checkpoint.manifest import build_manifest, read_manifest, write_manifest
from meseta.spec import Plan, TableSpec

NUM_TABLES, CHAIN = 1000, 8


def entry(name: str, schema: BlockSchema, age: int) -> dict[str, Any]:
    """Return the entry of a table with a single block. Age 0 is the oldest."""
    rows = schema.block_rows if age == 0 else schema.block_rows // 5
    path = block_path(name, 0) if age == 0 else rows_path(name, 0)
    return {
        "path": path if age == CHAIN - 1 else sibling_path(1000 * (age + 1), path),
        "first_row": 0,
        "num_rows": rows,
        "num_bytes": rows * (schema.row_bytes if age == 0 else schema.value_bytes + 4) + 1000,
        "checksum": hashlib.sha256(f"{name} {age}".encode()).hexdigest(),
    }


def test_a_thousand_tables_and_a_chain_of_eight(tmp_path: Path) -> None:
    columns = [Column(name="row", kind="element", dtype="float32"), Column(name="sum", kind="row", dtype="float32")]
    schema = BlockSchema(embedding_dim=64, columns=tuple(columns))
    shape = {"num_embeddings": schema.block_rows, "embedding_dim": 64, "dtype": "float32"}
    specs = [
        TableSpec(name=f"feature_{n:04d}_of_some_length", num_embeddings=schema.block_rows, embedding_dim=64)
        for n in range(NUM_TABLES)
    ]
    tables = {
        spec.name: {
            **shape,
            "optimizer": {"name": "rowwise_adagrad", "lr": 0.1, "eps": 1e-8},
            "columns": [vars(column) for column in columns],
            "block_rows": schema.block_rows,
            "blocks": [entry(spec.name, schema, age) for age in range(CHAIN)],
        }
        for spec in specs
    }
    manifest = build_manifest(
        step=1000 * CHAIN,
        tables=tables,
        dense={"path": "dense.safetensors", "num_bytes": 100, "checksum": "0" * 64},
        deltas={"policy": "consecutive", "whole_step": 1000, "delta_bytes": [1] * (CHAIN - 1)},
        plan=Plan.from_dict({"tables": {"*": "row_wise"}}, specs, 8),
        state={"random": "aa"},
    )
    write_manifest(tmp_path, manifest)
    assert (tmp_path / "manifest.json").stat().st_size < 10_000_000
    assert read_manifest(tmp_path) == manifest == json.loads((tmp_path / "manifest.json").read_text())


@pytest.mark.parametrize("limit", ["MAX_DELTAS", "MAX_DOCUMENT_BYTES"])
def test_a_whole_one_comes_before_a_manifest_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    run = Run(tmp_path, plain_plan(SPECS, 1, "table_wise"), deltas="consecutive", max_chain=9, keep_last=99)
    monkeypatch.setattr(policy, limit, {"MAX_DELTAS": 3, "MAX_DOCUMENT_BYTES": 10_000}[limit])
    for step in range(1, 10):
        run.train(step)
        assert run.save(step) == [None]
    is_whole = [summarize(tmp_path / f"step-{step:09d}").policy is None for step in range(1, 10)]
    assert is_whole[0] and any(is_whole[1:]) and not all(is_whole), is_whole
