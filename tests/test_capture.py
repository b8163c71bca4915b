"""``fairway capture``: the loop of a script becomes a program."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fairway import _native
from fairway.capture import gaps, read
from fairway.cli import app
from fairway.cli.scripts import misplaced, take_options
from fairway.communication import graphs
from fairway.errors import CaptureError, ConfigError
from fairway.placement.models import V100
from fairway.placement.programs import of_program
from fairway.report.steps import StepReport

TWO_ISLANDS = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

islands = [np.array([d for d in jax.devices() if d.island == i]) for i in (0, 1)]
first, second = (NamedSharding(Mesh(devices, "x"), P("x")) for devices in islands)
ahead = jax.jit(lambda x: x * 2, donate_argnums=0)
behind = jax.jit(lambda x: x + 1)
x = jax.device_put(np.arange(8.0, dtype="f"), first)
for _ in range(5):
    x = ahead(x)
    y = behind(jax.device_put(x, second))
    x = jax.device_put(y, first)
print(jax.jit(lambda x: x.sum())(x))
"""

EXCHANGES = """
import fairway, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

islands = [np.array([d for d in jax.devices() if d.island == i]) for i in (0, 1)]
on = [NamedSharding(Mesh(devices, "x"), P("x")) for devices in islands]
exchange = fairway.Exchange(on[:1], on)
grow = jax.jit(lambda x: (x + 1).sum(1), donate_argnums=0)
x = jax.device_put(np.arange(8.0, dtype="f").reshape(4, 2), on[0])
choices = [jax.device_put(np.array([[0], [3], [2], [1]], "i4"), on[0])]
for _ in range(5):
    received = exchange.dispatch([x], choices)
    x = grow(exchange.collect([one.rows for one in received], received, choices)[0])
print(x)
"""


def capture(tmp_path, text):
    script = tmp_path / "script.py"
    script.write_text(text)
    output = tmp_path / "step.fw"
    command = [sys.executable, "-m", "fairway", "capture", "-o", output, "--islands", "2x1x2"]
    ended = subprocess.run([*command, script], capture_output=True, text=True, timeout=120)
    return ended, output


def test_the_loop_of_a_script_is_found(tmp_path):
    ended, output = capture(tmp_path, TWO_ISLANDS)
    assert ended.returncode == 0, ended.stderr
    step = _native.read_program(read(output))
    assert (step["inputs"], step["nodes"], step["results"]) == (1, 4, 1)
    assert [function["calls"] for function in step["functions"]] == [1, 1]
    assert [function["devices"] for function in step["functions"]] == [[0, 1], [2, 3]]
    assert all(function["time_ns"] > 0 for function in step["functions"])
    assert step["moves"] == [(32, [0, 1], [2, 3]), (32, [2, 3], [0, 1])]
    assert "donated" in output.read_text()
    assert all(counted[1] > 0 for _, _, counted, _ in _native.program_nodes(read(output))[0])
    assert "2-3" in ended.stdout
    # What can be planned of it: two gangs, and the transfers between them.
    graph = graphs.of_program(read(output))
    assert graph.devices == 2
    sent = [(*node.devices, node.size) for node in graph.nodes if node.kind == "transfer"]
    assert sorted(sent) == [(0, 1, 32), (1, 0, 32)]
    assert sorted(node.devices for node in graph.nodes if node.kind == "compute") == [[0], [1]]
    # Loop-carried values: the next iteration takes the results of this one.
    assert "carried from" in output.read_text()
    back = next(n for n, node in enumerate(graph.nodes) if node.devices == [1, 0])
    assert (back, 1) in graph.nodes[0].carried
    found = CliRunner().invoke(app, ["plan", str(output), "--channels", "1Gbit/s"])
    assert found.exit_code == 0, found.output
    assert "4 tasks on 2 devices" in found.output
    # It can be placed anew: with measured times, and with the speeds of other devices.
    times = [op.times_ns[0] for op in of_program(read(output)).ops]
    faster = [op.times_ns[0] for op in of_program(read(output), V100).ops]
    assert len(times) == len(faster) == 2
    found = CliRunner().invoke(app, ["place", str(output), "--fabric", "sip-ring:4"])
    assert found.exit_code == 0, found.output
    found = CliRunner().invoke(
        app, ["simulate", "--fabric", "elect-flat:2", "--workload", str(output)]
    )
    assert found.exit_code == 0, found.output


SINGLE_DEVICES = """
import jax, jax.numpy as jnp
first, second = jax.devices()[0], jax.devices()[-1]
x = jax.device_put(jnp.ones((64, 64)), first)
forward, loss = jax.jit(lambda x: jnp.tanh(x @ x)), jax.jit(lambda x: jnp.sum(x * x))
for _ in range(3):
    value = loss(jax.device_put(forward(x), second))
value.block_until_ready()
"""


