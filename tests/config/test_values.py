"""Tests of invalid values: numbers out of range, and paths with control characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from meseta.config import load_config
from meseta.config.load import read_config_document
from meseta.spec import MesetaError, Plan, TableSpec, Topology
from meseta.system.yaml_text import parse_yaml


def refuse(folder: Path, message: str, **keys: Any) -> None:
    document: dict[str, Any] = {"run_dir": "r", "data": {"dir": "d"}, **keys}
    (folder / "c.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(MesetaError, match=message) as caught:
        load_config(folder / "c.yaml")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 4000, "1" + ":59" * 3000, "1" + ":59" * 300 + ".5"])
def test_long_numbers(tmp_path: Path, number: str) -> None:
    for key in ("seed", "dense.optimizer.lr"):
        with pytest.raises(MesetaError, match="is not a YAML value"):
            read_config_document(None, [f"{key}={number}"])
    with pytest.raises(MesetaError, match="a number of more than 250 characters, in line 2"):
        parse_yaml(f"a: 1\nb: {number}")
    assert parse_yaml("0x" + "f" * 248) == 16**248 - 1


def test_deep_documents() -> None:
    assert parse_yaml("[" * 60 + "]" * 60) is not None
    with pytest.raises(MesetaError, match="nested too deeply"):
        parse_yaml("[" * 70 + "]" * 70)
    chain = "\n".join(["a0: &a0 [1]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 70))])
    with pytest.raises(MesetaError, match="nested too deeply"):
        parse_yaml(chain)


@pytest.mark.parametrize("key", ["batch_size", "eval_batch_size", "accumulate_steps"])
def test_counts_of_samples(tmp_path: Path, key: str) -> None:
    for number in (2**31, 2**62):
        refuse(tmp_path, f"key 'train.{key}': input should be less than", train={key: number})


@pytest.mark.parametrize("text", ["a\0b", "a\nb", "\x1b[2J", "\u2028"])
def test_paths_with_control_characters(tmp_path: Path, text: str) -> None:
    refuse(tmp_path, "key 'run_dir': it must have no control characters", run_dir=text)
    refuse(tmp_path, "key 'data.dir': it must have no control characters", data={"dir": text})
    refuse(tmp_path, "key 'storage.dir': it must have no control characters", storage={"dir": text})
    refuse(tmp_path, "key 'checkpoint.mirror': it must have", checkpoint={"mirror": f"file:///{text}"})


@pytest.mark.parametrize(
    ("dtype", "kind", "scale"),
    [
        ("float16", "constant", 1e5),
        ("float16", "uniform", 1e5),
        ("float16", "normal", 1e4),
        ("bfloat16", "constant", 3.4e38),
        ("float32", "normal", 1e38),
    ],
)
def test_initial_rows_beyond_their_type(tmp_path: Path, dtype: str, kind: str, scale: float) -> None:
    init = {"kind": kind, "scale": scale}
    refuse(tmp_path, f"init: scale must be at most .* for kind '{kind}' and dtype {dtype}",
           embedding={"dtype": dtype, "init": init})  # fmt: skip
    refuse(tmp_path, f"tables.user.init: scale must be at most .* for kind '{kind}'", 
           embedding={"dtype": dtype, "tables": {"user": {"init": init}}})  # fmt: skip


def test_numbers_beyond_float32(tmp_path: Path) -> None:
    refuse(tmp_path, "key 'dense.optimizer.lr': it must be at most 3.4028e", dense={"optimizer": {"lr": 1e39}})


@pytest.mark.parametrize("value", [2.5, True, "9", [9], {"a": 9}])
def test_keys_of_plans_of_another_type(value: object) -> None:
    table = TableSpec(name="user", num_embeddings=300, embedding_dim=16)
    entry = {"sharding": "row_wise", "tier": "cached"}
    shard = {"rows": [0, 300], "columns": [0, 16], "ranks": [0], "tier": "cached", "cache_rows": value}
    for near in (entry | {"cache_rows": value}, {"sharding": "row_wise", "shards": [shard]}):
        with pytest.raises(MesetaError, match="cache_rows must be an integer, got "):
            Plan.from_dict({"tables": {"*": near}}, [table], 2)
    for key in ("exchange", "dense_exchange"):
        with pytest.raises(MesetaError, match=f"{key} must be|{key} .* is unknown"):
            Plan.from_dict({key: value, "tables": {"*": entry}}, [table], 2)


@pytest.mark.parametrize("cache_rows", [2**63, 99999999999999999999, 10**200])
def test_near_rows_beyond_64_bits(cache_rows: int) -> None:
    table = TableSpec(name="user", num_embeddings=300, embedding_dim=16)
    entry = {"sharding": "row_wise", "tier": "cached", "cache_rows": cache_rows}
    for name in ("user", "*"):
        with pytest.raises(MesetaError, match="cache_rows must be at most 9223372036854775807"):
            Plan.from_dict({"tables": {name: entry}}, [table], 2)
    with pytest.raises(MesetaError, match="hbm_bytes must be at most 9223372036854775807"):
        Topology.from_dict({"hbm_bytes": cache_rows})
    with pytest.raises(MesetaError, match="must be at most 65,536"):
        Topology.from_dict({"num_hosts": 2**40})
