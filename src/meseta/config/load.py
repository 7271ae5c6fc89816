"""From a YAML file and key=value overrides to a RunConfig, with errors a person can act on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from meseta.config.run import RunConfig
from meseta.spec import MesetaError, nearest


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path` and apply overrides such as `train.batch_size=4096` (values are YAML).

    Raises MesetaError for a missing file, an unknown key (with the nearest valid name) or an ill-typed value.
    """
    try:
        document = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise MesetaError(f"config {str(path)!r}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise MesetaError(f"config {str(path)!r} is not YAML: {error}") from None
    if not isinstance(document, dict):
        raise MesetaError(f"config {str(path)!r} must hold a mapping of keys, such as `run_dir: runs/a`")
    for override in overrides:
        _apply(document, override)
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise MesetaError(f"config {str(path)!r}: " + "; ".join(map(_explain, error.errors()))) from None


def _apply(document: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise MesetaError(f"override {override!r} must look like train.batch_size=4096")
    *parents, last = key.split(".")
    section: Any = document
    for name in parents:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise MesetaError(f"override {override!r}: {name!r} holds a value, not a section")
    try:
        section[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise MesetaError(f"override {override!r}: {value!r} is not a YAML value") from None


def _explain(error: Mapping[str, Any]) -> str:
    """One sentence for one pydantic error."""
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {nearest(location[-1], _keys_beside(location[:-1]))}"
    if error["type"] == "missing":
        return f"key {key!r} is missing"
    return f"key {key!r}: {error['msg'].lower()}, got {error['input']!r}"


def _keys_beside(parents: Sequence[str]) -> list[str]:
    """Valid keys of the section at `parents`."""
    section: type[BaseModel] = RunConfig
    for name in parents:
        field = section.model_fields.get(name)
        candidates = [] if field is None else [field.annotation, *get_args(field.annotation)]
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if models:
            section = models[0]
    return list(section.model_fields)
