"""Tests of cost models: round trips through files, and refused values."""

from pathlib import Path
from typing import Any

import pytest

from meseta.planner import documented_cost_model
from meseta.spec import CostModel, MesetaError


@pytest.mark.parametrize("device", ["cpu", "a100", "h100", "h200", "b200"])
def test_a_model_comes_back_from_its_file(device: Any, tmp_path: Path) -> None:
    model = documented_cost_model(device)
    model.save(tmp_path / "cost.yaml")
    assert CostModel.load(tmp_path / "cost.yaml") == model
    assert not model.is_measured
    assert model.lookup.source and model.exchange.source


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("device",), "v100", "v100"),
        (("num_threads",), 0, "num_threads"),
        (("lookup", "id_s"), -1e-9, "lookup.id_s"),
        (("lookup", "id_s"), "fast", "lookup.id_s"),
        (("lookup", "id"), 1.0, "unknown key 'id'"),
        (("update", "number_s"), {"sgd": -1.0}, "update.number_s.sgd"),
        (("update", "number_s"), 3, "update.number_s"),
        (("dense", "float32_flops_per_s"), 0.0, "dense.float32_flops_per_s"),
        (("exchange", "inside_all_to_all"), {"bytes_per_s": 0.0, "latency_s": 0.0}, "exchange.inside_all_to_all"),
        (("exchange", "inside_all_to_all"), {"bytes_per_s": 1.0}, "latency_s"),
        (("tiers",), None, "tiers must be a mapping"),
        (("cache", "measured"), "yes", "cache.measured"),
        (("format",), "meseta.cost_model/0", "format"),
        (("link",), {}, "unknown key 'link'"),
    ],
)
def test_bad_values_are_named(path: tuple[str, ...], value: object, message: str) -> None:
    document = documented_cost_model("cpu").to_dict()
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(MesetaError, match=message):
        CostModel.from_dict(document)


def test_a_file_that_knows_nothing_of_peers_and_codecs_is_read() -> None:
    document = documented_cost_model("cpu").to_dict()
    exchange = document["exchange"]
    del exchange["encode_number_s"], exchange["decode_number_s"], exchange["inside_all_to_all"]["peer_s"]
    model = CostModel.from_dict(document).exchange
    assert model.inside_all_to_all.peer_s == 0.0 and model.codec_seconds("int8") == (0.0, 0.0)
    known = documented_cost_model("cpu").exchange
    assert known.codec_seconds("int8", stochastic=True) > known.codec_seconds("int8")
    assert known.codec_seconds("bf16", stochastic=True) == known.codec_seconds("bf16")


def test_a_missing_group_is_named() -> None:
    document = documented_cost_model("cpu").to_dict()
    del document["update"]
    with pytest.raises(MesetaError, match=r"update is missing.*meseta calibrate"):
        CostModel.from_dict(document)


def test_numbers_without_a_point_are_numbers() -> None:
    document = documented_cost_model("cpu").to_dict()
    document["cache"]["cache_bytes"] = "32e6"  # as YAML 1.1 reads it
    assert CostModel.from_dict(document).cache.cache_bytes == 32e6
