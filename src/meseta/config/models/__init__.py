"""The section `model`: one class of keys for each model, found by the value of `name`."""

from meseta.config.models import classic, interactions
from meseta.config.models.base import (
    LayeredModelConfig,
    ModelConfig,
    OwnModelConfig,
    VectorModelConfig,
    model_sections,
    section_class,
)

FILES_OF_SECTIONS = (classic, interactions)
"""Modules whose classes are the sections of this package's models."""
MODEL_NAMES = tuple(model_sections())
"""Models of this package."""

__all__ = [
    "MODEL_NAMES",
    "LayeredModelConfig",
    "ModelConfig",
    "OwnModelConfig",
    "VectorModelConfig",
    "model_sections",
    "section_class",
]
