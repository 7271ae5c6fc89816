"""Config of a run that starts from a parent: the parent's settings below its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meseta.config import RunConfig
from meseta.config.load import get_value, set_default
from meseta.data.dataset.dataset import Dataset
from meseta.spec import InitSpec, MesetaError
from meseta.system.ranks import is_first_rank
from meseta.train.start.parent import Parent
from meseta.train.start.start_record import StartRecord

_NOT_INHERITED = (
    # Places, machines and plans of one run.
    "run_dir", "start_from", "start", "data.dir", "data.service", "checkpoint.dir", "checkpoint.mirror", "storage.dir",
    "plan", "planner", "device", "num_threads", "check_memory",
    # Settings that need a validation or test split, or a number of steps.
    "checkpoint.keep_best", "report.baseline", "schedule", "embedding.schedule", "dense.schedule", "train.epochs",
    "train.max_steps", "train.eval_every_steps", "train.eval_every_epochs", "train.early_stopping", "train.finish",
    "train.search_budget", "data.shuffle",
)  # fmt: skip
_OWN_DEFAULTS = {"train.search_budget": 0.0, "data.shuffle": False}
"""Settings of a run with a parent: one pass over the rows in their order, at a constant rate."""
_VARIANT_KEYS = ("name", "kind")
"""Keys that determine which other keys a section has."""


def add_inherited(document: dict[str, Any], *, from_scratch: bool) -> None:
    """Add the settings of the parent to a config document that names one, below its own values.

    A run that has begun keeps the settings that it took over. With `from_scratch`, its record is ignored.
    Raises MesetaError if there is no parent, or the run started from another one.
    """
    start_from, run_dir = document.get("start_from"), document.get("run_dir")
    if not isinstance(start_from, str) or not isinstance(run_dir, str | Path):
        return  # Validation of the document reports other types.
    record = None if from_scratch else StartRecord.load(Path(run_dir))
    if record is None:
        parent = Parent.find(start_from, Path(run_dir))
        # Before the checkpoints of the parent are taken for those of the run.
        places = (get_value(document, f"checkpoint.{key}") for key in ("dir", "mirror"))
        parent.check_other_place(Path(run_dir), [place for place in places if isinstance(place, str)])
        record = parent.record(start_from, inherited_document(parent))
        if is_first_rank():
            record.save(Path(run_dir))
    elif record.start_from != start_from:
        raise MesetaError(
            f"run_dir {str(run_dir)!r} started from {record.start_from!r}, not from {start_from!r}; set start_from "
            "back, choose another run_dir, or start from the beginning with --force"
        )
    _merge(document, record.settings)


def inherited_document(parent: Parent) -> dict[str, Any]:
    """Return the settings that a run takes over from its parent. Raises MesetaError if its config is invalid."""
    config = parent.load_config()
    if config is None:
        return {}
    document = config.model_dump(mode="json")
    for key in _NOT_INHERITED:
        *sections, last = key.split(".")
        section = get_value(document, ".".join(sections)) if sections else document
        if isinstance(section, dict):
            section.pop(last, None)
    for key, value in _OWN_DEFAULTS.items():
        set_default(document, key, value)
    _set_scales(document, config, parent.load_dataset())
    return document


def _set_scales(document: dict[str, Any], config: RunConfig, dataset: Dataset) -> None:
    """Set the scales of initial rows that depend on the number of rows, which changes."""
    for feature in dataset.sparse:
        init = InitSpec(**config.embedding.table_init(feature.name))
        if init.scale is None and feature.encoding == "vocabulary":
            table = document["embedding"]["tables"].setdefault(feature.name, {})
            table["init"] = {**(table.get("init") or {}), "scale": init.scale_of(feature.num_embeddings)}


def _merge(document: dict[str, Any], inherited: Mapping[str, Any]) -> None:
    """Add inherited values to a document that does not have them. A section of another kind inherits nothing."""
    for key, value in inherited.items():
        if document.get(key) is None:
            document[key] = value
        elif isinstance(value, Mapping) and isinstance(document[key], dict):
            section = document[key]
            if all(section.get(name, value.get(name)) == value.get(name) for name in _VARIANT_KEYS):
                _merge(section, value)
