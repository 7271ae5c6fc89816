"""Type checks of calls in tests."""

import re
from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

SHAPE = re.compile(r"""\w\[.*["']""", re.DOTALL)
"""Annotation with a shape, such as `Int64[Tensor, "B"]`."""

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""Checks all types of each call. Integers are accepted as floats, as in static type checkers."""


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the types of each call of a function that has a shape in its signature. Return others unchanged."""
    has_shape = any(SHAPE.search(str(annotation)) for annotation in function.__annotations__.values())
    return check(function) if has_shape else function
