"""Config section `model`, with a class for each model."""

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
"""Modules with the sections of the built-in models."""
MODEL_NAMES = tuple(model_sections())
"""Names of the built-in models."""

__all__ = [
    "MODEL_NAMES",
    "CustomModelConfig",
    "LayeredModelConfig",
    "ModelConfig",
    "VectorModelConfig",
    "model_sections",
    "section_class",
]
