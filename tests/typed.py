"""How the tests check the types of every call."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""A whole number is a number, as type checkers have it."""
