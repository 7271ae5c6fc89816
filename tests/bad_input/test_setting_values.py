"""Tests of every key of configs, plans, topologies, constraints and cost models with values of any type: one error
line."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from bad_input.commands import run_here, within
from bad_input.test_fuzz_config import full_settings
from meseta.config import RunConfig, load_config
from meseta.config.models import CustomModelConfig, model_sections
from meseta.config.models.base import ModelConfig
from meseta.spec import MesetaError, Plan, TableSpec, Topology
from meseta.spec.constraints import Constraints
from meseta.spec.cost_model import CostModel
from meseta.spec.plan import PLAN_KEYS, SHARD_KEYS, TABLE_KEYS
from meseta.system.files import has_control_characters
from sampling import fewer_examples
from small_run import SHAPES

TABLES = tuple(TableSpec(name=name, num_embeddings=rows, embedding_dim=16) for name, rows in SHAPES.items())
Place = tuple[str | int, ...]
"""Keys from the outermost to the innermost."""


def section_keys(form: type[BaseModel], above: Place = (), seen: tuple[type, ...] = ()) -> Iterator[Place]:
    """Return the keys of a section and of its subsections, with those of all models."""
    for name, field in form.model_fields.items():
        place = (*above, name)
        yield place
        for inner in (field.annotation, *get_args(field.annotation)):
            if not isinstance(inner, type) or not issubclass(inner, BaseModel) or inner in seen:
                continue
            forms = [*model_sections().values(), CustomModelConfig] if inner is ModelConfig else [inner]
            key: Place = ("user",) if get_origin(field.annotation) is dict else ()
            for one in forms:
                yield from section_keys(one, (*place, *key), (*seen, inner))


def record_keys(form: Any, above: Place = ()) -> Iterator[Place]:
    """Return the keys of a dataclass that documents are parsed into."""
    for name, kind in get_type_hints(form).items():
        place = (*above, name)
        yield place
        for inner in (kind, *get_args(kind)):
            if dataclasses.is_dataclass(inner):
                key: Place = ("user",) if get_origin(kind) is Mapping else ()
                yield from record_keys(inner, (*place, *key))


PLAN_PLACES: list[Place] = [
    *((key,) for key in PLAN_KEYS),
    *(("tables", "user", key) for key in TABLE_KEYS),
    *(("tables", "city", "shards", 0, key) for key in SHARD_KEYS),
]
CONFIG_PLACES = list(dict.fromkeys([*section_keys(RunConfig), *(("plan", *place) for place in PLAN_PLACES)]))


def plan_document() -> dict[str, Any]:
    shard = {"rows": [0, 7], "columns": [0, 16], "ranks": [0]}
    far = {"sharding": "row_wise", "ranks": [0, 1], "tier": "cached", "cache_rows": 9}
    return {
        "format": "meseta.plan/1",
        "num_ranks": 2,
        "tables": {"user": far, "city": {"sharding": "table_wise", "shards": [shard]}, "*": "row_wise"},
    }


def topology_document() -> dict[str, Any]:
    link = {"bytes_per_s": 1e9, "latency_s": 1e-5}
    return {"num_hosts": 1, "devices_per_host": 2, "hbm_bytes": 10**9, "inside": link, "across": link}


numbers = st.one_of(
    st.integers(-3, 300),
    st.builds(
        lambda power, more, sign: sign * (2**power + more),
        st.integers(0, 1100),
        st.integers(-2, 2),
        st.sampled_from([1, -1]),
    ),
    st.integers(-(10**25), 10**25),
    st.floats(),
    st.sampled_from([0.0, -0.0, 0.5, 1e39, 1.7e308, 5e-324, -1e39]),
)
texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "*", "auto", "user", "a\0b", "a\nb", "\x1b[2J", "\u2028", "../..", "x" * 5000, "off", "1e5"]),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=5,
)
deep = st.builds(
    lambda depth, kind: json.loads(("[" if kind else '{"a":') * depth + "1" + ("]" if kind else "}") * depth),
    st.integers(10, 120),
    st.booleans(),
)
long_numbers = st.builds(
    lambda form, length: form[0] + form[1] * length + form[2],
    st.sampled_from(
        [("", "9", ""), ("0x", "f", ""), ("1", ":59", ""), ("1", ":59", ".5"), ("0b", "1", ""), ("0", "7", "")]
    ),
    st.sampled_from([20, 240, 3000, 20_000]),
)


class Written(str):
    """Text that is written to YAML without quotes."""


def write_as_it_is(dumper: yaml.SafeDumper, text: Written) -> yaml.ScalarNode:
    return yaml.ScalarNode(f"tag:yaml.org,2002:{'float' if '.' in text else 'int'}", str(text))


yaml.SafeDumper.add_representer(Written, write_as_it_is)
any_value = st.one_of(values, values, deep, long_numbers.map(Written))


def put(document: Any, place: Place, value: Any) -> None:
    """Set the value at a place. Parents that are no mapping or list of one are replaced."""
    for key, after in itertools.pairwise(place):
        if isinstance(key, int):
            document = document[key]
            continue
        inner = document.get(key)
        if isinstance(after, int):
            if not (isinstance(inner, list) and inner and isinstance(inner[0], dict)):
                document[key] = [{}]
        elif not isinstance(inner, dict):
            document[key] = {}
        document = document[key]
    document[place[-1]] = value


@st.composite
def changes(draw: st.DrawFn, places: list[Place]) -> list[tuple[Place, Any]]:
    """Strategy for one to three places with values."""
    return draw(st.lists(st.tuples(st.sampled_from(places), any_value), min_size=1, max_size=3))


def written(document: dict[str, Any], made: list[tuple[Place, Any]]) -> str:
    """Return YAML of a document with changes."""
    for place, value in made:
        put(document, place, value)
    return yaml.safe_dump(document, sort_keys=False)


def read(path: Path, text: str, load: Callable[[Path], Any]) -> None:
    """Load a file. Only a MesetaError of one line without control characters is allowed."""
    path.write_text(text)
    with within(60, text[:2000]):
        try:
            load(path)
        except MesetaError as error:
            assert not has_control_characters(str(error)), repr(str(error))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings")


@fewer_examples(1)
@given(made=changes(CONFIG_PLACES))
def test_config_files(folder: Path, made: list[tuple[Place, Any]]) -> None:
    read(folder / "c.yaml", written(full_settings(folder), made), load_config)


@fewer_examples(2)
@given(made=changes(CONFIG_PLACES))
def test_overrides(folder: Path, made: list[tuple[Place, Any]]) -> None:
    def text_of(value: Any) -> str:
        return str(value) if isinstance(value, Written) else yaml.safe_dump(value, default_flow_style=True)

    overrides = [f"{'.'.join(map(str, place))}={text_of(value)}" for place, value in made]
    text = yaml.safe_dump(full_settings(folder))
    read(folder / "o.yaml", text, lambda path: load_config(path, overrides))


DOCUMENTS: dict[str, tuple[list[Place], Callable[[], dict[str, Any]], Callable[[Path], Any]]] = {
    "plan": (PLAN_PLACES, plan_document, lambda path: Plan.load(path, TABLES, 2)),
    "topology": (list(record_keys(Topology)), topology_document, Topology.load),
    "constraints": (list(record_keys(Constraints)), dict, Constraints.load),
    "cost_model": (list(record_keys(CostModel)), lambda: CostModel().to_dict(), CostModel.load),
}


@pytest.mark.parametrize("kind", DOCUMENTS)
@fewer_examples(2)
@given(data=st.data())
def test_documents(folder: Path, kind: str, data: st.DataObject) -> None:
    places, document, load = DOCUMENTS[kind]
    read(folder / f"{kind}.yaml", written(document(), data.draw(changes(places))), load)


@fewer_examples(8)
@given(data=st.data())
def test_planning(folder: Path, tiny: Path, data: st.DataObject) -> None:
    """The command reads a config and a topology, and plans if both are valid."""
    config = written(full_settings(tiny) | {"plan": "auto"}, data.draw(changes(CONFIG_PLACES)))
    topology = written(topology_document(), data.draw(changes(DOCUMENTS["topology"][0])))
    if data.draw(st.booleans()):
        config = yaml.safe_dump(full_settings(tiny) | {"plan": "auto"})
    else:
        topology = yaml.safe_dump(topology_document())
    (folder / "p.yaml").write_text(config)
    (folder / "t.yaml").write_text(topology)
    with within(120, f"{config}\n{topology}"):
        ended = run_here("plan", folder / "p.yaml", "--topology", folder / "t.yaml")
    if ended.code:
        assert ended.code == 1 and len(ended.errors) == 1, ended
        assert not has_control_characters(ended.err.splitlines()[-1]) and ended.err.splitlines()[-1] == ended.errors[0]
