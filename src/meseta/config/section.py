"""What every part of a config is made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Width = Annotated[int, Field(ge=1, le=2**20)]
"""Outputs of one layer, up to a million."""
Depth = Annotated[int, Field(ge=1, le=1024)]
"""Layers, or parts beside each other."""
Count = Annotated[int, Field(ge=1, lt=2**63)]
"""Samples, steps and the like."""
Whole = Annotated[int, Field(ge=0, lt=2**63)]
"""0, 1, 2 and so on."""


class Section(BaseModel):
    """A part of the config: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_means_defaults(cls, value: Any) -> Any:
        """A section whose keys are all commented out reads as null in YAML."""
        return {} if value is None else value
