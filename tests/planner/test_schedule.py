"""Tests of steps with overlapped transfers: closed forms, an independent simulation, and invariants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meseta.planner import predict
from meseta.planner.cost.schedule import Action, Schedule, step_program
from meseta.spec import DenseLoad, Link, Plan, Topology
from meseta.spec.stages import OVERLAPS, Overlap
from meseta.spec.transfer import INTRA_HOST_SUFFIX
from meseta.spec.workload import DenseExchange
from planning_cases import random_workload

FLAT = ("counts", "ids", "embeddings", "agree", "gradients", "dense")
MORE = (*FLAT, "batch norm", "gradients of batch norm", "replicas", "row statistics", "norms")
TWINS = ("embeddings inter-host", "gradients inter-host")
TWO_LEVEL = (*MORE, *TWINS, "counts" + INTRA_HOST_SUFFIX, "ids" + INTRA_HOST_SUFFIX)
COMPUTED = {
    "lookup": 2.0, "dense_only": 3.0, "score": 1.0, "back of score": 2.0, "dense_only backward": 6.0,
    "table_update": 4.0,
}  # fmt: skip


def step_s(hidden: Sequence[Overlap], seconds: dict[str, float], num_parts: int = 1) -> float:
    return Schedule(step_program(hidden, num_parts, seconds)).step_s(COMPUTED | seconds)


@pytest.mark.parametrize(
    ("hidden", "seconds", "exposed"),
    [
        ([], {"embeddings": 5.0, "ids": 2.0, "dense": 1.0}, 8.0),  # all of it
        (["embeddings"], {"embeddings": 2.5}, 0.0),  # behind `forward_dense`
        (["embeddings"], {"embeddings": 5.0}, 2.0),
        (["ids"], {"ids": 15.0}, 0.0),  # score after `forward_dense`, back of both, update: 16
        (["ids"], {"ids": 18.0}, 2.0),
        (["gradients"], {"gradients": 7.0}, 1.0),  # the backward pass of dense_only
        (["agree"], {"agree": 3.0}, 1.0),  # the back of score, until rows move
        (["gradients", "agree"], {"agree": 9.0}, 1.0),  # rows move at the end of the whole backward pass
        (["dense"], {"dense": 3.0}, 1.0),  # rows have moved: the next lookup alone
        (["gradients", "dense"], {"dense": 7.0}, 1.0),  # update and the next lookup
        (["ids", "embeddings"], {"embeddings": 3.0, "ids": 14.0}, 1.0),  # ids begin when answers are there: 13
        ([], {"gradients": 7.0, "gradient norm": 1.0}, 2.0),  # rows move at the end of the whole backward pass
        (["dense"], {"dense": 3.0, "gradient norm": 1.0}, 4.0),  # the norm needs all gradients
        (["ids", "gradients"], {"ids": 8.0, "gradients": 5.0}, 1.0),  # on one link, gradients follow ids: 13 of 12
    ],
)
def test_closed_forms(hidden: Sequence[Overlap], seconds: dict[str, float], exposed: float) -> None:
    assert step_s(hidden, seconds) == pytest.approx(18.0 + exposed)
    waits = Schedule(step_program(hidden, 1, seconds)).wait_seconds(COMPUTED | seconds)
    assert sum(waits.values()) == pytest.approx(exposed)


def test_micro_batches_hide_all_but_the_first_answers_and_the_last_gradients() -> None:
    seconds = {"embeddings": 8.0, "gradients": 8.0}
    assert step_s(["embeddings"], {"embeddings": 8.0}, 4) == pytest.approx(18.0 + (2.0 - 0.75))
    assert step_s(["gradients"], {"gradients": 8.0}, 4) == pytest.approx(18.0 + (2.0 - 1.5))
    assert step_s(["embeddings", "gradients"], seconds, 4) < step_s(["embeddings", "gradients"], seconds, 1)


def simulated_s(program: Sequence[Action], seconds: dict[str, float], num_steps: int = 240) -> float:
    """Simulate steps of a rank without concurrency and a link with a queue, and return the seconds per step."""
    now, link_free, ends, marks = 0.0, 0.0, dict[tuple[str, int], float](), list[float]()
    for _ in range(num_steps):
        for action in program:
            place = (action.name, action.instance)
            if action.kind == "compute":
                now += action.time_share * seconds.get(action.name, 0.0)
            elif action.kind == "begin":
                link_free = max(now, link_free) + action.time_share * seconds.get(action.name, 0.0)
                ends[place] = link_free
            else:
                now = max(now, ends.get(place, 0.0))
        marks.append(now)
    half = num_steps // 2
    return (marks[-1] - marks[half - 1]) / half


@given(seed=st.integers(0, 10_000), num_parts=st.sampled_from([1, 2, 4]), packs=st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_simulation_of_many_steps_takes_as_long(seed: int, num_parts: int, packs: bool) -> None:
    """Holds if no sum is overtaken by a transfer with an immediate wait."""
    draw = np.random.default_rng(seed)
    schedule = Schedule(step_program(OVERLAPS, num_parts, FLAT))
    seconds = {
        name: float(10 ** draw.uniform(-2, 0)) for name in schedule.timed_names if packs or "packing" not in name
    }
    assert schedule.step_s(seconds) == pytest.approx(simulated_s(schedule.actions, seconds), rel=1e-9)


ANY = st.lists(st.sampled_from(OVERLAPS), unique=True)


@given(
    seed=st.integers(0, 10_000), hidden=ANY, num_parts=st.sampled_from([1, 3]), names=st.sampled_from([MORE, TWO_LEVEL])
)
@settings(max_examples=40, deadline=None)
def test_a_step_is_never_longer_than_its_sum(
    seed: int, hidden: list[Overlap], num_parts: int, names: tuple[str, ...]
) -> None:
    draw = np.random.default_rng(seed)
    off, on = (Schedule(step_program(one, num_parts, names)) for one in ((), hidden))
    seconds = {name: float(10 ** draw.uniform(-2, 0)) for name in on.timed_names}
    total = sum(seconds.values())
    alone = {name: 0.0 if name.endswith(("replicas", "counts")) else spent_s for name, spent_s in seconds.items()}
    assert off.step_s(alone) == pytest.approx(sum(alone.values()))  # these two always overlap
    step_s = on.step_s(seconds)
    assert step_s <= total * (1 + 1e-12)
    computed = {action.name: seconds[action.name] for action in on.actions if action.kind == "compute"}
    assert sum(on.wait_seconds(seconds).values()) + sum(computed.values()) == pytest.approx(step_s)
    longer = seconds | {name: seconds[name] * float(draw.uniform(1, 3)) for name in draw.choice(on.timed_names, 4)}
    assert on.step_s(longer) >= step_s * (1 - 1e-12)
    # The longest cycle of these seconds is a lower bound of a step, whatever the other parts take.
    _, cycles = on.longest_cycle(on.duration_array(longer))
    assert float(on.duration_array(seconds)[0] @ cycles[0]) <= step_s * (1 + 1e-12)


SLOW = Link(bytes_per_s=2e8, latency_s=2e-4)
DENSE = DenseLoad(flops_per_sample=3e6, parameter_bytes=2_000_000, before_flops_per_sample=1e6)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize(("hosts", "exchange"), [((1, 2), None), ((2, 2), "flat"), ((2, 2), "hierarchical")])
def test_predicted_steps(hosts: tuple[int, int], exchange: str | None, num_parts: int) -> None:
    work = replace(
        random_workload(5, 2), dense=DENSE, dense_exchange=DenseExchange(num_tensors=4, num_micro_batches=num_parts)
    )
    topology = Topology(num_hosts=hosts[0], devices_per_host=hosts[1], inside=SLOW, across=SLOW)
    document = {"tables": {"t0": "table_row_wise", "*": "row_wise"}, "devices_per_host": hosts[1]}
    plan = Plan.from_dict(document, work.tables, topology.num_ranks)
    plan = replace(plan, exchange=exchange)  # type: ignore[arg-type]
    off, on = predict(plan, work, topology), predict(plan, replace(work, overlap=OVERLAPS), topology)
    assert on.step_s < off.step_s
    for link_s, waited_s, off_s in zip(on.link_s, on.exposed_s, off.exposed_s, strict=True):
        assert (waited_s >= 0).all() and off_s == pytest.approx(link_s)
    assert sum(waited.sum() for waited in on.exposed_s) < sum(waited.sum() for waited in off.exposed_s)
    bottleneck = {name: values[on.bottleneck] for name, values in on.seconds.items()}
    assert sum(bottleneck.values()) <= on.step_s * (1 + 1e-9)
    assert sum(bottleneck.values()) > 0.8 * on.step_s
    means = on.transfers_by_rank[0]["embeddings"]
    number = next(i for i, one in enumerate(on.collectives) if one.name == "embeddings")
    assert means.wait_s == on.exposed_s[number][0]
