"""Messages of sparse exchanges: rows are sent to the shards that the data choose, and back.

Every source host sends every target host one message, which has the number of its rows;
so a host has received all its rows when it has all messages. ``crates/ir/src/sparse.rs`` specifies
arguments and results.

Source: PATHWAYS §4.3.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fairway.host.messages import RowDirection, RowExchange
from fairway.host.objects import Failed

__all__ = ["Collect", "Dispatch", "Held", "Kinds", "Message", "direction"]

Elements = np.ndarray[Any, Any]
Numbers = np.ndarray[Any, np.dtype[np.int32]]
Held = dict[int, list[Elements]]
"""The values of each of this host's shards, by the shard's number."""
Kinds = dict[int, list[tuple[tuple[int, ...], np.dtype[Any]]]]
"""Shape and type of the values of each of this host's shards, by the shard's number."""
ALIGNMENT = 16


@dataclasses.dataclass(frozen=True)
class Message:
    """Rows in a message, and the keys of each.

    Attributes:
        keys: keys of each row, int32 [keys, rows].
        rows: [rows, ...].
    """

    keys: Numbers
    rows: Elements

    @staticmethod
    def gather(keys: Sequence[Numbers], sources: Sequence[Elements], places: Numbers) -> Elements:
        """Returns the bytes of a message.

        Args:
            keys: keys of each row.
            sources: arrays of one shape, [n, ...], that rows are taken from.
            places: index of each row in the concatenation of these arrays.
        """
        count, first = len(places), sources[0]
        head = _head(len(keys), count)
        row = first[:1].nbytes if len(first) else 0
        data = np.empty(head + count * row, np.uint8)
        data[:8].view(np.int64)[0] = count
        numbers = data[8 : 8 + 4 * len(keys) * count].view(np.int32).reshape(len(keys), count)
        for line, key in zip(numbers, keys, strict=True):
            line[:] = key
        rows = data[head:].view(first.dtype).reshape(count, *first.shape[1:])
        if len(sources) == 1:
            np.take(first, places, axis=0, out=rows)
            return data
        of_source = places // len(first)
        for number, source in enumerate(sources):
            mine = np.flatnonzero(of_source == number)
            rows[mine] = source[places[mine] - number * len(first)]
        return data

    @staticmethod
    def read(data: Any, keys: int, dtype: np.dtype[Any], tail: tuple[int, ...]) -> Message:
        """Returns the message of these bytes, without a copy."""
        octets = np.frombuffer(data, np.uint8)
        count = int(octets[:8].view(np.int64)[0])
        numbers = octets[8 : 8 + 4 * keys * count].view(np.int32).reshape(keys, count)
        rows = octets[_head(keys, count) :].view(dtype).reshape(count, *tail)
        return Message(numbers, rows)


def _head(keys: int, count: int) -> int:
    """Returns the number of bytes before the rows of a message, aligned."""
    return -(-(8 + 4 * keys * count) // ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Sends each row to the bins that are chosen for it.

    Attributes:
        bins: number of bins of each target shard.
        credit: rows that one source shard may send to one target shard in a round.
        round: number of this round.
        choices: number of choices of each row.
        each: whether there is a row for each choice.
        shard_choices: number of choices in each source shard.
    """

    bins: int
    credit: int
    round: int
    choices: int
    each: bool
    shard_choices: int

    keys = 2  # bin and origin

    def pack(self, held: Held, targets: Sequence[Sequence[int]]) -> list[Elements]:
        """Returns the message to each host, given the hosts' shards.

        Raises:
            Failed: a choice names no bin.
        """
        chosen = np.concatenate([choices.reshape(-1) for _, choices in held.values()])
        places = self._leaving(chosen, sum(map(len, targets)))
        # Shards ordered by host: the rows of a host are contiguous once sorted this way.
        order = np.argsort([shard for shards in targets for shard in shards])
        sorted_by = order[chosen[places] // self.bins] * self.bins + chosen[places] % self.bins
        by_bin = np.argsort(sorted_by, kind="stable")
        places, sorted_by = places[by_bin], sorted_by[by_bin]
        ends = np.searchsorted(sorted_by, np.cumsum([0, *map(len, targets)]) * self.bins)
        firsts = np.array([number * self.shard_choices for number in held], np.int32)
        origins = firsts[places // self.shard_choices] + places % self.shard_choices
        sources = [self._rows(rows) for rows, _ in held.values()]
        taken = places if self.each else places // self.choices
        return [
            Message.gather([chosen[places[low:high]], origins[low:high]], sources, taken[low:high])
            for low, high in itertools.pairwise(ends)
        ]

    def _rows(self, rows: Elements) -> Elements:
        return rows.reshape(-1, *rows.shape[2:]) if self.each else rows

    def _leaving(self, chosen: Numbers, shards: int) -> Numbers:
        """Returns the indices of the choices whose rows are sent in this round."""
        if len(chosen) and chosen.max() >= shards * self.bins:
            raise Failed(
                f"INVALID_ARGUMENT: row {int(chosen.argmax()) // self.choices} of an exchange goes "
                f"to {chosen.max()}; there are {shards * self.bins} places to go to"
            )
        places = np.flatnonzero(chosen >= 0).astype(np.int32)
        if self.round == 0 and self.credit >= self.shard_choices:
            return places
        pairs = places // self.shard_choices * shards + chosen[places] // self.bins
        by_pair = np.argsort(pairs, kind="stable")
        firsts = np.searchsorted(pairs[by_pair], pairs[by_pair])
        lot = (np.arange(len(places)) - firsts) // self.credit
        return np.sort(places[by_pair[lot == self.round]])

    def unpack(self, messages: Sequence[Message], kinds: Kinds) -> Held:
        """Returns what this host receives: rows, origins and counts of each of its shards."""
        keys = np.concatenate([message.keys for message in messages], axis=1)
        order = np.lexsort(keys[::-1])
        bins = keys[0][order]
        held: Held = {}
        positions = np.empty(len(order), np.int32)
        for shard, (of_rows, of_origins, of_counts) in kinds.items():
            ends = np.searchsorted(bins, np.arange(shard * self.bins, (shard + 1) * self.bins + 1))
            mine = order[ends[0] : ends[-1]]
            positions[mine] = np.arange(len(mine))
            origins = np.full(of_origins[0], -1, of_origins[1])
            origins[: len(mine)] = keys[1][mine]
            counts = np.diff(ends).astype(of_counts[1])
            held[shard] = [np.zeros(*of_rows), origins, counts]
        begin = 0
        for message in messages:
            end = begin + len(message.rows)
            shards = message.keys[0] // self.bins
            for shard, (rows, *_) in held.items():
                mine = shards == shard
                if len(held) == 1:
                    rows[positions[begin:end]] = message.rows
                elif mine.any():
                    rows[positions[begin:end][mine]] = message.rows[mine]
            begin = end
        return held


@dataclasses.dataclass(frozen=True)
class Collect:
    """Returns each row to the choice that it was sent for.

    Attributes:
        shard_choices: number of choices in each source shard.
    """

    shard_choices: int

    keys = 1  # origin

    def pack(self, held: Held, targets: Sequence[Sequence[int]]) -> list[Elements]:
        """Returns the message to each host, given the hosts' shards.

        Raises:
            Failed: an origin is no valid choice.
        """
        origins = np.concatenate([origins for _, origins in held.values()])
        shards = sum(map(len, targets))
        if len(origins) and origins.max() >= shards * self.shard_choices:
            raise Failed(
                f"INVALID_ARGUMENT: a row of an exchange comes from choice {origins.max()}; there "
                f"are {shards * self.shard_choices}"
            )
        host = np.empty(shards, np.int32)
        for number, mine in enumerate(targets):
            host[mine] = number
        places = np.flatnonzero(origins >= 0).astype(np.int32)
        hosts = host[origins[places] // self.shard_choices]
        sources = [rows for rows, _ in held.values()]
        messages = []
        for number in range(len(targets)):
            mine = places[hosts == number]
            messages.append(Message.gather([origins[mine]], sources, mine))
        return messages

    def unpack(self, messages: Sequence[Message], kinds: Kinds) -> Held:
        """Returns what this host receives: the rows of each of its shards."""
        held: Held = {shard: [np.zeros(*of_rows)] for shard, (of_rows,) in kinds.items()}
        for message in messages:
            origins, shards = message.keys[0], message.keys[0] // self.shard_choices
            for shard, (rows,) in held.items():
                flat = rows.reshape(-1, *rows.shape[2:])
                mine = slice(None) if len(held) == 1 else shards == shard
                flat[origins[mine] - shard * self.shard_choices] = message.rows[mine]
        return held


def direction(command: RowExchange) -> Dispatch | Collect:
    """Returns one direction of an exchange, as the controller describes it."""
    choices, shard_choices = command.choices, command.rows * command.choices
    if command.direction is RowDirection.COLLECT:
        return Collect(shard_choices)
    bins, credit, is_each = command.bins, command.credit, command.is_each
    return Dispatch(bins, credit, command.round, choices, is_each, shard_choices)
