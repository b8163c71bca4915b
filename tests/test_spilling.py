"""Arrays of every origin, sharding and element type are spilled and restored under full memory.

The host's object store is real, on devices of jaxlib; only the controller is simulated. Devices
and host memory refuse allocations at random, as full ones do. No refusal may lose an array: each
reads as it was made, and a request fails only where its own allocation was refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spilling_store import (
    CASES,
    IS_LONG,
    KINDS,
    LAYOUTS,
    PROGRAM_KINDS,
    PROGRAM_LAYOUTS,
    PROGRAM_SHAPES,
    PROGRAMS,
    ROUTINE,
    SHAPES,
    Store,
)

from fairway.host.messages import HostArray
from fairway.host.objects import Failed
from fairway.host.spilling import Spilled


@pytest.fixture(scope="module")
def store() -> Any:
    made = Store()
    yield made
    made.close()


def array_made(*choices: Sequence[Any]) -> Any:
    return st.tuples(*map(st.sampled_from, choices), st.integers(0, 1 << 20))


ARRAYS = array_made(ROUTINE, sorted(KINDS), SHAPES, sorted(LAYOUTS)) | array_made(
    PROGRAMS, PROGRAM_KINDS, PROGRAM_SHAPES, PROGRAM_LAYOUTS
)
STEPS = st.tuples(
    st.sampled_from(
        ["spill", "spill", "spill", "restore", "restore", "read", "read", "run", "donate", "keep",
         "share", "share", "delete", "free", "refuse", "refuse", "refuse", "allow"]
    ),
    st.integers(0, 7),
    st.sampled_from(["host", "device", "device", "join"]),
    st.integers(0, 3),
)  # fmt: skip


@settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    derandomize=not IS_LONG,
    suppress_health_check=list(HealthCheck),
)
@given(
    arrays=st.lists(ARRAYS, min_size=1, max_size=4), steps=st.lists(STEPS, min_size=4, max_size=16)
)
def test_no_array_is_lost_by_moving_it(store: Store, arrays: list[Any], steps: list[Any]) -> None:
    store.begin()
    for array in arrays:
        store.make(*array)
    for what, place, memory, count in steps:
        if what == "refuse":
            store.backend.refuse[memory] = count
        elif what == "allow":
            store.backend.refuse.clear()
        elif store.group:
            do(store, what, sorted(store.group)[place % len(store.group)], count)
    store.backend.refuse.clear()
    store.spill()  # retries spills that were refused
    for number in store.spilled:
        assert isinstance(store.objects.values[number], Spilled) or not store.expected[number]
    for number, expected in store.expected.items():
        if expected is not None:
            store.read(number)
        assert not isinstance(store.objects.values[number], Failed)
    for named, at, number, index in store.shared:
        if named in store.group and number in store.group and any(store.expected[named] or ()):
            assert store.address(named, at) == store.address(number, index)
    store.spill(*store.group)
    for number, expected in store.expected.items():
        assert expected is None or isinstance(store.objects.values[number], Spilled)
    for number, expected in store.expected.items():
        if expected is not None:
            store.read(number)


def test_arrays_that_read_one_host_memory_in_place_go_each_its_way(store: Store) -> None:
    store.begin()
    one, other = (store.make("put in place", "float32", (64,), "single", 0) for _ in range(2))
    assert store.address(one, 0) == store.address(other, 0)
    store.spill(one, other)
    store.read(one)
    store.read(other)
    store.spill(one)
    store.read(other)
    store.read(one)
    store.objects.delete([one])
    store.forget(one)
    store.read(other)


def test_names_of_one_memory_without_elements_move_together(store: Store) -> None:
    store.begin()
    made = store.make("jit", "bfloat16", (2, 0), "sub-mesh", 0)
    named = store.share(made, 2)
    store.spill(made)
    assert all(isinstance(store.objects.values[number], Spilled) for number in (made, named))
    store.read(made)
    store.read(named)


def can_run(spec: HostArray) -> bool:
    return spec.dtype in PROGRAM_KINDS and tuple(spec.shards[0].shape) in PROGRAM_SHAPES


def do(store: Store, what: str, number: int, count: int) -> None:
    """Executes one command, as the controller would issue it."""
    alone = len(store.group[number]) == 1
    if what == "spill":
        store.spill(*sorted(store.group)[:: 1 + count], number)
    elif what == "restore":
        store.use(number)
    elif what in ("delete", "free"):
        for one in list(store.group[number]) if what == "delete" else [number]:
            getattr(store.objects, what)([one])
            store.forget(one)
    elif store.expected[number] is not None:
        if what == "read":
            store.read(number)
        elif what == "share":
            store.share(number, count)
        elif alone and can_run(store.specs[number]):
            kind = "jit" if what == "run" else "donate"
            store.launch(number, kind, keep=what == "keep")
