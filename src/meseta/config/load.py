"""Loading of a RunConfig from a YAML file and key=value overrides."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard, get_args, get_origin

from pydantic import BaseModel, ValidationError

from meseta.config import former_keys
from meseta.config.models.base import DEFAULT_MODEL, ModelConfig, section_class
from meseta.config.run import RunConfig
from meseta.errors import StorageError, format_value
from meseta.spec import MesetaError, suggest
from meseta.spec.documents import read_mapping
from meseta.system.files import escape
from meseta.system.remote import Location, is_url, to_location
from meseta.system.yaml_text import parse_yaml


def load_config(path: str | Path, overrides: Sequence[str] = (), *, is_stored: bool = False) -> RunConfig:
    """Load a config file and apply overrides such as `train.batch_size=4096`, whose values are YAML.

    `path` may be the name of an example, such as dlrm, unless a file has that name. If `is_stored`, a run has written
    the file: `path` is no example, and former names cause no warning. Raises MesetaError if the file is missing, a key
    is unknown or a value is invalid.
    """
    return validate_document(read_config_document(path, overrides, is_stored=is_stored), path)


def read_config_document(
    path: str | Path | None, overrides: Sequence[str] = (), *, is_stored: bool = False
) -> dict[str, Any]:
    """Read a config file and overrides without validation. If `path` is `None`, read the overrides only.

    See `load_config` for `path` and `is_stored`. Raises MesetaError if the file or an override cannot be read.
    """
    try:
        document = {} if path is None else read_mapping(path) if is_stored else read_file_or_example(path)
        former_keys.rename_keys(document, warns=not is_stored)
    except MesetaError as error:
        raise error.with_prefix(f"config {str(path)!r}: ") from None
    for override in overrides:
        _apply_override(document, override)
    former_keys.rename_values(document, warns=not is_stored)
    return document


def read_file_or_example(path: str | Path) -> dict[Any, Any]:
    """Load a mapping from a file or, if no file has that name, from the example config with that name.

    Raises MesetaError, without the path, if there is neither, or if reading fails.
    """
    if os.path.isfile(path):
        return read_mapping(path)
    from meseta.config.example_files import example_text, has_example_config  # Rarely needed.

    if has_example_config(str(path)):
        return dict(parse_yaml(example_text(str(path))))
    try:
        return read_mapping(path)
    except MesetaError as error:
        if Path(path).suffix or os.path.lexists(path):
            raise
        raise error.with_suffix("; `meseta config --example list` lists the names of examples") from None


def checkpoint_location(run_dir: Path) -> Location:
    """Return the URL or folder of the checkpoints of the run in `run_dir`.

    If its config is missing or invalid, the location is `run_dir/checkpoints`. Raises StorageError if reading fails.
    """
    try:
        url = get_value(read_config_document(run_dir / "config.yaml", is_stored=True), "checkpoint.dir")
        if isinstance(url, str) and is_url(url):
            return to_location(url)
    except StorageError:  # The config may name a URL.
        raise
    except MesetaError:
        pass  # The config is missing, or invalid for this version.
    return run_dir / "checkpoints"


def set_default(document: dict[str, Any], key: str, value: Any) -> None:
    """Set `key`, such as train.batch_size, unless the document has it or a parent of the key is not a section."""
    *parents, last = key.split(".")
    with suppress(_NotASectionError):
        _get_or_make_section(document, parents).setdefault(last, value)


def get_value(document: Any, key: str) -> Any:
    """Return the value of `key`, such as train.batch_size, or `None` if the document does not have it."""
    for name in key.split("."):
        document = document.get(name) if isinstance(document, dict) else None
    return document


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a config with other values of keys such as 'model.dropout'. Raises MesetaError if one is invalid."""
    document = config.model_dump(mode="json")
    for key, value in values.items():
        *parents, last = key.split(".")
        _get_or_make_section(document, parents)[last] = copy.deepcopy(value)
    return validate_document(document)


def validate_document(document: Mapping[str, Any], path: str | Path | None = None) -> RunConfig:
    """Convert a document to a config. Raises MesetaError, with `path`, for all unknown keys and invalid values."""
    where = "config" if path is None else f"config {str(path)!r}"
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        # Pydantic reports an error for each alternative type of `plan`. Their explanations are equal.
        texts = dict.fromkeys(_explain(entry, RunConfig, document) for entry in error.errors())
        raise MesetaError(escape(f"{where}: " + "; ".join(texts))) from None


def _apply_override(document: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise MesetaError(f"override {override!r} must look like train.batch_size=4096")
    *parents, last = former_keys.current_key(key).split(".")
    try:
        _get_or_make_section(document, parents)[last] = parse_yaml(value)
    except _NotASectionError as error:
        raise MesetaError(f"override {format_value(override)}: {error.name!r} holds a value, not a section") from None
    except MesetaError:
        raise MesetaError(f"override {format_value(override)}: {format_value(value)} is not a YAML value") from None


class _NotASectionError(Exception):
    """Key `name` has a value, but a section is required."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _get_or_make_section(document: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    section: Any = document
    for name in names:
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            raise _NotASectionError(name)
    return section


def _explain(error: Mapping[str, Any], form: type[BaseModel], document: Any) -> str:
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        if _is_clipping_key(location[-1]):  # The name may come from another library, such as max_norm.
            if location[0] == "dense":
                return f"unknown key {key!r}; set dense.clip_norm (of all gradients together) or dense.clip_value"
            if location[-2:-1] != ["optimizer"]:
                return f"unknown key {key!r}; {CLIPPING_HINT}"
        valid_keys = _valid_keys(error["loc"][:-1], form, document)
        return f"unknown key {key!r}; {suggest(location[-1], valid_keys)}"
    if error["type"] == "missing":
        return f"key {key!r} is missing"
    if not location:  # The error is about keys of several sections.
        return str(error["ctx"]["error"])
    if location[0] == "plan":  # Pydantic's messages describe the alternative types separately.
        return f"key 'plan': it must be 'auto', a path, or a mapping with the key 'tables', got {error['input']!r}"
    if error["type"] == "model_type":
        return f"key {key!r}: it is a section and must hold keys, got {error['input']!r}"
    if error["type"] == "value_error":
        return f"key {key!r}: {error['ctx']['error']}"
    message = error["msg"].lower().replace("valid tuple", "list").replace("valid dictionary", "mapping")
    return f"key {key!r}: {message}, got {error['input']!r}"


CLIPPING_HINT = (
    "set train.clip_norm (one norm of layers and tables); or embedding.optimizer.clip_norm (of a row) "
    "or clip_value (of an element), and dense.clip_norm or dense.clip_value for all that is not a table"
)


def _is_clipping_key(key: str) -> bool:
    return "clip" in key or "max_norm" in key or "grad_norm" in key or "gradient_norm" in key


def _valid_keys(parents: Sequence[str | int], section: type[BaseModel], document: Any) -> list[str]:
    is_free_name = False
    for name in parents:
        # Skip list indices, and keys of a mapping such as table names, which may be equal to the name of a field.
        if is_free_name or isinstance(name, int):
            is_free_name = False
            continue
        annotation = section.model_fields[str(name)].annotation
        is_free_name = get_origin(annotation) is dict
        section = next(c for c in [annotation, *get_args(annotation)] if _is_section(c))
        if section is ModelConfig:
            section = section_class(get_value(document, "model.name") or DEFAULT_MODEL)
    return list(section.model_fields)


def _is_section(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
