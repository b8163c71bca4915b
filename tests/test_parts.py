"""Parts of batches: which of an array's regions a host makes."""

from __future__ import annotations

from fairway.host.messages import CompiledSharding, OutputSpec, Tiles
from fairway.host.parts import part_of, shard_of


def result(dims: list[int], cut: Tiles | None) -> OutputSpec:
    return OutputSpec("int32", dims, CompiledSharding(cut, b""), None)


def test_parts_are_cut_as_devices_are() -> None:
    output = result([8, 6], Tiles([4, 2], [0, 1, 2, 3, 4, 5, 6, 7]))
    part = part_of("x", output, [2, 3])
    assert (part.box, part.shard) == ((slice(2, 4), slice(0, 6)), (2, 3))
    assert part.regions == [(slice(0, 2), slice(0, 3)), (slice(0, 2), slice(3, 6))]
    assert shard_of([part]).index == 1
    assert shard_of([part]).count == 4


def test_a_part_is_one_piece_and_one_of_several_equal_ones() -> None:
    tiled = Tiles([4], [0, 1, 2, 3])
    for positions, box, index, count in [
        ([0, 2], slice(0, 8), 0, 1),
        ([1, 2], slice(0, 8), 0, 1),
        ([2, 3], slice(4, 8), 1, 2),
        ([3], slice(6, 8), 3, 4),
    ]:
        part = part_of("", result([8], tiled), positions)
        shard = shard_of([part, part_of("n", result([], None), positions)])
        assert (part.box, shard.index, shard.count) == ((box,), index, count)
        assert (shard.rows, shard.slices["n"]) == (box, ())
