"""The section `model`: one class of keys for each model, found by the value of `name`."""

from meseta.config.models import classic, interactions
from meseta.config.models.base import (
    CustomModelConfig,
    LayeredModelConfig,
    ModelConfig,
    VectorModelConfig,
    model_sections,
    section_class,
)

SECTION_MODULES = (classic, interactions)
"""Modules whose classes are the sections of this package's models."""
MODEL_NAMES = tuple(model_sections())
"""Models of this package."""

__all__ = [
    "MODEL_NAMES",
    "CustomModelConfig",
    "LayeredModelConfig",
    "ModelConfig",
    "VectorModelConfig",
    "model_sections",
    "section_class",
]
