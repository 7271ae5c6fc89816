"""Tests of cost-model networks: round trips through files, and refused values."""

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meseta.planner import documented_cost_model
from meseta.spec import CostModel, MesetaError
from meseta.spec.cost_model import Float32Array
from network_cases import constant_networks

MODEL = replace(documented_cost_model("cpu"), neural=constant_networks(0.1, 0.2, 0.3))


def test_networks_come_back_from_their_file(tmp_path: Path) -> None:
    MODEL.save(tmp_path / "cost.yaml")
    assert CostModel.load(tmp_path / "cost.yaml") == MODEL
    assert CostModel.from_dict(MODEL.to_dict()) == MODEL
    assert "neural" not in documented_cost_model("cpu").to_dict()


def test_numbers_come_back() -> None:
    numbers = np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 7
    array = Float32Array.from_array(numbers)
    assert array.shape == (2, 3, 4) and (array.to_array() == numbers).all()
    assert base64.b64decode(array.float32) == numbers.astype("<f4").tobytes()


ONE = base64.b64encode(np.float32(1.0).tobytes()).decode()
NAN = base64.b64encode(np.float32("nan").tobytes()).decode()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((), 3, "neural must be a mapping"),
        ((), {}, r"neural.lookup is missing.*--neural"),
        (("dense",), {}, "unknown key 'dense'"),
        (("source",), 1, "neural.source must be a string"),
        (("lookup",), [], "neural.lookup must be a mapping"),
        (("lookup", "middle"), {"shape": [1], "float32": ONE}, "unknown key 'middle'"),
        (("lookup", "limits"), None, "neural.lookup.limits must be a mapping"),
        (("lookup", "limits"), {"shape": [1]}, "must have the keys shape and float32"),
        (("lookup", "limits"), {"shape": "12", "float32": ONE}, "limits.shape must be a list of positive"),
        (("lookup", "limits"), {"shape": [0.5], "float32": ONE}, "shape must be a list of positive integers"),
        (("lookup", "limits"), {"shape": [-1], "float32": ONE}, "shape must be a list of positive integers"),
        (("lookup", "limits"), {"shape": [2], "float32": ONE}, "has 4 bytes"),
        (("lookup", "limits"), {"shape": [1], "float32": "ü?"}, "not valid base64"),
        (("lookup", "limits"), {"shape": [1], "float32": NAN}, "non-finite"),
        (("lookup", "limits"), {"shape": [1], "float32": ONE}, "size 1, expected 2"),
        (("lookup", "limits"), {"shape": [1, 1], "float32": ONE}, "must have 1 dimensions"),
        (("lookup", "head_out_bias"), {"shape": [2], "float32": 2 * ONE[:-2] + ONE[-2:]}, "head_out_bias"),
        (("lookup", "center"), {"shape": [1], "float32": ONE}, "lookup.center has a dimension of size 1"),
        (("update", "rank_most"), {"shape": [1], "float32": ONE}, "update.rank_most"),
        (("collectives", "two"), {}, "a number of devices"),
        (("collectives", 1), {}, "a number of devices"),
        (("collectives", 3), {}, r"collectives.3.center is missing"),
        (("collectives",), 3, "neural.collectives must be a mapping"),
    ],
)
def test_bad_values_are_named(path: tuple[Any, ...], value: object, message: str) -> None:
    document: dict[str, Any] = MODEL.to_dict()
    at, keys = document, ("neural", *path)
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    with pytest.raises(MesetaError, match=message):
        CostModel.from_dict(document)


def test_sizes_fit_each_other() -> None:
    document = MODEL.to_dict()
    network = document["neural"]["update"]
    network["head_in"] = Float32Array.from_array(np.zeros((1, 7, 3)))
    network["head_in"] = {"shape": [1, 7, 3], "float32": network["head_in"].float32}
    with pytest.raises(MesetaError, match=r"update.head_in has a dimension of size 7, expected 4"):
        CostModel.from_dict(document)
