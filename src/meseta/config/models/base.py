"""Base classes of model sections, and selection of a class by the model's name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import Field, ModelWrapValidatorHandler, field_validator, model_validator

from meseta.config.section import Section, Width
from meseta.spec import suggest

IMPORT_PATH_PATTERN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""Pattern of the name of a custom model, 'package.module:Class'."""
LEGACY_KEYS = frozenset(
    {"options", "embedding_dim", "bottom_mlp", "top_mlp", "interaction", "cross_layers", "cross_low_rank", "deep_mlp",
     "cin_layers", "attention_layers", "attention_heads", "attention_dim", "num_experts", "expert_mlp", "tower_mlp",
     "dropout", "batch_norm"}
)  # fmt: skip
"""Keys of the section `model` in configs of earlier versions, which had all keys for every model. Keys without an
effect for the model are ignored when such a config is loaded. Do not add keys."""
DEFAULT_MODEL = "dlrm"


class ModelConfig(Section):
    """Base class of model sections. `ModelConfig(name=..., ...)` creates an object of the named model's class."""

    name: str = DEFAULT_MODEL
    """Name of a built-in model, or 'package.module:Class' of a custom model."""
    weight_columns: ClassVar[int] = 0
    """Number of table columns in addition to the embedding. It is 1 if the last column holds the linear weight of the
    id."""
    small_sizes: ClassVar[Mapping[str, Any]] = {}
    """Values of keys for small datasets, if they differ from the defaults."""
    accepts_legacy_keys: ClassVar[bool] = False
    """Whether configs of earlier versions may name this model."""

    def __new__(cls, *_: Any, **keys: Any) -> ModelConfig:
        return super().__new__(section_class(keys.get("name", DEFAULT_MODEL)) if cls is ModelConfig else cls)

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)

    @model_validator(mode="wrap")
    @classmethod
    def _validate_by_name(cls, value: Any, handler: ModelWrapValidatorHandler[ModelConfig]) -> ModelConfig:
        if not isinstance(value, Mapping | None):
            return handler(value)
        keys = {} if value is None else dict(value)
        for key in keys:
            if not isinstance(key, str):  # pydantic-core would raise a TypeError.
                raise ValueError(f"keys should be strings, got {key!r}")
        if cls is not ModelConfig:
            return handler(_drop_legacy_keys(cls, keys))
        named = section_class(keys.get("name", DEFAULT_MODEL))
        return named.model_validate(keys) if named is not ModelConfig else handler({"name": keys["name"]})

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        names = model_sections()
        if name not in names and not IMPORT_PATH_PATTERN.fullmatch(name):
            raise ValueError(f"no model {name!r}; {suggest(name, names)}, or set a custom model 'package.module:Class'")
        return name

    def table_width(self, embedding_dim: int | None = None) -> int:
        """Return the number of columns of a table, by default for the embedding dimension of this section."""
        return (getattr(self, "embedding_dim", 0) if embedding_dim is None else embedding_dim) + self.weight_columns


class VectorModelConfig(ModelConfig):
    """Section of a model with an embedding per id."""

    embedding_dim: Width = 16
    """Embedding dimension. Tables have one more column if the model has a linear weight per id."""


class LayeredModelConfig(VectorModelConfig):
    """Section of a model with hidden layers."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of hidden layers in training. Masks do not depend on the number of ranks."""
    batch_norm: bool = False
    """Whether to apply batch normalization to hidden layers before ReLU, with statistics of the global batch."""


class CustomModelConfig(VectorModelConfig):
    """Section of a custom model."""

    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the model's constructor."""
    accepts_legacy_keys = True


def model_sections() -> dict[str, type[ModelConfig]]:
    """Return the section classes of the built-in models by model name."""
    sections = {}
    for cls in _all_subclasses(ModelConfig):
        annotation: Any = cls.model_fields["name"].annotation
        if get_origin(annotation) is Literal:  # Base classes accept any name.
            sections[str(get_args(annotation)[0])] = cls
    return dict(sorted(sections.items()))


def section_class(name: object) -> type[ModelConfig]:
    """Return the section class of a model. For an invalid name it is `ModelConfig`, which only has the key `name`."""
    if not isinstance(name, str):
        return ModelConfig
    default = CustomModelConfig if IMPORT_PATH_PATTERN.fullmatch(name) else ModelConfig
    return model_sections().get(name, default)


def _all_subclasses(cls: type[ModelConfig]) -> Iterator[type[ModelConfig]]:
    for one in cls.__subclasses__():
        yield one
        yield from _all_subclasses(one)


def _drop_legacy_keys(cls: type[ModelConfig], keys: dict[str, Any]) -> dict[str, Any]:
    """Remove legacy keys that have no effect for the model.

    Raises ValueError for `options`, `dropout` and `batch_norm`, which earlier versions rejected as well.
    """
    if not cls.accepts_legacy_keys:
        return keys
    name = keys.get("name", DEFAULT_MODEL)
    legacy = {key: value for key, value in keys.items() if key in LEGACY_KEYS and key not in cls.model_fields}
    if legacy.get("options"):
        raise ValueError(
            f"'options' are for custom models, named as 'package.module:Class'; set the keys of {name!r} directly "
            "in the section model"
        )
    for key in ("dropout", "batch_norm"):
        if legacy.get(key):
            way_out = "leave it out, and set it in the custom model, for example through model.options"
            raise ValueError(
                f"model.name {name!r}: model.{key} {legacy[key]!r} applies to hidden layers of built-in models only; "
                + (way_out if cls is CustomModelConfig else "leave it out, or choose a model with hidden layers")
            )
    return {key: value for key, value in keys.items() if key not in legacy}
