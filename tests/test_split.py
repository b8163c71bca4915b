"""Models in stages: partitions are optimal, and a split model trains as the whole one does."""

import itertools

import pytest
from conftest import Up, client, said
from hypothesis import given, settings
from hypothesis import strategies as st

from fairway.errors import ConfigError
from fairway.parallel.splits import borders

COSTS = st.lists(st.integers(0, 50), min_size=1, max_size=9)


def largest(costs: list[float], cuts: tuple[int, ...]) -> float:
    return max(sum(costs[slice(*pair)]) for pair in itertools.pairwise(cuts))


@given(COSTS, st.data())
@settings(deadline=None)
def test_no_other_cut_has_a_smaller_largest_stage(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    cuts = borders(costs, stages)
    assert cuts[0] == 0
    assert cuts[-1] == len(costs)
    assert len(cuts) == stages + 1
    assert sorted(set(cuts)) == cuts
    inner = itertools.combinations(range(1, len(costs)), stages - 1)
    best = min(largest(costs, (0, *cut, len(costs))) for cut in inner)
    assert largest(costs, tuple(cuts)) == best
    assert borders(costs, stages) == cuts


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ConfigError, match="2 blocks cannot make 3 stages"):
        borders([1, 1], 3)
    with pytest.raises(ConfigError, match="cannot make 0 stages"):
        borders([1, 1], 0)
    with pytest.raises(ConfigError, match="numbers of at least 0"):
        borders([1, float("nan")], 2)


MODELS = """
import optax
from flax import linen, nnx
from fairway.parallel import Pipeline, split

WIDTH, WORDS, STEPS = 16, 12, 20
words = np.random.default_rng(0).integers(0, WORDS, (8, 6)).astype("i")
targets = np.roll(words, 1, axis=1)

def loss(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(self.norm(x))))

def blocks(rngs):
    return [
        nnx.Embed(WORDS, WIDTH, rngs=rngs), Block(rngs), jnp.tanh, Block(rngs),
        nnx.Linear(WIDTH, WORDS, rngs=rngs),
    ]

class LinenBlock(linen.Module):
    width: int
    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(self.width)(jnp.tanh(linen.LayerNorm()(x)))

def linen_blocks():
    modules = [linen.Embed(WORDS, WIDTH), LinenBlock(WIDTH), LinenBlock(WIDTH), linen.Dense(WORDS)]
    value, variables = words, []
    for number, module in enumerate(modules):
        variables.append(module.init(jax.random.key(number), value))
        value = module.apply(variables[-1], value)
    return modules, variables

def whole(parameters, value):
    for module, own in zip(modules, parameters):
        value = module.apply({"params": own}, value)
    return value

islands = [jax.devices()[:2], jax.devices()[4:6]]

def optimizer():
    return optax.adam(1e-2)

def train_whole(function, parameters):
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        state = optimizer().init(parameters)
        @jax.jit
        def step(parameters, state):
            value, gradients = jax.value_and_grad(
                lambda p: loss(function(p, words), targets))(parameters)
            changes, state = optimizer().update(gradients, state, parameters)
            return optax.apply_updates(parameters, changes), state, value
        losses = []
        for _ in range(STEPS):
            parameters, state, value = step(parameters, state)
            losses.append(float(value))
        return losses, parameters

def train_split(parts, rounds=1):
    schedule = "1f1b" if rounds == 1 else "interleaved"
    pipeline = Pipeline(
        parts.stages, loss, optimizer(), microbatches=4, schedule=schedule, rounds=rounds)
    state, losses = pipeline.init(parts.parameters), []
    for _ in range(STEPS):
        state, value = pipeline.step(state, words, targets)
        losses.append(float(value))
    return losses, state.parameters

def far(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)
"""


