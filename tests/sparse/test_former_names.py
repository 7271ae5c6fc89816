"""Tests of former package names."""

import importlib

import pytest


def test_jagged_names_its_successor() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"meseta\.jagged is now meseta\.sparse"):
        importlib.import_module("meseta.jagged")