def test_arrays_that_jax_copies_in_place_keep_their_producers(tmp_path):
    """JAX copies single-device arrays to where they are before a call: the same values."""
    ended, output = capture(tmp_path, SINGLE_DEVICES)
    assert ended.returncode == 0, ended.stderr
    nodes = [line for line in output.read_text().splitlines() if line.startswith("node")]
    assert len(nodes) == 3
    assert nodes[1].endswith("move (%1)")
    assert nodes[2].endswith("(%2)"), nodes


REPLICAS = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

islands = [[d for d in jax.devices() if d.island == i] for i in (0, 1)]
both = NamedSharding(Mesh(np.array(islands), ("island", "x")), P("island", "x"))
on = [NamedSharding(Mesh(np.array([ds]), ("island", "x")), P("island", "x")) for ds in islands]
gradient, update = jax.jit(lambda w, x: w * x), jax.jit(lambda w, g: w - 0.1 * g)
sum_of = jax.jit(jax.shard_map(
    lambda g: jax.lax.psum(g, "island"), mesh=both.mesh, in_specs=both.spec, out_specs=P(None, "x")
))
weights = [jax.device_put(np.ones((1, 64), "f4"), one) for one in on]
for step in range(6):
    batch = [jax.device_put(np.full((1, 64), step, "f4"), one) for one in on]
    gradients = [gradient(w, x) for w, x in zip(weights, batch)]
    shards = [s.data for g in gradients for s in g.addressable_shards]
    total = sum_of(jax.make_array_from_single_device_arrays((2, 64), both, shards))
    shards = [s.data for s in total.addressable_shards]
    pairs = zip(on, (shards[:2], shards[2:]))
    totals = [jax.make_array_from_single_device_arrays((1, 64), one, pair) for one, pair in pairs]
    weights = [update(w, t) for w, t in zip(weights, totals)]
print(weights)
"""


def test_collectives_between_islands_are_part_of_the_step(tmp_path):
    """A jit of collectives over both islands, of arrays assembled from those of each."""
    ended, output = capture(tmp_path, REPLICAS)
    assert ended.returncode == 0, ended.stderr
    text = read(output)
    # A host is a rank; the shards of its two devices are different parts of the sum.
    [(name, kind, ranks, size, times)] = _native.read_program(text)["collectives"]
    assert (name, kind, ranks, size, times) == ("jit__lambda:2", "all_reduce", [0, 2], 256, 1)
    assert "collectives" in ended.stdout
    [uploaded] = gaps(text)
    assert uploaded.startswith("the client sends 0.000 MiB in each step")
    graph = graphs.of_program(text)
    assert graph.devices == 2
    [total] = [n for n, node in enumerate(graph.nodes) if node.kind == "all_reduce"]
    made = graph.nodes[total].after
    assert sorted(graph.nodes[number].devices for number in made) == [[0], [1]]
    read_by = [node for node in graph.nodes if total in node.after]
    assert sorted(node.devices for node in read_by) == [[0], [1]]
    back = [n for n, node in enumerate(graph.nodes) if total in node.after]
    first = [node for node in graph.nodes if node.kind == "compute" and not node.after]
    assert sorted(number for node in first for number, _ in node.carried) == back
    measured = StepReport.read(output.with_suffix(".report"))
    assert all(total in spans for spans in measured.steps[1:]), "when it ran was recorded"
    for command in (["explain"], ["place"]):
        found = CliRunner().invoke(app, [*command, str(output), "--fabric", "elect-flat:2"])
        assert found.exit_code == 0, found.output


INSIDE = """
import collections, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

islands = [[d for d in jax.devices() if d.island == i] for i in (0, 1)]
both = NamedSharding(Mesh(np.array(islands), ("island", "x")), P(("island", "x")))
on = [NamedSharding(Mesh(np.array(ds), "x"), P("x")) for ds in islands]
turn = jax.jit(jax.shard_map(
    lambda x: jax.lax.ppermute(x, "x", [(0, 1), (1, 0)]),
    mesh=both.mesh, in_specs=both.spec, out_specs=both.spec,
))
grow, late, feed = jax.jit(lambda x: x + 1), jax.jit(lambda x: x * 2), jax.jit(lambda w, x: w + x)

def parts(x, i):
    shards = [s.data for s in x.addressable_shards if s.device.island == i]
    return jax.make_array_from_single_device_arrays((4,), on[i], shards)

whole = jax.device_put(np.zeros(8, "f"), both)
there = collections.deque(jax.device_put(np.zeros(4, "f"), on[1]) for _ in range(2))
batches = collections.deque(jax.device_put(np.full(4, k, "f"), on[0]) for k in range(2))
weights = jax.device_put(np.zeros(4, "f"), on[0])
for k in range(8):
    xs = [grow(parts(whole, i)) for i in (0, 1)]
    shards = [s.data for x in xs for s in x.addressable_shards]
    whole = turn(jax.make_array_from_single_device_arrays((8,), both, shards))
    there.append(late(there.popleft()))
    batches.append(jax.device_put(np.full(4, k + 2, "f"), on[0]))
    weights = feed(weights, batches.popleft())
