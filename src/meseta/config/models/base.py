"""What every section `model` is: the keys of the model that it names, and of no other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import Field, ModelWrapValidatorHandler, field_validator, model_validator

from meseta.config.section import Section, Width
from meseta.spec import suggest

IMPORT_PATH_PATTERN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""'package.module:Class', a model of the user's own."""
LEGACY_KEYS = frozenset(
    {"options", "embedding_dim", "bottom_mlp", "top_mlp", "interaction", "cross_layers", "cross_low_rank", "deep_mlp",
     "cin_layers", "attention_layers", "attention_heads", "attention_dim", "num_experts", "expert_mlp", "tower_mlp",
     "dropout", "batch_norm"}
)  # fmt: skip
"""Keys that stood in every section `model` before each model had its own. Configs of then load, and what was without
effect for their model is left out; no key is added here."""
DEFAULT_MODEL = "dlrm"


class ModelConfig(Section):
    """`ModelConfig(name=..., ...)` is an object of the class that has the keys of that model."""

    name: str = DEFAULT_MODEL
    """What is trained: a model of this package, or 'package.module:Class', a model of your own."""
    weight_columns: ClassVar[int] = 0
    """Columns of a table beside the vector: 1 where the weight of an id by itself is the last one of its row."""
    small_sizes: ClassVar[Mapping[str, Any]] = {}
    """Sizes for small data, where they are not the defaults."""
    accepts_legacy_keys: ClassVar[bool] = False
    """Whether configs of this model are older than its class."""

    def __new__(cls, *_: Any, **keys: Any) -> ModelConfig:
        """Of the class of the model that is named; without a name, of the default."""
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
            if not isinstance(key, str):  # pydantic-core raises a TypeError
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
            raise ValueError(f"no model {name!r}; {suggest(name, names)}, or give your own as 'package.module:Class'")
        return name

    def table_width(self, embedding_dim: int | None = None) -> int:
        """Columns of a table whose vectors have so many numbers; None: as many as the section says."""
        return (getattr(self, "embedding_dim", 0) if embedding_dim is None else embedding_dim) + self.weight_columns


class VectorModelConfig(ModelConfig):
    """Of a model that reads a vector per id."""

    embedding_dim: Width = 16
    """Numbers of the vector of an id: columns of every table, which has one more where the weight of an id by itself
    stands beside its vector."""


class LayeredModelConfig(VectorModelConfig):
    """Of a model with hidden layers."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the outputs of hidden layers that is dropped in training; masks do not depend on the number of ranks."""
    batch_norm: bool = False
    """Normalise the outputs of hidden layers before ReLU, with statistics of the global batch."""


class CustomModelConfig(VectorModelConfig):
    """A model of your own."""

    options: dict[str, Any] = Field(default={})
    """Keyword arguments of its constructor."""
    accepts_legacy_keys = True


def model_sections() -> dict[str, type[ModelConfig]]:
    """The classes of this package's models, by the one value that each allows as `name`."""
    found = {}
    for cls in _all_subclasses(ModelConfig):
        annotation: Any = cls.model_fields["name"].annotation
        if get_origin(annotation) is Literal:
            found[str(get_args(annotation)[0])] = cls
    return dict(sorted(found.items()))


def section_class(name: object) -> type[ModelConfig]:
    """The class that has the keys of the model called so; of what can be no name, the one that has none but `name`."""
    if not isinstance(name, str):
        return ModelConfig
    own = CustomModelConfig if IMPORT_PATH_PATTERN.fullmatch(name) else ModelConfig
    return model_sections().get(name, own)


def _all_subclasses(cls: type[ModelConfig]) -> Iterator[type[ModelConfig]]:
    for one in cls.__subclasses__():
        yield one
        yield from _all_subclasses(one)


def _drop_legacy_keys(cls: type[ModelConfig], keys: dict[str, Any]) -> dict[str, Any]:
    """The keys without former ones of other models. Raises ValueError for one that was refused beside this name."""
    if not cls.accepts_legacy_keys:
        return keys
    name = keys.get("name", DEFAULT_MODEL)
    others = {key: value for key, value in keys.items() if key in LEGACY_KEYS and key not in cls.model_fields}
    if others.get("options"):
        raise ValueError(
            f"'options' are for a model of your own, named as 'package.module:Class'; {name!r} has keys of its own here"
        )
    for key in ("dropout", "batch_norm"):
        if others.get(key):
            way_out = "a model of your own decides by itself, for example by model.options"
            raise ValueError(
                f"model.name {name!r}: model.{key} {others[key]!r} is for the hidden layers of this package's models; "
                + (way_out if cls is CustomModelConfig else "leave it out, or choose a model with hidden layers")
            )
    return {key: value for key, value in keys.items() if key not in others}
