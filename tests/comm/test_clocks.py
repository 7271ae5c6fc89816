"""Clock offsets between hosts, estimated from exchanges that no rank leaves before all have entered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meseta.comm import World
from meseta.comm.clocks import estimate_offsets, measure_rank_clocks


@given(st.data(), st.integers(2, 5), st.integers(1, 8))
def test_the_true_offset_is_within_the_bounds(data: st.DataObject, num_ranks: int, num_exchanges: int) -> None:
    """Exchanges, arrivals and offsets of hosts are arbitrary."""
    clocks = [data.draw(st.sampled_from(["a", "b", "c"])) for _ in range(num_ranks)]
    ahead = {name: data.draw(st.floats(-1e6, 1e6)) for name in "abc"}
    now, moments = 0.0, [list[tuple[float, float]]() for _ in range(num_ranks)]
    for _ in range(num_exchanges):
        entered = [now + data.draw(st.floats(0.0, 0.1)) for _ in range(num_ranks)]
        left = [max(entered) + data.draw(st.floats(1e-5, 0.1)) for _ in range(num_ranks)]
        now = max(left)
        for rank, clock in enumerate(clocks):
            moments[rank].append((entered[rank] + ahead[clock], left[rank] + ahead[clock]))
    for clock, (offset_s, error_s) in zip(clocks, estimate_offsets(clocks, moments), strict=True):
        assert abs(ahead[clocks[0]] - ahead[clock] - offset_s) <= error_s + 1e-9
        assert (error_s == 0.0) == (clock == clocks[0]) and error_s <= 0.2


def test_the_worked_example() -> None:
    [_, (offset_s, error_s)] = estimate_offsets(["a", "b"], [[(10.0, 10.004)], [(73.001, 73.004)]])
    assert round(offset_s, 6) == -63.0005 and round(error_s, 6) == 0.0035


def test_one_rank_has_one_clock() -> None:
    [clock] = measure_rank_clocks(World.single())
    assert (clock.offset_s, clock.error_s) == (0.0, 0.0) and clock.host
