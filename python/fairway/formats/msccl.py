"""Collective algorithms in MSCCL's format: XML of GPUs, thread blocks and steps.

Written algorithms divide every rank's vector into chunks of one size, with a thread block for each
peer and direction. An algorithm that is read becomes a script with one motif of the transfers
listed, in as many rounds as their dependencies need; it is verified like any other script.

Source: the interpreter and the generators of github.com/microsoft/msccl, and msccl-tools.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fairway.communication.team import Collective, Script
from fairway.errors import StepError

__all__ = ["algorithm", "read", "write"]

COLLECTIVES = {
    "all-reduce": "allreduce",
    "all-gather": "allgather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "alltoall",
}
CHUNKS_MAX = 4096
BYTES_MAX = 64 << 20
SENDS = {"s": False, "rcs": False, "rrcs": True}
RECEIVES = {"r": False, "rrc": True, "rcs": False, "rrcs": True}
"""Types of steps that send or receive, and whether what is received is added."""

Transfer = tuple[int, int, int, int, int, int, int, bool]
"""Motif, round, source, target, offset read, offset written, element count, and whether to
reduce."""


def write(path: str | os.PathLike[str], script: Script, operation: int = 0) -> None:
    """Writes one operation of a script to a file, in the format of :func:`algorithm`.

    Raises:
        StepError: MSCCL has no such collective, or its vector is cut into too many chunks.
        ValueError: there is no such operation.
    """
    Path(path).write_text(algorithm(script, operation))


def algorithm(script: Script, operation: int = 0) -> str:
    """Returns MSCCL's XML of one operation of a script.

    Raises:
        StepError: MSCCL has no such collective, or its vector is cut into too many chunks.
        ValueError: there is no such operation.
    """
    transfers = script.transfers(operation)
    name, collective, _ = script.operations[operation]
    kind = str(collective).partition(" of ")[0]
    if kind not in COLLECTIVES:
        raise StepError(f"{name} is {collective}; MSCCL has {', '.join(COLLECTIVES)}")
    if any(_is_aside(together) for together in _rounds(transfers)):
        raise StepError(
            f"{name} sends in one round what it adds to in the same, and keeps that aside; what is "
            "written has no memory for that; try a plan for channels of less latency"
        )
    tree = _Writer(collective, kind, transfers).algorithm(name)
    ElementTree.indent(tree)
    return ElementTree.tostring(tree, encoding="unicode") + "\n"


def _rounds(transfers: list[Transfer]) -> Iterator[list[Transfer]]:
    """Yields the transfers of each round of each motif."""
    for _, together in itertools.groupby(transfers, key=lambda one: one[:2]):
        yield list(together)


def _is_aside(together: list[Transfer]) -> bool:
    """Returns whether any rank sends in this round a region that it also receives into."""
    sent = collections.defaultdict(list)
    for _, _, source, _, read, _, count, _ in together:
        sent[source].append((read, read + count))
    return any(
        start < write + count and write < end
        for _, _, _, target, _, write, count, _ in together
        for start, end in sent[target]
    )


@dataclasses.dataclass(frozen=True)
class _Move:
    """Source chunk and target chunk, each with its buffer, and the number of chunks."""

    source: tuple[str, int]
    target: tuple[str, int]
    count: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """A thread block under construction."""

    element: ElementTree.Element
    number: int

    def add(self, kind: str, move: _Move, waits: Iterable[tuple[_Block, int]]) -> int:
        """Adds a step that depends on steps of other blocks; returns its number."""
        latest: dict[_Block, int] = {}
        for other, step in waits:
            if other is not self:
                latest[other] = max(latest.get(other, -1), step)
        depends = list(latest.items())
        for after in depends[:-1]:
            self._put("nop", move, after)
        return self._put(kind, move, depends[-1] if depends else None)

    def _put(self, kind: str, move: _Move, after: tuple[_Block, int] | None) -> int:
        if after is not None:
            after[0].element[after[1]].set("hasdep", "1")
        depid, deps = (after[0].number, after[1]) if after else (-1, -1)
        number = len(self.element)
        ElementTree.SubElement(
            self.element, "step", s=str(number), type=kind,
            srcbuf=move.source[0], srcoff=str(move.source[1]),
            dstbuf=move.target[0], dstoff=str(move.target[1]),
            cnt=str(move.count), depid=str(depid), deps=str(deps), hasdep="0",
        )  # fmt: skip
        return number


class _Writer:
    def __init__(self, collective: Collective, kind: str, transfers: list[Transfer]) -> None:
        self._collective = collective
        self._kind = kind
        # In the order of motifs, which depend on earlier ones only.
        self._transfers = transfers
        ranks = collective.ranks
        self._given = collective.work(0) // (2 if kind == "all-to-all" else 1)
        places = [self._given, *(collective.block(rank)[0] for rank in range(ranks))]
        if kind == "all-to-all":
            places = [self._given, self._given // ranks]
        places += [place for one in transfers for place in (one[4], one[5], one[6])]
        self._chunk = math.gcd(*places) or 1
        self._chunks = self._given // self._chunk
        if self._chunks > CHUNKS_MAX:
            raise StepError(
                f"{collective} is cut into {self._chunks} chunks of {self._chunk} elements, which "
                f"are alike for MSCCL; expected at most {CHUNKS_MAX}; try elements that ranks and "
                "segments divide"
            )

    def algorithm(self, name: str) -> ElementTree.Element:
        """Returns the root element of the algorithm."""
        ranks = self._collective.ranks
        exchanges = self._kind == "all-to-all"
        self._root = ElementTree.Element(
            "algo",
            name=name,
            proto="Simple",
            nchannels="1",
            nchunksperloop=str(self._chunks),
            ngpus=str(ranks),
            coll=COLLECTIVES[self._kind],
            inplace="0" if exchanges else "1",
        )
        chunks = str(self._chunks)
        self._gpus = [
            ElementTree.SubElement(
                self._root, "gpu", id=str(rank), i_chunks=chunks, o_chunks=chunks, s_chunks="0",
            )
            for rank in range(ranks)
        ]  # fmt: skip
        self._blocks: dict[tuple[int, int, bool], _Block] = {}
        # For each rank and chunk, the last step that wrote it and the steps that read it since:
        # block and step number.
        self._changed: dict[tuple[int, int], tuple[_Block, int]] = {}
        self._read: dict[tuple[int, int], list[tuple[_Block, int]]] = collections.defaultdict(list)
        if exchanges:
            self._copy_own()
        for one in self._transfers:
            self._add(one)
        return self._root

    def _copy_own(self) -> None:
        block = self._given // self._collective.ranks // self._chunk
        for rank in range(self._collective.ranks):
            own = self._block(rank, -1, sends=True)
            own.add("cpy", _Move(("i", rank * block), ("o", rank * block), block), [])

    def _add(self, one: Transfer) -> None:
        _, _, source, target, read, write, count, sums = one
        cnt = count // self._chunk
        start, to = (self._place(at) for at in (read, write))
        reads = [(source, read // self._chunk + n) for n in range(cnt)]
        writes = [(target, write // self._chunk + n) for n in range(cnt)]
        sender = self._block(source, target, sends=True)
        waits = [self._changed[place] for place in reads if place in self._changed]
        step = sender.add("s", _Move(start, to, cnt), waits)
        for place in reads:
            self._read[place].append((sender, step))
        receiver = self._block(target, source, sends=False)
        waits = [self._changed[place] for place in writes if place in self._changed]
        waits += [other for place in writes for other in self._read.pop(place, [])]
        move = _Move(to if sums else start, to, cnt)
        step = receiver.add("rrc" if sums else "r", move, waits)
        for place in writes:
            self._changed[place] = (receiver, step)

    def _place(self, element: int) -> tuple[str, int]:
        if self._kind != "all-to-all":
            # Reduce-scatter works in place, in the input buffer.
            return "i" if self._kind == "reduce-scatter" else "o", element // self._chunk
        if element < self._given:
            return "i", element // self._chunk
        return "o", (element - self._given) // self._chunk

    def _block(self, rank: int, peer: int, *, sends: bool) -> _Block:
        key = (rank, peer, sends)
        if key not in self._blocks:
            gpu = self._gpus[rank]
            number = len(gpu)
            send, receive = (peer, -1) if sends else (-1, peer)
            element = ElementTree.SubElement(
                gpu, "tb", id=str(number), send=str(send), recv=str(receive), chan="0"
            )
            self._blocks[key] = _Block(element, number)
        return self._blocks[key]


def read(path: str | os.PathLike[str], elements: int, channel: int = 0) -> Script:
    """Reads an algorithm as a script of one operation.

    Args:
        path: of the file.
        elements: of a rank's vector; chunks must divide it.
        channel: the channel that carries all transfers.

    Raises:
        StepError: the file holds no algorithm, one that needs scratch memory, or one that does not
            compute its collective.
        OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    try:
        if len(data) > BYTES_MAX:
            raise StepError(f"it has {len(data)} bytes; expected at most {BYTES_MAX}")
        if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
            raise StepError("it declares entities; expected elements only")
        text = _Reader(ElementTree.fromstring(data), elements).script(channel)
        return Script.parse(text)
    except (StepError, ElementTree.ParseError, ValueError, KeyError, IndexError) as error:
        raise StepError(f"{path} holds no algorithm that can be kept to: {error}") from None


