"""``fairway.place``: all its strategies train the same, and impossible requests are refused."""

import dataclasses

import pytest
from conftest import Up, client, said
from test_split import MODELS

from fairway.parallel.joined import ConfiguredNetwork
from fairway.parallel.measuring import Costs
from fairway.parallel.placing import copied, piped

FORWARD_S, BACKWARD_S, ADD_S, UPDATE_S = 0.010, 0.020, 0.001, 0.004
MEGABIT = 125_000


@dataclasses.dataclass(frozen=True)
class Known:
    """Two equal blocks, whose time is proportional to their rows."""

    rows: int = 8
    devices: int = 4

    def blocks(self, rows: int) -> list[Costs]:
        part = rows / self.rows
        size = round(part * MEGABIT)
        block = Costs(part * FORWARD_S, part * BACKWARD_S, ADD_S, UPDATE_S, size, 2 * MEGABIT)
        return [block, block]

    stages = blocks


NETWORK = ConfiguredNetwork(2, "100Mbit/s", "0ns")


def test_copies_take_what_they_compute_and_what_is_not_hidden():
    known = Known()
    alone = copied(known, "replicas", 1, NETWORK)
    assert alone.step_s == pytest.approx(2 * (FORWARD_S + BACKWARD_S + UPDATE_S))
    # Two megabits for each block: 20 ms; the last block's overlap the first one's 10 ms backward.
    both = copied(known, "replicas", 2, NETWORK)
    computed = FORWARD_S + BACKWARD_S / 2
    assert both.step_s == pytest.approx(computed + 0.040 + UPDATE_S, rel=1e-3)
    assert both.memory_bytes == 4 * 4 * MEGABIT
    shared = copied(known, "sharded", 2, NETWORK)
    assert shared.memory_bytes < both.memory_bytes
    assert shared.step_s > computed


def test_stages_take_turns():
    known = Known()
    one = piped(known, 1, "1f1b", NETWORK)
    # No overlap, and a megabit in each direction.
    whole = 2 * (FORWARD_S + BACKWARD_S) + UPDATE_S + 2 * 0.010
    assert one.step_s == pytest.approx(whole, rel=1e-3)
    four = piped(known, 4, "gpipe", ConfiguredNetwork(2, "100Gbit/s", "0ns"))
    # Five quarters of a stage instead of eight of both; gradients are added up three times.
    computed = 1.25 * (FORWARD_S + BACKWARD_S) + 3 * ADD_S + UPDATE_S
    assert four.step_s == pytest.approx(computed, rel=1e-2)
    assert four.memory_bytes == 4 * 2 * MEGABIT


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_kind_of_way_trains_the_same(up: Up, measured, every):
    ended = client(
        up,
        MODELS
        + f"""
every = {every}
"""
        + """
import fairway
modules, variables = linen_blocks()

def place(islands=islands, **options):
    training = fairway.Training(words, targets, loss, optimizer())
    options = fairway.StrategyOptions(variables=variables, microbatches=(1, 2), **options)
    return fairway.place(modules, islands, options, training=training)

wanted, _ = train_whole(whole, [own["params"] for own in variables])
placed = place()
shown = repr(placed)
said = place(network="1Gbit/s")
off = {}
kinds = {strategy.kind: strategy for strategy in placed.strategies}
for strategy in placed.strategies if every else kinds.values():
    trainer, parameters = placed.trainer(strategy)
    state, losses = trainer.init(parameters), []
    for _ in range(3):
        state, value = trainer.step(state, words, targets)
        losses.append(float(value))
    off[str(strategy)] = float(np.max(np.abs(np.array(losses) / np.array(wanted[:3]) - 1)))
say("done", off=off, shown=shown, ranked=[str(strategy) for strategy in placed.strategies],
    step_s=[strategy.step_s for strategy in placed.strategies],
    kinds=[strategy.kind for strategy in placed.strategies],
    said=[strategy.step_s for strategy in said.strategies],
    full=fails(lambda: place(memory_bytes=1)),
    uneven=fails(lambda: place([islands[0], islands[1][:1]])),
    none=fails(lambda: place([])))
""",
        400,
    )
    done = said(ended.stdout, "done")
    assert len(done["off"]) == (6 if every else 3), done["off"]
    measured("losses off", max(done["off"].values()))
    assert max(done["off"].values()) <= 1e-5
    assert next(iter(done["ranked"])) in done["shown"]
    assert "ms a step predicted" in done["shown"]
    assert done["step_s"] == sorted(done["step_s"])
    assert len(done["said"]) == 6
    assert set(done["kinds"]) == {"replicas", "sharded", "pipeline"}
    assert done["full"][0] == "CapacityError"
    assert done["uneven"][1] == "islands have [2, 1] devices; expected one size"
    assert done["none"][0] == "ConfigError"
