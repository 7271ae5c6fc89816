"""Tests of the rules of all hand-written files: numbers with an exponent, no repeated key, and no format of another
version."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meseta.config import load_config
from meseta.data.dataset.dataset import Dataset
from meseta.data.schema.schema import Schema
from meseta.planner.cost.documented import documented_cost_model
from meseta.planner.search.kept_tables import read_plan_file
from meseta.spec import MesetaError, Topology
from meseta.spec.constraints import Constraints
from meseta.spec.cost_model import CostModel
from meseta.spec.workload import load_workload
from meseta.system import yaml_text
from meseta.system.yaml_text import parse_yaml

PLAN = """\
num_ranks: 2
tables: {user: {sharding: table_wise, cost: 2e-9, shards: [{rows: [0, 9], columns: [0, 16], ranks: [1]}]}}
"""


def cost_model() -> str:
    document = documented_cost_model("cpu").to_dict()
    document["lookup"]["id_s"] = "ID"
    return json.dumps(document).replace('"ID"', "2e-9")


DOCUMENTS: dict[str, tuple[Callable[[Path], Any], str, str, Any]] = {
    "topology": (lambda path: Topology.load(path).hbm_bytes, "hbm_bytes: 4e9\n", "meseta.topology/9", 4 * 10**9),
    "link": (
        lambda path: Topology.load(path).to_dict()["inside"]["latency_s"],
        "inside: {bytes_per_s: 600e9, latency_s: 2e-9}\n",
        "meseta.topology/9",
        2e-9,
    ),
    "cost model": (lambda path: CostModel.load(path).lookup.id_s, cost_model(), "meseta.cost_model/9", 2e-9),
    "constraints": (
        lambda path: Constraints.load(path).keep_free_bytes["hbm"],
        "keep_free_bytes: {hbm: 1.5e9}\n",
        "meseta.constraints/9",
        1_500_000_000,
    ),
    "workload": (
        lambda path: load_workload(path).dense.flops_per_sample,
        "batch_size: 8\ntables: {user: {num_embeddings: 1e6, embedding_dim: 16}}\ndense: {flops_per_sample: 638e6}\n",
        "meseta.workload/9",
        638e6,
    ),
    "plan": (lambda path: read_plan_file(str(path))[0].tables[0].cost, PLAN, "meseta.plan/9", 2e-9),
    "config": (
        lambda path: load_config(path).embedding.optimizer.lr,
        "run_dir: r\ndata: {dir: d}\nembedding: {optimizer: {lr: 2e-9}}\n",
        "",
        2e-9,
    ),
    "schema": (
        lambda path: Schema.load(path).buckets["age"],
        "label: y\nbuckets: {age: [2e-9, 1.5e3]}\n",
        "",
        [2e-9, 1500],
    ),
}


def written(tmp_path: Path, name: str) -> tuple[Callable[[Path], Any], Path]:
    load, text, _, _ = DOCUMENTS[name]
    path = tmp_path / "document.yaml"
    path.write_text(text)
    return load, path


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_power_of_ten_is_a_number(tmp_path: Path, name: str) -> None:
    load, path = written(tmp_path, name)
    assert load(path) == DOCUMENTS[name][3]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_key_that_is_given_twice_is_refused(tmp_path: Path, name: str) -> None:
    load, path = written(tmp_path, name)
    text = path.read_text()
    first = text.lstrip("{").partition(":")[0].strip('"')
    doubled = f"{text.rstrip()[:-1]}, {json.dumps(first)}: 1}}" if text.startswith("{") else f"{text}{first}: 1\n"
    path.write_text(doubled)
    with pytest.raises(MesetaError, match=f"{first}.*twice"):
        load(path)


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if DOCUMENTS[name][2]])
def test_a_format_of_another_version_is_refused(tmp_path: Path, name: str) -> None:
    load, path = written(tmp_path, name)
    text, format_ = path.read_text(), DOCUMENTS[name][2]
    if text.startswith("{"):
        path.write_text(json.dumps(json.loads(text) | {"format": format_}))
    else:
        path.write_text(f"{text}format: {format_}\n")
    with pytest.raises(MesetaError, match=r"format.*unknown"):
        load(path)


def test_a_dataset_of_another_version_is_refused() -> None:
    with pytest.raises(MesetaError, match=r"format must be 'meseta.dataset/1', got 'meseta.dataset/9'"):
        Dataset.from_dict({"format": "meseta.dataset/9"})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2e-9", 2e-9),
        ("1E3", 1000.0),
        ("-4e+2", -400.0),
        ("1.5e9", 1.5e9),
        (".5e1", 5.0),
        ("1_000e3", 1e6),
        ("12.0", 12.0),
    ],
)
def test_numbers_of_yaml_1_2(text: str, number: float) -> None:
    parsed = parse_yaml(f"a: {text}")["a"]
    assert isinstance(parsed, float) and parsed == number


@pytest.mark.parametrize("text", ["e9", "1e", "0x1e5x", "1e5 rows", "v1e5", "'2e-9'"])
def test_words_stay_words(text: str) -> None:
    assert isinstance(parse_yaml(f"a: {text}")["a"], str)


TEXTS = [document[1] for document in DOCUMENTS.values()] + [
    cost_model(),
    "a: &x [1, {b: 'c d'}]\nd: *x\n",
    "- |\n  text\n",
]


def parsed_or_refused(text: str, loaders: list[type] | None = None) -> str:
    with mock.patch.object(yaml_text, "_LOADERS", loaders or yaml_text._LOADERS):
        try:
            return repr(parse_yaml(text))
        except MesetaError as error:
            return str(error)


@pytest.mark.skipif(len(yaml_text._LOADERS) == 1, reason="this PyYAML was built without libyaml")
@given(st.sampled_from(TEXTS), st.data())
def test_libyaml_and_the_python_parser_agree(text: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(text)))
    spoiled = (
        text[:place]
        + data.draw(st.sampled_from(["", ":", "[", "}", "'", "\n", "*y", "! ", "1e3", "- "]))
        + text[place:]
    )
    assert parsed_or_refused(spoiled) == parsed_or_refused(spoiled, yaml_text._LOADERS[-1:])