print(whole, weights)
"""


def test_what_islands_do_apart_stays_apart(tmp_path):
    """Collectives inside islands, arrays over both that are taken apart again, values that are read
    two steps later, and batches that are sent two steps ahead."""
    ended, output = capture(tmp_path, INSIDE)
    assert ended.returncode == 0, ended.stderr
    text = read(output)
    assert "collectives ()" in text
    [uploaded] = gaps(text)
    assert uploaded.startswith("the client sends")
    graph = graphs.of_program(text)
    assert graph.devices == 2
    assert {node.kind for node in graph.nodes} == {"compute"}
    read_from = [
        {(graph.nodes[after].devices[0], node.devices[0]) for after, _ in node.carried}
        for node in graph.nodes
    ]
    assert all(source == target for pairs in read_from for source, target in pairs)
    steps = {node.devices[0]: set() for node in graph.nodes}
    for node in graph.nodes:
        steps[node.devices[0]] |= {back for _, back in node.carried}
    assert 2 in steps[1], "the second island's value is read two steps later"
    assert 2 not in steps[0]


def test_sparse_exchanges_are_listed(tmp_path):
    ended, output = capture(tmp_path, EXCHANGES)
    assert ended.returncode == 0, ended.stderr
    step = _native.read_program(read(output))
    there, back = ([0, 1], [0, 1, 2, 3]), ([0, 1, 2, 3], [0, 1])
    assert step["exchanges"] == [("collect", *back, 1), ("dispatch", *there, 1)]
    assert "sparse exchanges" in ended.stdout


def test_a_script_without_devices_has_no_step(tmp_path):
    ended, output = capture(tmp_path, "print('nothing')")
    assert ended.returncode == 1
    assert "nothing to capture" in ended.stderr
    assert not output.exists()


ONE = """
import jax, sys
assert sys.argv[1:] == ["--steps", "3"], sys.argv
for _ in range(4):
    x = jax.jit(lambda: jax.numpy.ones(3))()
print(x)
"""


@pytest.mark.parametrize("behind", ["--steps 3 -o STEP", "-o STEP --islands 1x1x1 -- --steps 3"])
def test_options_may_follow_the_script(tmp_path, behind):
    output = tmp_path / "step.fw"
    words = [str(output) if word == "STEP" else word for word in behind.split()]
    in_front = [] if "--islands" in words else ["--islands", "1x1x1"]
    ended = run_capture(tmp_path, ONE, *in_front, "SCRIPT", *words)
    assert ended.returncode == 0, ended.stderr
    assert read(output)


def test_a_script_that_fails_has_no_step(tmp_path):
    output = tmp_path / "step.fw"
    script = "import jax, sys\nprint(jax.numpy.ones(3) + 1)\nsys.exit(3)\n"
    ended = run_capture(tmp_path, script, "-o", str(output), "--islands", "1x1x1", "SCRIPT")
    assert ended.returncode == 3
    assert "the script ended with status 3" in ended.stderr
    assert not output.exists()


def test_options_that_contradict_each_other():
    ours = {"-o": "out", "--out": "out", "--islands": "islands"}
    for arguments, says in (
        (["-o"], "-o has no value"),
        (["-o", "a", "--out=b"], "given twice"),
        (["--steps", "3", "--", "x"], "'--steps' between the script and"),
    ):
        with pytest.raises(ConfigError, match=says):
            take_options(arguments, ours, {"-o", "--out"})
    assert take_options(["--", "-o", "b"], ours, {"-o"}) == ({}, ["-o", "b"])
    assert take_options(["--islands", "1"], ours, {"-o"}) == ({}, ["--islands", "1"])
    assert misplaced(["--islands=1", "x", "--", "-o"], ours) == ["--islands"]


def run_capture(tmp_path, text, *words):
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "fairway", "capture"]
    command += [str(script) if word == "SCRIPT" else word for word in words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_what_is_no_program_is_refused(tmp_path):
    path = tmp_path / "step.fw"
    path.write_text("program @p\ninput %0: float32[8] on [0]\nreturn (%1)\n")
    with pytest.raises(CaptureError, match="reads value 1, which no earlier node makes"):
        read(path)
    path.write_text("nonsense")
    with pytest.raises(CaptureError, match="line 1"):
        read(path)
    with pytest.raises(CaptureError, match="cannot read"):
        read(tmp_path / "absent.fw")


def test_what_predictions_leave_out_is_said() -> None:
    text = """\
program @step
function @timed 1000ns
function @sum
input %0: float32[8] tiled 2 on [0..2]
node %1: float32[8] tiled 2 on [0..2] = call @timed (%0)
node %2: float32[8] tiled 2 on [0..2] = call @sum (%1)
return (%2)
"""
    assert gaps(text) == [
        "sum has no measured time; predictions take it for 0, and leave out what it communicates"
    ]
    assert not gaps(text.replace("@sum\ninput", "@sum 5ns\ninput"))