def test_an_nnx_model_trains_as_it_does_unsplit(up: Up, measured):
    ended = client(
        up,
        MODELS
        + """
model = nnx.Sequential(*blocks(nnx.Rngs(0)))
before = np.asarray(model(words))
devices = [[device] for device in jax.devices()[::4]]  # one on each island
parts = split(model, devices, words[:2])
again = split(model, devices, words[:2], costs=parts.costs)
form, parameters = nnx.split(model)
wanted, trained = train_whole(lambda p, x: nnx.merge(form, p)(x), parameters)
value = words
for stage, own in zip(parts.stages, parts.parameters):
    value = stage.function(own, value)
off = far(value, before)
losses, own = train_split(parts)
off_untouched = far(model(words), before)
merged = parts.merge(own)
say("done", costs=parts.costs, borders=parts.borders, again=again.borders, off=off,
    untouched=off_untouched,
    losses=float(np.max(np.abs(np.array(losses) / np.array(wanted) - 1))),
    parameters=far(nnx.split(merged)[1], trained), same=merged is model,
    fell=losses[-1] / losses[0], sums=parts.stage_costs)
""",
        200,
    )
    done = said(ended.stdout, "done")
    assert done["off"] <= 1e-6
    assert done["untouched"] == 0
    assert done["same"]
    assert done["fell"] < 0.9
    measured("losses off", done["losses"])
    measured("parameters off", done["parameters"])
    assert done["losses"] <= 1e-5
    assert done["parameters"] <= 2e-5
    assert done["costs"][1] == done["costs"][3] > 0  # equal, so measured once
    assert done["borders"] == done["again"] == borders(done["costs"], 2)
    assert sum(done["sums"]) == pytest.approx(sum(done["costs"]))


def test_linen_modules_train_as_they_do_unsplit(up: Up, measured):
    ended = client(
        up,
        MODELS
        + """
modules, variables = linen_blocks()
devices = [jax.devices()[:2], jax.devices()[4:6]]
costs = [1, 1, 1, 1]
parts = split(modules, devices, words[:2], variables=variables, costs=costs, rounds=2)
wanted, trained = train_whole(whole, [own["params"] for own in variables])
losses, own = train_split(parts, rounds=2)
merged = parts.merge(own)
say("done", borders=parts.borders, devices=[len(stage.devices) for stage in parts.stages],
    losses=float(np.max(np.abs(np.array(losses) / np.array(wanted) - 1))),
    parameters=far([own["params"] for own in merged], trained),
    applied=far(whole([own["params"] for own in merged], words), whole(trained, words)))
""",
        200,
    )
    done = said(ended.stdout, "done")
    assert done["borders"] == [0, 1, 2, 3, 4]
    assert done["devices"] == [2, 2, 2, 2]
    measured("losses off", done["losses"])
    measured("parameters off", done["parameters"])
    assert done["losses"] <= 1e-5
    assert done["parameters"] <= 2e-5
    assert done["applied"] <= 1e-4


def test_models_that_are_no_row_of_pure_blocks_are_refused(up: Up):
    ended = client(
        up,
        MODELS
        + """
from fairway.errors import ConfigError
rngs = nnx.Rngs(0)
embed, *rest = blocks(rngs)
devices = [[device] for device in jax.devices()[:2]]
modules, variables = linen_blocks()

def refused(model, example=words, devices=devices, costs=(1,) * 5, **others):
    try:
        split(model, devices, example, costs=costs, **others)
    except ConfigError as error:
        return str(error)
    return "nothing"

norm = linen.BatchNorm(use_running_average=True)
normal = norm.init(jax.random.key(0), np.ones((2, WIDTH), "f"))
say("refused",
    dropout=refused([embed, nnx.Dropout(0.1, rngs=nnx.Rngs(1)), *rest]),
    batch=refused([embed, nnx.BatchNorm(WIDTH, rngs=rngs), *rest]),
    shared=refused([embed, rest[0], rest[0], rest[-1]]),
    misfit=refused([embed, rest[-1], rest[0]]),
    module=refused(rest[0]),
    number=refused([embed, 3]),
    few=refused([embed]),
    costs=refused([embed, *rest], costs=[1, 2]),
    no_devices=refused([embed, *rest], devices=[]),
    mixed=refused([embed, modules[1]], variables=variables[:2]),
    variables=refused(modules),
    unwanted=refused([embed, *rest], variables=variables),
    statistics=refused([*modules, norm], variables=[*variables, normal]),
    merged=fails(lambda: split([embed, *rest], devices, words, costs=[1] * 5).merge([[], []])))
""",
    )
    refused = said(ended.stdout, "refused")
    assert "block 1 (Dropout) has state that is not trained: rngs.count" in refused["dropout"]
    assert "block 1 (BatchNorm) has state that is not trained: mean" in refused["batch"]
    assert "block 1 (Block) and block 2 (Block) share a parameter" in refused["shared"]
    assert "block 2 (Block) cannot be applied to float32[8,6,12]" in refused["misfit"]
    assert "cannot tell the blocks of a Block" in refused["module"]
    assert "block 1 (int) is neither a module nor a function" in refused["number"]
    assert "there are 1 blocks and costs for 5" in refused["few"]
    assert "there are 5 blocks and costs for 2" in refused["costs"]
    assert "5 blocks cannot make 0 stages" in refused["no_devices"]
    assert "block 0 (Embed) is no linen module, and others are" in refused["mixed"]
    assert "there are 4 linen modules and variables of none" in refused["variables"]
    assert "no module is of linen" in refused["unwanted"]
    assert "block 4 (BatchNorm) has state that is not trained: batch_st" in refused["statistics"]
    assert refused["merged"][0] == "ConfigError"
    assert "not parameters of the model" in refused["merged"][1]


