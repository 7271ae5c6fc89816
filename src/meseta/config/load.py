"""From a YAML file and key=value overrides to a RunConfig, with errors a person can act on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from meseta.config.models.base import DEFAULT_NAME, ModelConfig, section_class
from meseta.config.run import RunConfig
from meseta.errors import StorageError, shown
from meseta.machine.files import escaped
from meseta.machine.remote import Location, is_url, locate
from meseta.machine.yaml_text import parse_yaml
from meseta.spec import MesetaError, nearest
from meseta.spec.documents import read_mapping

AnySection = TypeVar("AnySection", bound=BaseModel)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path` and apply overrides such as `train.batch_size=4096` (values are YAML).

    Raises MesetaError for a missing file, an unknown key (with the nearest valid name) or an ill-typed value.
    """
    return check_document(read_document(path, overrides), path)


def read_document(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What a config file and overrides say, unchecked; of `path` None, the overrides alone.

    Raises MesetaError for a missing file, or an override that cannot be read.
    """
    try:
        document = {} if path is None else read_mapping(path)
    except MesetaError as error:
        raise error.with_prefix(f"config {str(path)!r}: ") from None
    for override in overrides:
        _apply(document, override)
    return document


def checkpoints_of_run(run_dir: Path) -> Location:
    """Where the checkpoints of a run lie: at the URL that its config names, else in it. A config that is not valid
    names none. Raises StorageError if a config cannot be read: it may name a URL."""
    try:
        url = value_at(read_document(run_dir / "config.yaml"), "checkpoint.dir")
        if isinstance(url, str) and is_url(url):
            return locate(url)
    except StorageError:
        raise
    except MesetaError:
        pass  # there is none, or none that this version understands
    return run_dir / "checkpoints"


def set_default(document: dict[str, Any], key: str, value: Any) -> None:
    """Give `key`, such as train.batch_size, a value where the document has none; what is ill-typed is left alone."""
    *parents, last = key.split(".")
    with suppress(_NoSectionError):
        _section_at(document, parents).setdefault(last, value)


def value_at(document: Any, key: str) -> Any:
    """What a document has at `key`, such as train.batch_size; None where it has nothing."""
    for name in key.split("."):
        document = document.get(name) if isinstance(document, dict) else None
    return document


def check_document(document: Mapping[str, Any], path: str | Path | None = None) -> RunConfig:
    """The config that a document holds; `path` names it in errors. Raises MesetaError as `load_config` does."""
    return check_section(RunConfig, document, "config" if path is None else f"config {str(path)!r}")


def check_section(form: type[AnySection], document: Any, where: str) -> AnySection:
    """The sections of `form` that a document holds. Raises MesetaError, which begins with `where`, naming each key that
    is wrong, and for an unknown one the nearest that is known."""
    try:
        return form.model_validate(document)
    except ValidationError as error:
        raise MesetaError(escaped(f"{where}: " + "; ".join(_explain_all(error, form, document)))) from None


def _apply(document: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise MesetaError(f"override {override!r} must look like train.batch_size=4096")
    *parents, last = key.split(".")
    try:
        _section_at(document, parents)[last] = parse_yaml(value)
    except _NoSectionError as error:
        raise MesetaError(f"override {shown(override)}: {error.name!r} holds a value, not a section") from None
    except MesetaError:
        raise MesetaError(f"override {shown(override)}: {shown(value)} is not a YAML value") from None


class _NoSectionError(Exception):
    """`name` holds a value where a section is wanted."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _section_at(document: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The section below `names`, made where there is none; raises _NoSectionError."""
    section: Any = document
    for name in names:
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            raise _NoSectionError(name)
    return section


def _explain_all(error: ValidationError, form: type[BaseModel], document: Any) -> list[str]:
    """One sentence per key: pydantic reports each alternative of `plan` on its own."""
    return list(dict.fromkeys(_explain(entry, form, document) for entry in error.errors()))


def _explain(error: Mapping[str, Any], form: type[BaseModel], document: Any) -> str:
    """One sentence for one pydantic error about a document of a `form`."""
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        if _asks_for_clipping(location[-1]):
            if location[0] == "dense":
                return f"unknown key {key!r}; set dense.clip_norm (of all gradients together) or dense.clip_value"
            if location[-2:-1] != ["optimizer"]:
                return f"unknown key {key!r}; {WAYS_TO_CLIP}"
        known = _keys_beside(error["loc"][:-1], form, document)
        return f"unknown key {key!r}; {nearest(location[-1], known)}"
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


WAYS_TO_CLIP = (
    "set train.clip_norm (one norm of layers and tables, in one process); or embedding.optimizer.clip_norm (of a row) "
    "or clip_value (of an element), and dense.clip_norm or dense.clip_value for all that is not a table"
)


def _asks_for_clipping(key: str) -> bool:
    return "clip" in key or "max_norm" in key or "grad_norm" in key or "gradient_norm" in key


def _keys_beside(parents: Sequence[str | int], section: type[BaseModel], document: Any) -> list[str]:
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
            section = section_class(value_at(document, "model.name") or DEFAULT_NAME)
    return list(section.model_fields)


def _is_section(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