@dataclasses.dataclass(frozen=True)
class _Step:
    gpu: int
    block: int
    number: int
    kind: str
    source: tuple[str, int]
    target: tuple[str, int]
    count: int
    depends: tuple[int, int]


class _Reader:
    def __init__(self, root: ElementTree.Element, elements: int) -> None:
        kinds = {xml: kind for kind, xml in COLLECTIVES.items()}
        coll = root.get("coll", "").replace("reducescatter", "reduce_scatter")
        if root.tag != "algo" or coll not in kinds:
            raise StepError(f"{root.tag!r} of {coll!r}; expected algo of {', '.join(kinds)}")
        self._name = root.get("name", "msccl")
        self._kind = kinds[coll]
        self._ranks = int(root.attrib["ngpus"])
        chunks = int(root.attrib["nchunksperloop"])
        if chunks < 1 or elements % chunks:
            raise StepError(f"{elements} elements are not {chunks} chunks")
        self._elements = elements
        self._chunk = elements // chunks
        self._steps: dict[tuple[int, int, int], _Step] = {}
        self._blocks: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        for gpu in root.iter("gpu"):
            for block in gpu.iter("tb"):
                at = (int(gpu.attrib["id"]), int(block.attrib["id"]))
                ends = (int(block.get(name, "-1")) for name in ("send", "recv", "chan"))
                send, receive, chan = ends
                self._blocks[at] = (send, receive, chan, len(block))
                for step in block.iter("step"):
                    one = self._read_step(at, step)
                    self._steps[*at, one.number] = one

    def _read_step(self, at: tuple[int, int], step: ElementTree.Element) -> _Step:
        number = {
            name: int(step.get(name, "-1"))
            for name in ("s", "srcoff", "dstoff", "cnt", "depid", "deps")
        }
        kind = step.get("type", "")
        if kind not in {*SENDS, *RECEIVES, "cpy", "nop"}:
            raise StepError(f"step {number['s']} of block {at[1]} of GPU {at[0]} is {kind!r}")
        return _Step(
            *at,
            number["s"],
            kind,
            (step.get("srcbuf", "i"), number["srcoff"]),
            (step.get("dstbuf", "o"), number["dstoff"]),
            number["cnt"],
            (number["depid"], number["deps"]),
        )

    def script(self, channel: int) -> str:
        """Returns the script as JSON."""
        rounds = self._rounds()
        kind = self._kind.replace("-", "_")
        written: Any = kind
        if kind == "all_to_all":
            # The ranks must divide the elements, or it is no exchange.
            size, rest = divmod(self._elements, self._ranks)
            if rest:
                raise StepError(f"{self._elements} elements are not {self._ranks} blocks")
            written = {"all_to_all": {"sizes": [size] * self._ranks**2}}
        elements = self._elements * (self._ranks if kind == "all_to_all" else 1)
        whole = {"number": 0, "of": 1}
        motif = {
            "pattern": "written",
            "group": list(range(self._ranks)),
            "area": whole,
            "part": whole,
            "written": rounds,
        }
        operation = {
            "name": self._name,
            "collective": {"kind": written, "ranks": self._ranks, "elements": elements},
            "motifs": [{"motif": motif, "after": [], "channel": channel, "time": 0}],
        }
        order: list[list[Any]] = [[] for _ in range(channel + 1)]
        order[channel].append({"ahead": 0, "task": 0, "motif": 0})
        return json.dumps({"operations": [operation], "order": order})

    def _rounds(self) -> list[list[dict[str, Any]]]:
        """Returns transfers by round, each in the first round after its dependencies."""
        level: dict[_Step, int] = {}
        rounds: list[list[dict[str, Any]]] = []
        pairs = self._pairs()
        waiting = collections.deque(self._steps.values())
        still = 0
        while waiting:
            step = waiting.popleft()
            before = [one for one in self._before(step) if one is not None]
            together = [
                other for other in (pairs.get((step, True)), pairs.get((step, False))) if other
            ]
            for other in together:
                before += [one for one in self._before(other) if one is not None and one != step]
            if all(one in level for one in before):
                still = 0
                level[step] = self._level(step, [level[one] for one in before])
                continue
            still += 1
            if still > len(waiting):
                raise StepError("its steps wait for each other")
            waiting.append(step)
        for step in self._steps.values():
            receiver = pairs.get((step, True))
            if receiver is None:
                continue
            at = max(level[step], level[receiver])
            while len(rounds) <= at:
                rounds.append([])
            rounds[at].append(self._transfer(step, receiver))
        return [moved for moved in rounds if moved]

    def _level(self, step: _Step, before: list[int]) -> int:
        moves = step.kind in SENDS or step.kind in RECEIVES
        return max(before, default=-1) + (1 if moves else 0)

    def _before(self, step: _Step) -> Iterator[_Step | None]:
        yield self._steps.get((step.gpu, step.block, step.number - 1))
        if step.depends[0] >= 0:
            yield self._steps[step.gpu, *step.depends]

    def _pairs(self) -> dict[tuple[_Step, bool], _Step]:
        """Maps sending steps to their receivers (True), and receiving steps to senders (False)."""
        sent: dict[tuple[int, int, int], list[_Step]] = collections.defaultdict(list)
        received: dict[tuple[int, int, int], list[_Step]] = collections.defaultdict(list)
        for key in sorted(self._steps):
            step = self._steps[key]
            send, receive, chan, _ = self._blocks[step.gpu, step.block]
            if step.kind in SENDS:
                sent[step.gpu, send, chan].append(step)
            if step.kind in RECEIVES:
                received[receive, step.gpu, chan].append(step)
        if {key: len(of) for key, of in sent.items()} != {k: len(of) for k, of in received.items()}:
            raise StepError("what is sent is not what is received")
        if any(step.kind in SENDS and step.kind in RECEIVES for step in self._steps.values()):
            raise StepError(
                "it sends on what it receives in one step (rcs, rrcs); expected s and r"
            )
        pairs = {}
        for key, senders in sent.items():
            for sender, receiver in zip(senders, received[key], strict=True):
                pairs[sender, True] = receiver
                pairs[receiver, False] = sender
        return pairs

    def _transfer(self, sender: _Step, receiver: _Step) -> dict[str, Any]:
        if sender.count != receiver.count:
            raise StepError(f"{sender.count} chunks are sent, and {receiver.count} received")
        return {
            "source": sender.gpu,
            "target": receiver.gpu,
            "read": self._element(sender.gpu, sender.source),
            "write": self._element(receiver.gpu, receiver.target),
            "count": sender.count * self._chunk,
            "sums": RECEIVES[receiver.kind],
        }

    def _element(self, gpu: int, place: tuple[str, int]) -> int:
        buffer, chunk = place
        if buffer not in ("i", "o") or chunk < 0:
            raise StepError(f"it uses buffer {buffer!r}; expected i and o, no scratch memory")
        at = chunk * self._chunk
        if self._kind == "all-to-all":
            return at + (self._elements if buffer == "o" else 0)
        if (buffer, self._kind) in (("i", "all-gather"), ("o", "reduce-scatter")):
            return at + gpu * self._elements // self._ranks
        return at
