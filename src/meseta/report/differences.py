"""Differences between runs, as properties with one value per run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Literal

from meseta.report.record import RunRecord, flatten
from meseta.telemetry.formatting import NO_VALUE, format_count


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Property of a run, or of a split, a table or a sparse feature of it."""

    kind: Literal["run", "split", "table", "sparse"] = "run"
    subject: str = ""
    """Name of the split, the table or the sparse feature. Empty for a property of the run."""
    property_name: str = ""
    """Name of the property. Empty for tables and sparse features, which have one property each."""

    @property
    def name(self) -> str:
        """Display name of the property and its subject."""
        return " ".join(filter(None, (self.kind if self.is_grouped else "", self.subject, self.property_name)))

    @property
    def is_grouped(self) -> bool:
        """Whether subjects with equal values are shown in one row."""
        return self.kind in ("table", "sparse")


LABELS = Fact(property_name="labels")


@dataclass(frozen=True, kw_only=True)
class FactDifference:
    """Fact that differs between runs."""

    fact: Fact
    values: tuple[str, ...]
    """Formatted values, one per run. `NO_VALUE` for runs without this fact."""

    @property
    def name(self) -> str:
        """Display name of the fact."""
        return self.fact.name


def find_differences(
    records: Sequence[RunRecord], facts: Callable[[RunRecord], Mapping[Fact, str]]
) -> list[FactDifference]:
    """Return the facts that differ between runs, in the order in which they first occur.

    A run for which `facts` returns an empty mapping is unknown. It has the value `NO_VALUE`, but does not count as
    different.
    """
    facts_by_run = [facts(record) for record in records]
    rows = []
    for fact in dict.fromkeys(fact for one in facts_by_run for fact in one):
        values = tuple(one.get(fact, NO_VALUE) for one in facts_by_run)
        # Exclude runs without any fact, because their dataset, plan or environment is unknown.
        if len({value for value, one in zip(values, facts_by_run, strict=True) if one}) > 1:
            rows.append(FactDifference(fact=fact, values=values))
    return rows


def config_facts(record: RunRecord) -> dict[Fact, str]:
    """Return the values of all config keys except `run_dir`."""
    # Each run has another run_dir.
    return {Fact(property_name=key): _format_value(value) for key, value in flatten(record.config) if key != "run_dir"}


def data_facts(record: RunRecord) -> dict[Fact, str]:
    """Return facts about splits, columns and features of a run's dataset. Empty if the dataset is unknown."""
    data = record.dataset
    if data is None:
        return {}
    facts = {}
    for name, split in data.splits.items():
        facts[Fact(kind="split", subject=name, property_name="rows")] = f"{split.num_rows:,}"
        positives = split.num_positives
        shown = f"{positives:,.6g}" if positives % 1 else format_count(positives)
        facts[Fact(kind="split", subject=name, property_name="positives")] = shown
    facts[LABELS] = ", ".join(data.labels)
    for role in ("weight", "group", "time"):
        facts[Fact(property_name=role)] = _format_value(getattr(data, role))
    facts[Fact(property_name="dense features")] = str(len(data.dense))
    # A digest shows a difference without a row for each constant.
    scales = repr([(dense.name, dense.fill, dense.mean, dense.std) for dense in data.dense])
    facts[Fact(property_name="standardisation of dense features")] = f"digest {sha256(scales.encode()).hexdigest()[:8]}"
    facts[Fact(property_name="sparse features")] = str(len(data.sparse))
    values = repr([(s.name, s.hash_seed, s.vocabulary_digest, s.boundaries, s.made_of) for s in data.sparse])
    facts[Fact(property_name="encoding of sparse features")] = f"digest {sha256(values.encode()).hexdigest()[:8]}"
    for sparse in data.sparse:
        kind = " weighted" * sparse.weighted + " lists" * sparse.multi_valued
        shown = f"{sparse.num_embeddings:,} rows, {sparse.encoding}{kind}"
        facts[Fact(kind="sparse", subject=sparse.name)] = shown
    return facts


def split_facts(record: RunRecord, split: str) -> dict[Fact, str]:
    """Return the facts that are equal if two runs were evaluated on the same rows of a split."""
    facts = data_facts(record).items()
    return {fact: value for fact, value in facts if (fact.kind, fact.subject) == ("split", split) or fact == LABELS}


def plan_facts(record: RunRecord) -> dict[Fact, str]:
    """Return the number of ranks, and the sharding type and ranks of each table. Empty if the plan is unknown."""
    plan = record.plan
    if plan is None:
        return {}
    facts = {Fact(property_name="ranks"): str(plan.num_ranks)}
    for entry in plan.tables:
        ranks = sorted({rank for shard in entry.shards for rank in shard.ranks})
        facts[Fact(kind="table", subject=entry.table)] = f"{entry.sharding} on {', '.join(map(str, ranks))}"
    return facts


def environment_facts(record: RunRecord) -> dict[Fact, str]:
    """Return facts about machine, versions and commit. Empty if the environment is unknown."""
    # The number of ranks is one of the facts of the plan.
    environment = record.environment.to_dict() if record.environment else {}
    return {Fact(property_name=key): _format_value(value) for key, value in flatten(environment) if key != "num_ranks"}


def group_differences(rows: Sequence[FactDifference]) -> list[FactDifference]:
    """Merge the rows of tables, or of sparse features, that have equal values."""
    # For example, 26 tables that are sharded identically become one row.
    subjects: dict[tuple[Fact, tuple[str, ...]], list[str]] = {}
    for row in rows:
        fact = replace(row.fact, subject="") if row.fact.is_grouped else row.fact
        subjects.setdefault((fact, row.values), []).append(row.fact.subject)
    return [
        FactDifference(fact=replace(fact, subject=_join_names(names)), values=values)
        for (fact, values), names in subjects.items()
    ]


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _format_value(value: Any) -> str:
    """Format a YAML or JSON value on one line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(_format_value(item) for item in value)
    return re.sub(r"\s+", " ", str(value))
