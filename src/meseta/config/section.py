"""What every part of a config is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from meseta.errors import format_value
from meseta.machine.files import has_control_characters
from meseta.spec.tables import MAX_VALUE

Name = TypeVar("Name", str, Path)


def _reject_control_characters(value: Name) -> Name:
    if has_control_characters(str(value)):
        raise ValueError(f"it must have no control characters, got {format_value(str(value))}")
    return value


LocalPath = Annotated[Path, AfterValidator(_reject_control_characters)]
"""Path of a file or folder."""
Url = Annotated[str, AfterValidator(_reject_control_characters)]
"""URL of a folder."""

Width = Annotated[int, Field(ge=1, le=2**20)]
"""Outputs of one layer, up to a million."""
Depth = Annotated[int, Field(ge=1, le=1024)]
"""Layers, or parts beside each other."""
BatchSize = Annotated[int, Field(ge=1, lt=2**31)]
"""Samples of a batch: tensors with a row for each have sizes that fit into 63 bits."""
MicroBatchCount = Annotated[int, Field(ge=1, le=2**16)]
"""Parts of a step, each of which takes time even if it has no sample."""
PositiveInt = Annotated[int, Field(ge=1, lt=2**63)]
"""Rows, steps and the like, which are only counted and compared."""
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63)]
"""0, 1, 2 and so on."""


class UsedBy:
    """Metadata of a key that has an effect only for some values of its section's `name`, or of its `kind`."""

    def __init__(self, *values: str) -> None:
        """`values`: those for which it has one."""
        self.values = values


def used_by(field: FieldInfo) -> tuple[str, ...]:
    """Return the values of `UsedBy`; empty if the key always has an effect."""
    return next((entry.values for entry in field.metadata if isinstance(entry, UsedBy)), ())


class Section(BaseModel):
    """A part of the config: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    keys_described_by: ClassVar[type | None] = None
    """Class whose docstrings of fields describe the keys of the same names that have none here."""

    @field_validator("*")
    @classmethod
    def _fits_float32(cls, value: Any) -> Any:
        """Optimizers and losses take numbers as float32."""
        if isinstance(value, float) and abs(value) > MAX_VALUE["float32"]:
            raise ValueError(f"it must be at most {MAX_VALUE['float32']:.5g}, got {value}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _empty_means_defaults(cls, value: Any) -> Any:
        """A section whose keys are all commented out reads as null in YAML."""
        return {} if value is None else value
