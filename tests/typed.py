"""Type checks of every call in tests."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""Integers are accepted as floats, as in static type checkers."""
