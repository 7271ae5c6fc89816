"""Base class and common types of config sections."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from meseta.errors import format_value
from meseta.spec.tables import MAX_VALUE
from meseta.system.files import has_control_characters

Name = TypeVar("Name", str, Path)


def _reject_control_characters(value: Name) -> Name:
    if has_control_characters(str(value)):
        raise ValueError(f"it must have no control characters, got {format_value(str(value))}")
    return value


# Paths are printed in messages.
LocalPath = Annotated[Path, AfterValidator(_reject_control_characters)]
"""Path of a local file or folder, without control characters."""
Url = Annotated[str, AfterValidator(_reject_control_characters)]
"""URL of a folder, without control characters."""

Width = Annotated[int, Field(ge=1, le=2**20)]
"""Number of outputs of a layer."""
Depth = Annotated[int, Field(ge=1, le=1024)]
"""Number of layers, or of parallel parts such as experts."""
# Tensors with a row per sample then have sizes that fit into 63 bits.
BatchSize = Annotated[int, Field(ge=1, lt=2**31)]
"""Number of samples of a batch."""
# Each micro-batch takes time even if it has no samples.
MicroBatchCount = Annotated[int, Field(ge=1, le=2**16)]
"""Number of micro-batches of a step."""
# Values that are only counted and compared need no smaller limit.
PositiveInt = Annotated[int, Field(ge=1, lt=2**63)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63)]


class UsedBy:
    """Annotation of a key that has an effect only for some values of its section's `name` or `kind`."""

    def __init__(self, *values: str) -> None:
        self.values = values


def used_by(field: FieldInfo) -> tuple[str, ...]:
    """Return the values in the key's `UsedBy` annotation, or an empty tuple if it has none."""
    return next((entry.values for entry in field.metadata if isinstance(entry, UsedBy)), ())


class Section(BaseModel):
    """Base class of config sections. Sections are frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    keys_described_by: ClassVar[type | None] = None
    """Class with field docstrings for keys that have none in this section."""

    @field_validator("*")
    @classmethod
    def _fits_float32(cls, value: Any) -> Any:
        # Optimizers and losses convert numbers to float32.
        if isinstance(value, float) and abs(value) > MAX_VALUE["float32"]:
            raise ValueError(f"it must be at most {MAX_VALUE['float32']:.5g}, got {value}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _empty_means_defaults(cls, value: Any) -> Any:
        # A YAML section whose keys are all commented out is null.
        return {} if value is None else value