def test_replicas_on_islands_train_as_one_and_stay_equal(up: Up, measured):
    """Two islands of two devices; gradients are reduced part by part."""
    ended = client(
        up,
        MODELS
        + """
from fairway.parallel import Replicas
modules, variables = linen_blocks()
parts = split(modules, [islands[0]] * 3, words[:2], variables=variables, costs=[1] * 4)
wanted, trained = train_whole(whole, [own["params"] for own in variables])
replicas = Replicas([stage.function for stage in parts.stages], islands, loss, optimizer())
states, losses = replicas.init(parts.parameters), []
for _ in range(STEPS):
    states, value = replicas.step(states, words, targets)
    losses.append(float(value))
merged = parts.merge(states[1].parameters)
say("done", losses=float(np.max(np.abs(np.array(losses) / np.array(wanted) - 1))),
    parameters=far([own["params"] for own in merged], trained),
    apart=far(states[0].parameters, states[1].parameters),
    odd=fails(lambda: replicas.step(states, words[:5], targets[:5])),
    few=fails(lambda: replicas.init([])),
    none=fails(lambda: Replicas([], islands, loss, optimizer())))
""",
        200,
    )
    done = said(ended.stdout, "done")
    measured("losses off", done["losses"])
    measured("parameters off", done["parameters"])
    assert done["losses"] <= 1e-5
    assert done["parameters"] <= 2e-5
    assert done["apart"] == 0
    assert done["odd"] == ["ConfigError", "a batch of [5] cannot be cut into 2 parts"]
    assert done["few"] == ["ConfigError", "there are 3 parts and parameters for 0"]
    assert done["none"][0] == "ConfigError"


def test_sharded_parameters_train_as_one(up: Up, measured):
    """Two islands of two devices, each of which holds a quarter of every parameter."""
    ended = client(
        up,
        MODELS
        + """
from fairway.parallel import Sharded
modules, variables = linen_blocks()
parts = split(modules, [islands[0]] * 3, words[:2], variables=variables, costs=[1] * 4)
wanted, trained = train_whole(whole, [own["params"] for own in variables])
sharded = Sharded([stage.function for stage in parts.stages], islands, loss, optimizer())
states, losses = sharded.init(parts.parameters), []
for _ in range(STEPS):
    states, value = sharded.step(states, words, targets)
    losses.append(float(value))
merged = parts.merge(sharded.parameters(states))
count = sum(leaf.size for leaf in jax.tree.leaves(parts.parameters))
held = sum(one.addressable_shards[0].data.size for one in states[1].parameters)
say("done", losses=float(np.max(np.abs(np.array(losses) / np.array(wanted) - 1))),
    parameters=far([own["params"] for own in merged], trained),
    held=held / count,
    odd=fails(lambda: sharded.step(states, words[:5], targets[:5])),
    few=fails(lambda: sharded.init([])),
    uneven=fails(lambda: Sharded([whole], [islands[0], islands[1][:1]], loss, optimizer())))
""",
        200,
    )
    done = said(ended.stdout, "done")
    measured("losses off", done["losses"])
    measured("parameters off", done["parameters"])
    assert done["losses"] <= 1e-5
    assert done["parameters"] <= 2e-5
    assert 0.25 <= done["held"] < 0.26
    assert done["odd"] == ["ConfigError", "a batch of [5] cannot be cut into 2 parts"]
    assert done["few"] == ["ConfigError", "there are 3 parts and parameters for 0"]
    assert done["uneven"][0] == "ConfigError"
