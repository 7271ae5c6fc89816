"""What runs have in common, and in what they differ, as plain facts: a name, and its value in each run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from meseta.report.record import RunRecord, flatten
from meseta.telemetry.shown import ABSENT, count


@dataclass(frozen=True, kw_only=True)
class FactDifference:
    """A fact that is not the same in all runs."""

    name: str
    values: tuple[str, ...]
    """As a person reads them, one per run; ABSENT where a run does not have the fact."""


def differences(records: Sequence[RunRecord], facts: Callable[[RunRecord], Mapping[str, str]]) -> list[FactDifference]:
    """Those of `facts` that differ, in the order in which the runs name them.

    A run without any is unknown, not different: it has no value, and makes no difference alone.
    """
    found = [facts(record) for record in records]
    names = dict.fromkeys(name for one in found for name in one)
    rows = []
    for name in names:
        values = tuple(one.get(name, ABSENT) for one in found)
        if len({value for value, one in zip(values, found, strict=True) if one}) > 1:
            rows.append(FactDifference(name=name, values=values))
    return rows


def config_facts(record: RunRecord) -> dict[str, str]:
    """Every key of the config but run_dir, which always differs."""
    return {key: _plain(value) for key, value in flatten(record.config) if key != "run_dir"}


def data_facts(record: RunRecord) -> dict[str, str]:
    """Rows and labels of the splits, and what the features are."""
    data = record.dataset
    if data is None:
        return {}
    facts = {}
    for name, split in data.splits.items():
        facts[f"{name} rows"] = f"{split.num_rows:,}"
        positives = split.num_positives
        facts[f"{name} positives"] = f"{positives:,.6g}" if positives % 1 else count(positives)
    facts["labels"] = ", ".join(data.labels)
    for role in ("weight", "group", "time"):
        facts[role] = _plain(getattr(data, role))
    facts["dense features"] = str(len(data.dense))
    scales = repr([(dense.name, dense.fill, dense.mean, dense.std) for dense in data.dense])
    facts["standardisation of dense features"] = f"digest {sha256(scales.encode()).hexdigest()[:8]}"
    facts["sparse features"] = str(len(data.sparse))
    values = repr([(s.name, s.hash_seed, s.vocabulary_digest, s.boundaries, s.made_of) for s in data.sparse])
    facts["encoding of sparse features"] = f"digest {sha256(values.encode()).hexdigest()[:8]}"
    for sparse in data.sparse:
        kind = " weighted" * sparse.weighted + " lists" * sparse.multi_valued
        facts[f"sparse {sparse.name}"] = f"{sparse.num_embeddings:,} rows, {sparse.encoding}{kind}"
    return facts


def split_facts(record: RunRecord, split: str) -> dict[str, str]:
    """What says whether two evaluations of a split were of the same rows."""
    facts = data_facts(record).items()
    return {name: value for name, value in facts if name.startswith(f"{split} ") or name == "labels"}


def plan_facts(record: RunRecord) -> dict[str, str]:
    """Ranks, and where each table lies."""
    plan = record.plan
    if plan is None:
        return {}
    facts = {"ranks": str(plan.num_ranks)}
    for entry in plan.tables:
        ranks = sorted({rank for shard in entry.shards for rank in shard.ranks})
        facts[f"table {entry.table}"] = f"{entry.sharding} on {', '.join(map(str, ranks))}"
    return facts


def environment_facts(record: RunRecord) -> dict[str, str]:
    """Machine, versions, commit; the plan has the number of ranks."""
    environment = record.environment.to_dict() if record.environment else {}
    return {key: _plain(value) for key, value in flatten(environment) if key != "num_ranks"}


def grouped(rows: Sequence[FactDifference]) -> list[FactDifference]:
    """Features or tables with the same values in one row, so that 26 tables cut alike are one line."""
    names: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in rows:
        kind, _, name = row.name.partition(" ")
        whole = kind not in ("table", "sparse")
        names.setdefault((row.name if whole else kind, row.values), []).append("" if whole else name)
    return [
        FactDifference(name=f"{kind} {_listed(found)}".rstrip(), values=values)
        for (kind, values), found in names.items()
    ]


def _listed(names: Sequence[str]) -> str:
    """The first few names, and how many more."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _plain(value: Any) -> str:
    """A value of YAML or JSON on one short line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return re.sub(r"\s+", " ", str(value))
