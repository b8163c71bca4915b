"""``fairway route``: schedules transfers known in advance: when each vector is on which link.

Source: the multi-TSP system §4.
"""

from __future__ import annotations

import dataclasses
import re
import reprlib
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from fairway.analysis.topologies import read_routed
from fairway.errors import RouteError
from fairway.quantities import parse_size
from fairway.studies.workloads.chip import TICKS_PER_CYCLE

__all__ = ["Route", "Transfer", "route"]

NUMBER = re.compile(r"[0-9]{1,12}")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A tensor that is sent from one chip to another.

    Attributes:
        source: number of the sending chip.
        target: number of the receiving chip.
        size_bytes: size of the tensor.
        after: indices of transfers that must arrive before this one begins.
    """

    source: int
    target: int
    size_bytes: int
    after: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Transfer:
        """Reads ``0:5:64MiB``, or ``0:5:64MiB:0,1`` after transfers 0 and 1.

        Raises:
            RouteError: the text is malformed.
            ConfigError: the size is malformed.
        """
        parts = text.split(":")
        numbers = [*parts[:2], *(parts[3].split(",") if len(parts) == 4 else [])]
        if len(parts) not in (3, 4) or not all(NUMBER.fullmatch(number) for number in numbers):
            raise RouteError(
                f"cannot read a transfer from {reprlib.repr(text)}; expected SOURCE:TARGET:SIZE, "
                "and what it comes after, as in 0:5:64MiB or 5:0:1MiB:0"
            )
        source, target, *after = map(int, numbers)
        return cls(source, target, parse_size("the size of a transfer", parts[2]), tuple(after))


@dataclasses.dataclass(frozen=True)
class Route:
    """A verified schedule.

    Attributes:
        fabric: name of the fabric.
        transfers: the requested transfers.
        schedule: the schedule as JSON; times are in thousandths of a cycle.
    """

    fabric: str
    transfers: Sequence[Transfer]
    schedule: dict[str, Any]

    @property
    def ratio(self) -> float:
        """The makespan divided by its lower bound."""
        return float(self.schedule["end_ticks"] / max(1, self.schedule["bound_ticks"]))

    def time(self, ticks: int) -> str:
        """Formats ticks as cycles and microseconds."""
        cycles = ticks / TICKS_PER_CYCLE
        return f"{cycles:,.0f} cycles ({cycles / self.schedule['clock_hz'] * 1e6:,.3f} us)"

    def summary(self) -> Table:
        """Returns a table of the transfers and their completion times."""
        table = Table("transfer", "bytes", "links", "completion time", title=f"On {self.fabric}")
        for number, transfer in enumerate(self.transfers):
            paths = sum(train[0] == number for train in self.schedule["trains"])
            table.add_row(
                f"{number}: {transfer.source} to {transfer.target}",
                f"{transfer.size_bytes:,}",
                str(paths),
                self.time(self.schedule["ends_ticks"][number]),
            )
        return table

    def explanation(self) -> Table:
        """Returns a table of each train of vectors: its links, and when each starts, in cycles."""
        table = Table(
            "transfer", "vectors", "chips, and the cycle at which each link starts", title="Vectors"
        )
        for number, first, count, chips, starts in self.schedule["trains"]:
            hops = [
                f" → {chip} at {start / TICKS_PER_CYCLE:,.0f}"
                for start, chip in zip(starts, chips[1:], strict=True)
            ]
            vectors = f"{first:,} to {first + count - 1:,}"
            table.add_row(str(number), vectors, f"{chips[0]}{''.join(hops)}")
        return table

    def limits(self) -> str:
        """Returns the makespan, its ratio to the lower bound, and the busiest link."""
        text = f"completion time of all {self.time(self.schedule['end_ticks'])}, "
        text += f"{self.ratio:.3f} of the lower bound of {self.time(self.schedule['bound_ticks'])}"
        if self.schedule["busiest"] is None:
            return text
        source, target, busy = self.schedule["busiest"]
        part = busy / self.schedule["end_ticks"]
        return text + f"; a link from {source} to {target} is busiest, {part:.0%} of the time"


def route(fabric: str, transfers: Sequence[Transfer]) -> Route:
    """Schedules transfers on a fabric.

    Args:
        fabric: its name, such as ``dragonfly:264`` or ``torus:8x8``, or a file that describes it.
        transfers: the transfers to schedule.

    Raises:
        RouteError: there is no such fabric, or a transfer is invalid.

    Example:
        >>> route("dragonfly:8", [Transfer(0, 1, 1 << 20)]).ratio < 1.05
        True
    """
    known = read_routed(fabric)
    for number, one in enumerate(transfers):
        for chip in (one.source, one.target):
            if not 0 <= chip < known.vertices:
                raise RouteError(
                    f"transfer {number} is of chip {chip}; on {fabric} there are {known.endpoints}"
                )
    asked = [
        (one.source, one.target, one.size_bytes, list(one.after), 0, 0, False) for one in transfers
    ]
    try:
        plan = known.route(asked)
    except ValueError as error:
        raise RouteError(f"cannot route on {fabric}: {error}") from error
    return Route(
        fabric,
        transfers,
        {
            "clock_hz": plan.clock_hz,
            "vector_bytes": plan.vector_bytes,
            "end_ticks": plan.end_ticks,
            "ends_ticks": plan.ends_ticks,
            "bound_ticks": plan.bound_ticks(),
            "busiest": plan.busiest(),
            "trains": [train[:5] for train in plan.trains()],
        },
    )
