"""Ragged exchanges: no row lost, no excess bytes sent, and experts that train."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    Begin,
    Islands,
    Notebook,
    Start,
    client,
    client_environment,
    hosts_of,
    said,
    until,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fairway.cluster.supervisor import Run
from fairway.host.sparse import Collect, Dispatch, Message
from fairway.settings import Settings

ROOT = Path(__file__).parents[1]

# Packing and unpacking are inverse: all hosts in this process, against a naive model


@st.composite
def edges(draw: st.DrawFn) -> dict[str, Any]:
    """Shards of each host on both sides, and the choices."""
    sources = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(any))
    targets = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(any))
    rows, choices = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    bins = draw(st.integers(1, 3))
    count = sum(sources) * rows * choices
    chosen = st.integers(-1, sum(targets) * bins - 1)
    return {
        "sources": sources,
        "targets": targets,
        "rows": rows,
        "choices": choices,
        "bins": bins,
        "credit": draw(st.integers(1, rows * choices)),
        "each": draw(st.booleans()),
        "chosen": draw(st.lists(chosen, min_size=count, max_size=count)),
    }


def numbers(counts: list[int], order: Any) -> list[list[int]]:
    """The shards of each host, in general not contiguous."""
    shards = iter(order.permutation(sum(counts)))
    return [sorted(int(next(shards)) for _ in range(count)) for count in counts]


def carried(direction: Dispatch | Collect, held: Any, sides: Any, kinds: Any, tail: Any) -> Any:
    """What all hosts receive, given what each of them holds."""
    givers, getters = sides
    packed = {
        giver: direction.pack({shard: held[shard] for shard in shards}, getters)
        for giver, shards in enumerate(givers)
        if shards
    }
    got: dict[int, Any] = {}
    for getter, shards in enumerate(getters):
        if shards:
            messages = [
                Message.read(data[getter], direction.keys, np.dtype(np.float32), tail)
                for data in reversed(packed.values())
            ]
            got |= direction.unpack(messages, dict.fromkeys(shards, kinds))
    return got


@settings(max_examples=150, deadline=None)
@given(edges(), st.integers(0, 2**32 - 1))
def test_every_row_arrives_once_and_comes_back(edge: dict[str, Any], seed: int) -> None:
    order = np.random.default_rng(seed)
    givers, getters = numbers(edge["sources"], order), numbers(edge["targets"], order)
    n, k, bins, credit = (edge[name] for name in ("rows", "choices", "bins", "credit"))
    shards, goals = sum(edge["sources"]), sum(edge["targets"])
    shape = (n, k, 2) if edge["each"] else (n, 2)
    rows = [order.normal(size=shape).astype(np.float32) for _ in range(shards)]
    chosen = np.array(edge["chosen"], np.int32).reshape(shards, n, k)
    held = {shard: [rows[shard], chosen[shard]] for shard in range(shards)}
    capacity = shards * credit
    kinds = [((capacity, 2), np.dtype(np.float32)), ((capacity,), np.dtype(np.int32)),
             ((bins,), np.dtype(np.int32))]  # fmt: skip
    back = np.zeros((shards, n, k, 2), np.float32)
    seen: list[int] = []
    for turn in range(-(-n * k // credit)):
        dispatch = Dispatch(bins, credit, turn, k, edge["each"], n * k)
        got = carried(dispatch, held, (givers, getters), kinds, (2,))
        for goal in range(goals):
            received, origins, counts = got[goal]
            expected = [
                (int(place), shard * n * k + row * k + choice)
                for shard in range(shards)
                for nth, (row, choice, place) in enumerate(
                    (row, choice, chosen[shard, row, choice])
                    for row in range(n)
                    for choice in range(k)
                    if chosen[shard, row, choice] // bins == goal
                )
                if nth // credit == turn
            ]
            expected.sort()
            assert list(origins) == [o for _, o in expected] + [-1] * (capacity - len(expected))
            assert list(counts) == [
                sum(place == goal * bins + one for place, _ in expected) for one in range(bins)
            ]
            for nth, (_, origin) in enumerate(expected):
                shard, rest = divmod(origin, n * k)
                row, choice = divmod(rest, k)
                source = rows[shard][row, choice] if edge["each"] else rows[shard][row]
                assert np.array_equal(received[nth], source)
            assert not received[len(expected) :].any()
            seen += [origin for _, origin in expected]
        returned = carried(
            Collect(n * k),
            {goal: [2 * one[0], one[1]] for goal, one in got.items()},
            (getters, givers),
            [((n, k, 2), np.dtype(np.float32))],
            (2,),
        )
        back += np.stack([returned[shard][0] for shard in range(shards)])
    assert sorted(seen) == list(np.flatnonzero(chosen >= 0)), "each row leaves in one round"
    given_rows = np.stack(rows) if edge["each"] else np.stack(rows)[:, :, None, :]
    assert np.array_equal(back, 2 * given_rows * (chosen >= 0)[..., None])


# On islands

SETUP = """
import fairway
from fairway.parallel import Experts

