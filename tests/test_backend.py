"""Programs from clients of another jaxlib, as hosts read them."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from jaxlib import _hlo
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fairway import mpmd
from fairway.host.backend import Backend, UnreadableError
from fairway.host.collectives import LoweredExchange
from fairway.host.messages import Tiles
from fairway.host.programs import encoded, partition

GATHER = """
sdy.mesh @mesh = <["island"=2, "x"=2]>
"func.func"() <{sym_name = "main", function_type = (tensor<4x8xf32>) -> tensor<8x8xf32>}> ({
^bb0(%whole: tensor<4x8xf32>):
  %made = sdy.manual_computation(%whole)
      in_shardings=[<@mesh, [{"x", "island"}, {}]>] out_shardings=[<@mesh, [{"x", "island"}, {}]>]
      manual_axes={"island", "x"} (%part: tensor<1x8xf32>) {
    %all = "stablehlo.all_gather"(%part) <{all_gather_dim = 0 : i64, replica_groups = GROUPS}>
      : (tensor<1x8xf32>) -> tensor<2x8xf32>
    sdy.return %all : tensor<2x8xf32>
  } : (tensor<4x8xf32>) -> tensor<8x8xf32>
  "func.return"(%made) : (tensor<8x8xf32>) -> ()
}) : () -> ()
"""


@pytest.fixture(scope="module")
def backend():
    return Backend("cpu", 1)


def test_program_newer_than_jaxlib_is_refused_with_both_versions(backend):
    with backend.context():
        current = stablehlo.get_current_version()
        program = stablehlo.serialize_portable_artifact_str("module @m {}", current)
    assert backend.parse(program)
    newer = program.replace(current.encode(), b"1.99.0")[:-1]  # a version that it cannot read
    with pytest.raises(UnreadableError, match=rf"^FAILED_PRECONDITION.*1\.99\.0.*{current}"):
        backend.parse(newer)


def test_what_is_no_program_is_refused(backend):
    with pytest.raises(UnreadableError, match=r"^INVALID_ARGUMENT: the program is not"):
        backend.parse(b"no program")


def test_sharding_by_axes_of_a_mesh_is_read_as_tiles():
    """Regression: it crashed hosts of jaxlib 0.10.2, which could not serve clients of 0.11.2."""
    named = _hlo.HloSharding.from_string("{mesh['a'=2,'b'=2], [{'b'}, {}]}").to_proto()
    assert partition(named, 2, 4) == Tiles([2, 1], [0, 1, 0, 1])
    told = _hlo.OpSharding()
    told.ParseFromString(encoded(named))
    assert list(told.tile_assignment_dimensions) == [2, 1, 2]


@pytest.mark.parametrize(
    ("axes", "table"),
    [
        (["island"], [[0, 2], [1, 3]]),
        (["x"], [[0, 1], [2, 3]]),
        (["x", "island"], [[0, 2, 1, 3]]),
    ],
)
def test_groups_by_axes_of_a_mesh_are_those_written_out(backend, axes, table):
    references = ", ".join(f'#stablehlo.axis_ref<name = "{axis}">' for axis in axes)
    by_axes = f"#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [{references}]>"
    written_out = f"dense<{table}> : tensor<{len(table)}x{len(table[0])}xi64>"
    for groups in (by_axes, written_out):
        text = GATHER.replace("GROUPS", groups)
        text = text.replace("2x8", f"{len(table[0])}x8").replace("8x8", f"{4 * len(table[0])}x8")
        module = ir.Module.parse(text, mpmd.context())
        exchange = LoweredExchange(module, [0, 0, 1, 1], 0)
        assert np.array_equal(exchange._steps[0].groups, table)


def test_threads_see_all_shards_of_an_array() -> None:
    """jaxlib fills its list of shards in place, which other threads can see incomplete."""
    backend = Backend("cpu", 4)
    devices = (0, 1, 2, 3)
    ones = [np.ones(4, np.float32)] * 4
    given = backend.put(np.dtype(np.float32), (4,), devices, None, ones)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for _ in range(3000):
                array = backend.copy(given, devices, None)
                together = threading.Barrier(4)

                def look(_: int, array: Any = array, together: Any = together) -> int:
                    together.wait(10)
                    return len(backend.shards(array))

                assert list(threads.map(look, devices)) == [4] * 4
    finally:
        sys.setswitchinterval(interval)
