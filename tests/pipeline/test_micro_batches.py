"""Errors of one of several micro-batches."""

from __future__ import annotations

import pytest

from meseta.errors import UnknownColumnError
from meseta.pipeline.lookahead import micro_batch_error_context
from meseta.pipeline.losses import LateNonFiniteLoss
from meseta.spec import MesetaError


def test_an_error_names_its_micro_batch_and_keeps_its_attributes() -> None:
    error = UnknownColumnError("log", "usr", ["user"])
    error.rank = 2
    with pytest.raises(UnknownColumnError) as caught, micro_batch_error_context(0, 3):
        raise error
    assert str(caught.value) == "micro-batch 1 of 3: log has no column 'usr'; did you mean 'user'?"
    assert (caught.value.column, caught.value.rank, caught.value.remedy) == ("usr", 2, "did you mean 'user'?")


@pytest.mark.parametrize(("num_parts", "error"), [(1, MesetaError("lost")), (3, LateNonFiniteLoss("it is inf"))])
def test_errors_without_a_micro_batch_are_raised_unchanged(num_parts: int, error: MesetaError) -> None:
    with pytest.raises(MesetaError) as caught, micro_batch_error_context(0, num_parts):
        raise error
    assert caught.value is error
