"""From a YAML file and key=value overrides to a RunConfig, with errors a person can act on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from meseta.config import former_keys
from meseta.config.models.base import DEFAULT_MODEL, ModelConfig, section_class
from meseta.config.run import RunConfig
from meseta.errors import StorageError, format_value
from meseta.machine.files import escape
from meseta.machine.remote import Location, is_url, to_location
from meseta.machine.yaml_text import parse_yaml
from meseta.spec import MesetaError, suggest
from meseta.spec.documents import read_mapping

AnySection = TypeVar("AnySection", bound=BaseModel)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path` and apply overrides such as `train.batch_size=4096` (values are YAML).

    Raises MesetaError for a missing file, an unknown key (with the nearest valid name) or an ill-typed value.
    """
    return validate_document(read_config_document(path, overrides), path)


def read_config_document(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What a config file and overrides say, unchecked; of `path` None, the overrides alone.

    Raises MesetaError for a missing file, or an override that cannot be read.
    """
    try:
        document = {} if path is None else read_mapping(path)
        former_keys.rename_keys(document)
    except MesetaError as error:
        raise error.with_prefix(f"config {str(path)!r}: ") from None
    for override in overrides:
        _apply_override(document, override)
    former_keys.rename_values(document)
    return document


def checkpoint_location(run_dir: Path) -> Location:
    """Where the checkpoints of a run lie: at the URL that its config names, else in it. A config that is not valid
    names none. Raises StorageError if a config cannot be read: it may name a URL."""
    try:
        url = get_value(read_config_document(run_dir / "config.yaml"), "checkpoint.dir")
        if isinstance(url, str) and is_url(url):
            return to_location(url)
    except StorageError:
        raise
    except MesetaError:
        pass  # there is none, or none that this version understands
    return run_dir / "checkpoints"


def set_default(document: dict[str, Any], key: str, value: Any) -> None:
    """Give `key`, such as train.batch_size, a value where the document has none; what is ill-typed is left alone."""
    *parents, last = key.split(".")
    with suppress(_NotASectionError):
        _get_or_make_section(document, parents).setdefault(last, value)


def get_value(document: Any, key: str) -> Any:
    """What a document has at `key`, such as train.batch_size; None where it has nothing."""
    for name in key.split("."):
        document = document.get(name) if isinstance(document, dict) else None
    return document


def validate_document(document: Mapping[str, Any], path: str | Path | None = None) -> RunConfig:
    """The config that a document holds; `path` names it in errors. Raises MesetaError as `load_config` does."""
    return validate_section(RunConfig, document, "config" if path is None else f"config {str(path)!r}")


def validate_section(form: type[AnySection], document: Any, where: str) -> AnySection:
    """The sections of `form` that a document holds. Raises MesetaError, which begins with `where`, naming each key that
    is wrong, and for an unknown one the nearest that is known."""
    try:
        return form.model_validate(document)
    except ValidationError as error:
        raise MesetaError(escape(f"{where}: " + "; ".join(_explain_all(error, form, document)))) from None


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
    """`name` holds a value where a section is wanted."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _get_or_make_section(document: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The section below `names`, made where there is none; raises _NotASectionError."""
    section: Any = document
    for name in names:
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            raise _NotASectionError(name)
    return section


def _explain_all(error: ValidationError, form: type[BaseModel], document: Any) -> list[str]:
    """One sentence per key: pydantic reports each alternative of `plan` on its own."""
    return list(dict.fromkeys(_explain(entry, form, document) for entry in error.errors()))


def _explain(error: Mapping[str, Any], form: type[BaseModel], document: Any) -> str:
    """One sentence for one pydantic error about a document of a `form`."""
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        if _is_clipping_key(location[-1]):
            if location[0] == "dense":
                return f"unknown key {key!r}; set dense.clip_norm (of all gradients together) or dense.clip_value"
            if location[-2:-1] != ["optimizer"]:
                return f"unknown key {key!r}; {CLIPPING_HINT}"
        known = _valid_keys(error["loc"][:-1], form, document)
        return f"unknown key {key!r}; {suggest(location[-1], known)}"
    if error["type"] == "missing":
        return f"key {key!r} is missing"
    if not location:  # about several sections
        return str(error["ctx"]["error"])
    if location[0] == "plan":
        return f"key 'plan': it must be 'auto', a path, or a mapping with the key 'tables', got {error['input']!r}"
    if error["type"] == "model_type":
        return f"key {key!r}: it is a section and must hold keys, got {error['input']!r}"
    if error["type"] == "value_error":
        return f"key {key!r}: {error['ctx']['error']}"
    message = error["msg"].lower().replace("valid tuple", "list").replace("valid dictionary", "mapping")
    return f"key {key!r}: {message}, got {error['input']!r}"


CLIPPING_HINT = (
    "set train.clip_norm (one norm of layers and tables, in one process); or embedding.optimizer.clip_norm (of a row) "
    "or clip_value (of an element), and dense.clip_norm or dense.clip_value for all that is not a table"
)


def _is_clipping_key(key: str) -> bool:
    return "clip" in key or "max_norm" in key or "grad_norm" in key or "gradient_norm" in key


def _valid_keys(parents: Sequence[str | int], section: type[BaseModel], document: Any) -> list[str]:
    """Valid keys of the section at `parents` of a document, from its outermost `section` on."""
    is_free_name = False
    for name in parents:
        if is_free_name or isinstance(name, int):  # of a table, which may be that of a field as well; in a list
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