devices = jax.devices()
meshes = [Mesh(np.array([d for d in devices if d.island == number]), ("x",)) for number in (0, 1)]
on = tuple(NamedSharding(mesh, P("x")) for mesh in meshes)
whole = NamedSharding(meshes[0], P())
rng = np.random.default_rng(0)
same = np.testing.assert_array_equal

def put(arrays, places=on):
    return [jax.device_put(array, place) for array, place in zip(arrays, places)]

def draw(exchange, n=8, k=2, width=3, dtype=np.float32):
    groups = range(len(exchange.sources))
    rows = [rng.normal(size=(n, *([width] if width else []))).astype(dtype) for _ in groups]
    chosen = [rng.integers(-1, exchange.places, size=(n, k)).astype(np.int32) for _ in groups]
    return rows, chosen

def there_and_back(exchange, rows, chosen):
    "Sends rows, checks where they came, and brings them back."
    given, choices = put(rows, exchange.sources), put(chosen, exchange.sources)
    count, back = 0, 0
    for turn in range(exchange.rounds(choices)):
        received = exchange.dispatch(given, choices, turn)
        everything = np.concatenate([np.asarray(row) for row in rows])
        first = 0
        for one in received:
            origins, counts = np.asarray(one.origins), np.asarray(one.counts)
            kept = origins >= 0
            same(np.asarray(one.rows)[kept], everything[origins[kept] // chosen[0].shape[1]])
            flat = np.concatenate(chosen).reshape(-1)[origins[kept]]
            same(np.bincount(flat - first, minlength=len(counts)), counts)
            count, first = count + kept.sum(), first + len(counts)
        collected = exchange.collect([one.rows for one in received], received, choices, turn)
        back = [np.asarray(one) + (back[i] if turn else 0) for i, one in enumerate(collected)]
    assert count == sum((one >= 0).sum() for one in chosen)
    for row, choice, one in zip(rows, chosen, back):
        row = row.reshape(len(row), 1, *row.shape[1:])
        mask = (choice >= 0).reshape(*choice.shape, *[1] * (row.ndim - 2))
        same(one, np.where(mask, row, np.zeros_like(row)))
"""


@pytest.fixture(scope="module")
def pair(runtime: Path) -> Iterator[Run]:
    """Two islands of two hosts with one device each."""
    with Run(Settings.parse("2x2x1")) as running:
        yield running


@pytest.fixture(scope="module")
def notebook(pair: Run) -> Iterator[Notebook]:
    with Notebook(pair, SETUP) as running:
        yield running


@pytest.fixture
def do(notebook: Notebook) -> Callable[[str], None]:
    return notebook.run


def test_rows_of_all_kinds_go_where_they_are_sent(do: Callable[[str], None]) -> None:
    do(
        """
        for options in ({}, {"bins": 3}, {"capacity": 4}, {"capacity": 8, "bins": 2}):
            exchange = fairway.Exchange(on, on, **options)
            there_and_back(exchange, *draw(exchange))
        exchange = fairway.Exchange(on, on)
        for dtype, width in ((jnp.bfloat16, 5), (np.int8, 1), (np.float32, 0), (np.float16, 257)):
            there_and_back(exchange, *draw(exchange, k=1, width=width, dtype=dtype))
        """
    )


def test_groups_may_differ(do: Callable[[str], None]) -> None:
    do(
        """
        alone = jax.sharding.SingleDeviceSharding(devices[-1])
        for sources, targets in ((on[:1], on), (on, on[1:]), ((alone,), on), (on[:1], (alone,))):
            exchange = fairway.Exchange(sources, targets, bins=2)
            there_and_back(exchange, *draw(exchange))
        """
    )


def test_rows_may_go_to_nobody_or_all_to_one(do: Callable[[str], None]) -> None:
    do(
        """
        for capacity in (None, 4):
            exchange = fairway.Exchange(on, on, capacity=capacity)
            for place in (-1, 0, 3):
                rows, chosen = draw(exchange)
                there_and_back(exchange, rows, [np.full_like(one, place) for one in chosen])
        """
    )


def test_experts_and_their_gradients(do: Callable[[str], None]) -> None:
    """Against every expert computing every row, with skewed choices and several rounds."""
    do(
        """
        def expert(weights, rows):
            return jnp.tanh(rows @ weights["a"]) @ weights["b"] + weights["c"]

        def reference(weights, rows, chosen, shares):
            total = 0
            for row, choice, share in zip(rows, chosen, shares):
                made = jnp.stack([expert(jax.tree.map(lambda a: a[e], weights), row)
                                  for e in range(len(weights["a"]))])
                picked = made[choice, jnp.arange(len(row))[:, None]]
                total += (jnp.einsum("nk,nkw->nw", share, picked) ** 2).sum()
            return total

        n, k, width = 16, 2, 6
        for bins, capacity in ((1, None), (2, 8)):
            exchange = fairway.Exchange(on, on, bins, capacity)
            layer = Experts(expert, exchange, block=4)
            count = exchange.places
            weights = {name: (0.4 * rng.normal(size=(count, *shape))).astype(np.float32)
                       for name, shape in (("a", (width, 9)), ("b", (9, width)), ("c", (width,)))}
            rows, _ = draw(exchange, n, k, width)
            chosen = [np.stack([rng.permutation(count)[:k] for _ in range(n)]).astype(np.int32)
                      for _ in on]
            chosen[0][:, 0] = 1
            shares = [rng.uniform(size=(n, k)).astype(np.float32) for _ in on]

            @fairway.program
            def step(weights, rows, chosen, shares):
                def loss(weights, rows, shares):
                    mixed = layer(weights, rows, chosen, shares)
                    first, second = [(one ** 2).sum() for one in mixed]
                    return first + jax.device_put(second, whole)
                return jax.value_and_grad(loss, argnums=(0, 1, 2))(weights, rows, shares)

            got = step(layer.place(weights), put(rows), put(chosen), put(shares))
            loss, (of_weights, of_rows, of_shares) = jax.tree.map(np.asarray, got)
            of_weights = jax.tree.map(lambda *parts: np.concatenate(parts), *of_weights)
            wanted = jax.value_and_grad(reference, argnums=(0, 1, 3))(weights, rows, chosen, shares)
            for one, other in zip(jax.tree.leaves((loss, (of_weights, of_rows, of_shares))),
                                  jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
        """
    )


def test_what_makes_no_sense_is_refused(do: Callable[[str], None]) -> None:
    do(
        """
        from fairway.errors import ExchangeError
        exchange = fairway.Exchange(on, on)
        rows, chosen = draw(exchange)

        def refused(what, text):
            kind, message = fails(what)
            assert kind in ("ExchangeError", "ProgramError"), (kind, message)
            assert text in message, message

        refused(lambda: fairway.Exchange((), on), "needs devices")
        refused(lambda: fairway.Exchange(on, on, bins=0), "at least 1")
        refused(lambda: fairway.Exchange(on, on, capacity=3), "multiple of its 4 source devices")
        refused(lambda: fairway.Exchange((whole,), on), "first axis over all devices")
        refused(lambda: exchange.dispatch(rows[:1], chosen), "2 groups")
        refused(lambda: exchange.dispatch(rows, [one[0] for one in chosen]), "[n, k]")
        refused(lambda: exchange.dispatch(rows, [one.astype(float) for one in chosen]), "int32")
        refused(lambda: exchange.collect(rows[:1], [], chosen), "1 arrays")
        refused(lambda: jax.jit(lambda *a: exchange.dispatch(a[:2], a[2:]))(*rows, *chosen),
                "fairway.program")
        """
    )


def test_a_choice_of_nobody_is_an_error_that_names_the_row(do: Callable[[str], None]) -> None:
    do(
        """
        exchange = fairway.Exchange(on, on)
        rows, chosen = draw(exchange)
        chosen[1][5, 0] = exchange.places
        for one in exchange.dispatch(put(rows), put(chosen)):
            for part in one:
                kind, message = fails(lambda: np.asarray(part))
                assert f"row 1 of an exchange goes to {exchange.places}" in message, message
        there_and_back(exchange, *draw(exchange))
        """
    )


@pytest.mark.local("a timeline is of hosts of this machine")
def test_only_rows_that_are_routed_travel(start: Start, tmp_path: Path) -> None:
    run = start("2x1x2", timeline=tmp_path / "timeline.json")
    width, n, k = 256, 64, 2
    result = client(
        run,
        SETUP
        + f"""
n, k, width = {n}, {k}, {width}
exchange = fairway.Exchange(on, on)
rows, chosen = draw(exchange, n, k, width)
chosen = [np.where(rng.uniform(size=one.shape) < 0.9, number * 2 + one % 2, (one + 2) % 4)
          for number, one in enumerate(chosen)]  # most stay on their island
chosen = [one.astype(np.int32) for one in chosen]
got = exchange.dispatch(put(rows), put(chosen))
collected = exchange.collect([one.rows for one in got], got, chosen)
jax.block_until_ready(collected)
leaving = sum(((one // 2 != number) & (one >= 0)).sum() for number, one in enumerate(chosen))
say("routed", leaving=int(leaving))
""",
    )
    leaving = said(result.stdout, "routed")["leaving"]
    assert 0 < leaving < 0.15 * 2 * n * k, "few rows leave their island"
    run.close()
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    moved = sum(event["args"]["bytes"] for event in events if "to island" in event["name"])
    there = leaving * (4 * width + 8)  # a row, its target, and its origin
    back = leaving * (4 * width + 4)
    heads = 4 * (8 + 15)  # of four messages: a count, and up to alignment
    assert there + back <= moved <= there + back + heads, (moved, there + back)


def test_what_is_moved_is_counted(start: Start, background: Begin) -> None:
    """Bytes to hosts, between them, back, and of ragged exchanges are metrics of the overview."""
    run = start("2x1x2")
    running = background(
        run,
        SETUP
        + """
megabyte = np.ones((256, 1024), np.float32)
def moved():
    say("moved")
    input()
there = jax.device_put(megabyte, on[0])
moved()
across = jax.device_put(there, on[1])
moved()
program = fairway.program(lambda x: jax.device_put(x, on[1]) + 1)
back = np.asarray(program(there))
moved()
received = fairway.Exchange(on[:1], on[1:]).dispatch([there], [jnp.zeros((256, 1), jnp.int32)])
jax.block_until_ready(received[0].rows)
moved()
""",
    )

    def moved() -> float:
        (one,) = run.overview()["clients"]
        return float(one["moved_bytes"]) / (1 << 20)

    for wanted in (1, 2, 4, 5):
        running.hear("moved", 60)
        until(lambda most=wanted + 0.1: most - 0.1 <= moved() < most, 10, f"{wanted} MiB counted")
        running.tell("")


def test_a_lost_host_is_named_where_its_rows_are_used(start: Start, background: Begin) -> None:
    run = start("2x1x2")
    running = background(
        run,
        SETUP
        + """
exchange = fairway.Exchange(on, on)
rows, chosen = draw(exchange)
given, choices = put(rows), put(chosen)
jax.block_until_ready(exchange.dispatch(given, choices))
say("ready")
input()
kind, message = fails(lambda: [jax.block_until_ready(exchange.dispatch(given, choices))
                               for _ in range(1000)])
say("failed", kind=kind, message=message)
there_and_back(fairway.Exchange(on[:1], on[:1]), rows[:1], [one % 2 for one in chosen[:1]])
say("fine")
""",
    )
    running.hear("ready", 120)
    running.tell("")
    os.kill(hosts_of(run)[1]["process"], signal.SIGKILL)
    message = running.hear("failed", 60)["message"]
    assert "host 0 of island 1 is lost" in message, message
    running.hear("fine", 60)


def test_too_much_at_once_is_taken_in_rounds(start: Start) -> None:
    """With 8 MiB a device, the worst case of one round does not fit; several rounds do."""
    run = start("2x1x2", device_memory="8MiB")
    result = client(
        run,
        SETUP
        + """
n, k, width = 512, 2, 1024  # 1 MiB on each device; at worst 8 MiB to one
rows, chosen = draw(fairway.Exchange(on, on), n, k, width)
given, choices = put(rows), put(chosen)
kind, message = fails(lambda: jax.block_until_ready(
    fairway.Exchange(on, on).dispatch(given, choices)))
say("at_once", message=message)
del given, choices
there_and_back(fairway.Exchange(on, on, capacity=256), rows, chosen)
say("in_rounds")
""",
    )
    assert "RESOURCE_EXHAUSTED" in said(result.stdout, "at_once")["message"]
    said(result.stdout, "in_rounds")
    until(lambda: not any(host["memory_bytes"] for host in hosts_of(run)), 10, "all is freed")


# Training


def losses(folder: Path, dispatch: str, islands: Islands | None, *options: str) -> Any:
    """Runs the example to its end; returns its losses."""
    environment = client_environment(islands)
    if islands is None:
        environment["JAX_PLATFORMS"] = "cpu"
    small = {"batch": 8, "sequence": 32, "width": 32, "layers": 1, "steps": 20, "experts": 4}
    command = [sys.executable, str(ROOT / "examples/moe_lm.py"), *options]
    command += [word for name, value in small.items() for word in (f"--{name}", str(value))]
    result = subprocess.run(
        [*command, "--dispatch", dispatch, "--out", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return np.array(json.loads((folder / f"moe_lm_{dispatch}.json").read_text())["losses"])


def test_experts_on_two_islands_train_as_on_one_device(start: Start, tmp_path: Path) -> None:
    wanted = losses(tmp_path, "dense", None)
    run = start("2x1x2")
    found = losses(tmp_path, "sparse", run, "--capacity", "256")  # rounds, as routing is skewed
    assert wanted[-1] < 0.8 * wanted[0], "it learns"
    assert np.max(np.abs(found - wanted) / wanted) < 1e-5
