"""What the controller and its hosts say to each other; `make protocol` writes this file.

The definitions are in ``crates/protocol/src``: commands in ``command.rs``, reports in
``report.rs``.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

COMMAND_FRAME_LIMIT = 1074790400
"""Longest frame of commands, in bytes."""


class Acknowledge(enum.IntEnum):
    """When a host acknowledges a launch and those before it."""

    NO = 0
    """Never."""
    FINISHED = 1
    """When the devices have finished it."""
    ENQUEUED = 2
    """When it has been enqueued on the devices."""


class GroupCollective(enum.IntEnum):
    """A collective over groups of devices."""

    REDUCE = 1
    """All-reduce: each group receives the sum over all groups."""
    GATHER = 2
    """All-gather: each group receives the arrays of all groups, stacked."""
    SCATTER = 3
    """Reduce-scatter: each group receives the sum of what all groups have for it."""


class RowDirection(enum.IntEnum):
    """The direction of an exchange of rows."""

    DISPATCH = 1
    """Each row is sent to the bins that are chosen for it."""
    COLLECT = 2
    """Each row returns to the choice that it was sent for."""


class HostShard(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One shard of an array on this host.

    Attributes:
        position: Its device position in the array's sharding.
        device: The host's number of its device.
        shape: Its shape.
    """

    position: int
    device: int
    shape: list[int]


class HostArray(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of an array that this host holds.

    Attributes:
        dtype: Element type, as numpy names it.
        memory: Memory kind; None is the device's default.
        shards: The shards on this host.
    """

    dtype: str
    memory: str | None
    shards: list[HostShard]


class ShardUpload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An upload, and the device positions that it fills.

    Attributes:
        positions: This host's device positions; the bytes fill each.
        data: The bytes, or the tag of the message that carries them.
        dims: Shape of the bytes.
        byte_strides: Stride along each axis; None is row-major.
    """

    positions: list[int]
    data: bytes | int
    dims: list[int]
    byte_strides: list[int] | None


class AssembledShard(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One shard of an array that shares the shards of others.

    Attributes:
        position: Its device position.
        source: The buffer whose shard it is.
        shard: Which of the host's shards of that buffer.
    """

    position: int
    source: int
    shard: int


class Region(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of indices of a shard.

    Attributes:
        start: First index along each axis.
        size: Extent along each axis.
    """

    start: list[int]
    size: list[int]


class ShardSend(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message sent that holds a part of a shard.

    Attributes:
        shard: Index of the shard among those that the host holds.
        region: Region of the shard.
        tag: The message.
        target: The host that receives it.
        channel: The channel it is sent on.
    """

    shard: int
    region: Region
    tag: int
    target: int
    channel: int


class RelayHop(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message that a host relays under another tag.

    Attributes:
        tag: Its tag on arrival.
        source: The host that sends it.
        onward: Its tag on the next hop.
        target: The host that receives it.
        channel: The channel it is sent on.
    """

    tag: int
    source: int
    onward: int
    target: int
    channel: int


class ShardPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message received that holds a part of a shard.

    Attributes:
        tag: The message.
        source: The host that sends it.
        region: Region of the shard that it fills.
    """

    tag: int
    source: int
    region: Region


class ReceivedShard(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Device positions that hold one region of an array, and the messages that make it up.

    Attributes:
        positions: The host's device positions.
        pieces: The pieces of the region.
    """

    positions: list[int]
    pieces: list[ShardPiece]


class ExecutableMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The message in which an executable travels between two hosts of an island.

    Attributes:
        host: The other host.
        tag: The message.
    """

    host: int
    tag: int


class CompileRole(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Role of a host in a compilation.

    Attributes:
        leads: Whether to compile, or to load what the leader compiled.
        peers: All followers; or the leader alone.
    """

    leads: bool
    peers: list[ExecutableMessage]


class GivenGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A group of arguments of a collective or an exchange of rows, on one host.

    Attributes:
        buffers: Its values.
        shards: The numbers, over all groups, of this host's shards.
    """

    buffers: list[int]
    shards: list[int]


class MadeValue(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A value that a host makes.

    Attributes:
        buffer: The new buffer.
        spec: Its description.
    """

    buffer: int
    spec: HostArray


class MadeGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A group of results of a collective or an exchange of rows, on one host.

    Attributes:
        values: Its values.
        shards: The numbers, over all groups, of this host's shards.
    """

    values: list[MadeValue]
    shards: list[int]


class PeerMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The single message of an exchange between this host and another.

    Attributes:
        host: The other host.
        tag: The message.
        shards: The numbers of the other host's shards.
    """

    host: int
    tag: int
    shards: list[int]


class PeerAddress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The data-plane address of a host.

    Attributes:
        host: The host.
        address: Its address.
        first_tag: Messages of it with smaller tags never arrive: an earlier process was to send
            them.
    """

    host: int
    address: str
    first_tag: int


class Tiles(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A partition of an array into a grid of equal tiles.

    Attributes:
        counts: Tiles along each axis.
        tile_of: Tile held by each device position, in row-major order.
    """

    counts: list[int]
    tile_of: list[int]


class CompiledSharding(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The partition of a parameter or result, and the compiler's own encoding of it.

    Attributes:
        partition: How it is partitioned over the program's devices.
        encoded: Serialized `OpSharding`, which can express more (such as partial sums that are not
            yet reduced); empty if there is none. The controller only forwards it.
    """

    partition: Tiles | None
    encoded: bytes


class OutputSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One result of a program.

    Attributes:
        dtype: Element type.
        dims: Shape of the whole array.
        cut: How it is partitioned over the program's devices.
        memory: Memory kind, if not the default.
    """

    dtype: str
    dims: list[int]
    cut: CompiledSharding
    memory: str | None


class HostCollective(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A collective of hosts, in a program over several islands.

    Attributes:
        operation: Index of the program's operation that it is part of.
        text: The collective, as `ir::CollectiveOp` prints it; its ranks are a device of each host,
            as an index into the program's devices.
    """

    operation: int
    text: str


class ProgramMetadata(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Metadata of a compiled program.

    Attributes:
        name: Name of the program.
        fingerprint: Digest of the compiled program, if the compiler provides one.
        parameters: Partition of each parameter; none if the compiler does not report them.
        parameter_layouts: Minor-to-major axes of each parameter.
        outputs: Each result.
        output_layouts: Minor-to-major axes of each result.
        donated: Parameters whose buffers the results may reuse.
        parameter_count: Number of parameters.
        memory: Memory statistics in bytes, if the compiler reports them: generated code, arguments,
            outputs, aliases, temporaries, then the same five on the host, then the peak.
        code_bytes: Size of the generated code in bytes.
        costs: Estimated cost, by name of the property; none if it was not compiled by XLA.
        input: The input whose next batch a run returns; none if it computes something.
        collectives: Collectives of this host in a program over several islands, in order.
    """

    name: str
    fingerprint: bytes | None
    parameters: list[CompiledSharding] | None
    parameter_layouts: list[list[int]]
    outputs: list[OutputSpec]
    output_layouts: list[list[int]]
    donated: list[int]
    parameter_count: int
    memory: list[int] | None
    code_bytes: int
    costs: list[tuple[str, float]] | None
    input: int | None
    collectives: list[HostCollective]


class FunctionCode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One function of a whole program.

    Attributes:
        options: Names under which its compile options may be found, in order of preference.
        artifact: Portable artifact.
    """

    options: list[str]
    artifact: bytes


class PartitionedFunction(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One function of a program that was partitioned over islands.

    Attributes:
        is_crossing: Whether it is a collective between islands; others are computations of each
            island.
        takes_island: Whether the first parameter of the computation is the number of the island.
        code: Portable artifact, or the collective.
    """

    is_crossing: bool
    takes_island: bool
    code: bytes


class UnreachablePeer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A peer that a host cannot reach.

    Attributes:
        host: The peer.
        error: The address that was tried, and what happened.
    """

    host: int
    error: str


class HostCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A call of a host to a function in a client's process.

    Attributes:
        client: The client.
        function: The function, by the client's number for it.
        tag: Tag of the answer, and of the operands if they travel on the data plane.
        result_bytes: Size of the results in bytes.
        operands: The operands; none if they travel on the data plane.
    """

    client: int
    function: int
    tag: int
    result_bytes: int
    operands: bytes | None


class HostChannel(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A network path of a host to other islands, with capacity of its own.

    Attributes:
        address: Where peers connect to it.
        rate: Bandwidth in each direction, in bits per second.
    """

    address: str
    rate: float


class HostInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The description that a host sends when it joins.

    Attributes:
        process: Process id on its machine.
        data_address: Data-plane address for hosts of its island, and for all peers if it has no
            channels.
        channels: Its channels onto the network between islands.
        jaxlib: Version of the host's jaxlib.
        platform: Platform that selects JAX's lowerings: `cpu`, `cuda`.
        platform_version: Version text of the platform.
        device_kind: The vendor's name for its devices.
        memories: Memory kinds of its devices, the default first.
        devices: Devices it owns.
        device_memory: Memory of each of its devices in bytes; none if it is not to be accounted.
    """

    process: int
    data_address: str
    channels: list[HostChannel]
    jaxlib: str
    platform: str
    platform_version: str
    device_kind: str
    memories: list[str]
    devices: int
    device_memory: int | None


class Hello(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The first message of a host (handshake).

    Attributes:
        token: Token that proves it was started for this run.
        host: The number of the host.
        info: Its devices, addresses and versions.
    """

    token: str
    host: int
    info: HostInfo


class Launch(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    """Run a program on this host's share of its devices.

    Attributes:
        sequence: Sequence number in the island's launch order.
        previous: Sequence number of the launch that this host must have enqueued last; filled in
            when the command is dispatched.
        acknowledge: When the host must acknowledge it; filled in when the command is dispatched.
        executable: The program.
        args: Its arguments.
        first_result: The first result; the others follow consecutively.
        results: Number of results.
        keep: Arguments that must not be donated.
        completion: The buffer that holds the completion, if requested.
        client: The client, for the timeline.
    """

    sequence: int
    previous: int
    acknowledge: Acknowledge
    executable: int
    args: list[int]
    first_result: int
    results: int
    keep: list[int]
    completion: int | None
    client: int


class Put(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Make an array from bytes.

    Attributes:
        buffer: The new buffer.
        spec: Its description.
        shards: The bytes that fill this host's device positions.
    """

    buffer: int
    spec: HostArray
    shards: list[ShardUpload]


class AssembleShards(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Make an array that shares the shards of others.

    Attributes:
        buffer: The new buffer.
        spec: Its description.
        shards: The source of each of this host's shards.
    """

    buffer: int
    spec: HostArray
    shards: list[AssembledShard]


class Copy(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Copy shards to other devices or memories of this host.

    Attributes:
        source: The source.
        buffer: The new buffer.
        spec: Its description; positions correspond.
    """

    source: int
    buffer: int
    spec: HostArray


class Bitcast(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Reinterpret the bytes of each shard.

    Attributes:
        source: The source.
        buffer: The new buffer.
        spec: Its description; positions correspond.
    """

    source: int
    buffer: int
    spec: HostArray


class Send(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Send pieces of shards to other hosts once they are computed.

    Attributes:
        source: The source.
        pieces: The pieces, in the order in which they are sent on each channel.
        client: The client; its messages on one channel are sent in the order of these commands.
    """

    source: int
    pieces: list[ShardSend]
    client: int


class Relay(msgspec.Struct, frozen=True, array_like=True, tag=26, gc=False):
    """Relay messages that this host itself does not need.

    Attributes:
        relays: The messages.
    """

    relays: list[RelayHop]


class Receive(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """Make an array from messages of other hosts.

    Attributes:
        buffer: The new buffer.
        spec: Its description.
        shards: The pieces that fill this host's device positions.
        relays: Messages among these to forward to other hosts of this island.
    """

    buffer: int
    spec: HostArray
    shards: list[ReceivedShard]
    relays: list[RelayHop]


class Read(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """Fetch the bytes of a shard.

    Attributes:
        ticket: Correlates the answer.
        buffer: The buffer.
        shard: Which of this host's shards.
        byte_strides: Strides in bytes of the answer; none is row-major.
    """

    ticket: int
    buffer: int
    shard: int
    byte_strides: list[int] | None


class CheckReady(msgspec.Struct, frozen=True, array_like=True, tag=8, gc=False):
    """Answer once the buffers are computed.

    Attributes:
        ticket: Correlates the answer.
        buffers: The buffers.
    """

    ticket: int
    buffers: list[int]


class Delete(msgspec.Struct, frozen=True, array_like=True, tag=9, gc=False):
    """Free the device memory of buffers, for all buffers that share it.

    Attributes:
        buffers: The buffers.
    """

    buffers: list[int]


class Free(msgspec.Struct, frozen=True, array_like=True, tag=10, gc=False):
    """Forget buffers.

    Attributes:
        buffers: The buffers.
    """

    buffers: list[int]


class Compile(msgspec.Struct, frozen=True, array_like=True, tag=12, gc=False):
    """Compile a program, or load the executable that another host of the island compiled.

    Attributes:
        ticket: Correlates the answer.
        executable: The program.
        program: Portable artifact.
        options: Serialized compile options.
        devices: The island-local numbers of its devices.
        grid: Replicas and partitions.
        island: The value of its first parameter, which is then no argument of a run: the number of
            the island in a program over several.
        role: Whether to compile or to load.
    """

    ticket: int
    executable: int
    program: bytes
    options: bytes
    devices: list[int]
    grid: tuple[int, int]
    island: int | None
    role: CompileRole


class PartitionProgram(msgspec.Struct, frozen=True, array_like=True, tag=33, gc=False):
    """Partition a program over several islands.

    Into computations of each, and collectives between them.

    Attributes:
        ticket: Correlates the answer.
        program: Portable artifact.
        islands: For each of its devices, the island.
    """

    ticket: int
    program: bytes
    islands: list[int]


class CompileExchange(msgspec.Struct, frozen=True, array_like=True, tag=17, gc=False):
    """Prepare collectives between islands.

    A program that has nothing else, or one that was partitioned off.

    Attributes:
        ticket: Correlates the answer.
        executable: The program.
        program: Portable artifact, or the collective as it was partitioned off.
        is_crossing: Whether it is such a collective.
        owners: Host of each device position.
    """

    ticket: int
    executable: int
    program: bytes
    is_crossing: bool
    owners: list[int]


class RunExchange(msgspec.Struct, frozen=True, array_like=True, tag=18, gc=False):
    """Run a program that consists of collectives only, over the data plane.

    Attributes:
        executable: The program.
        args: Its arguments.
        first_result: The first result; the others follow consecutively.
        results: This host's shards of each result.
        first_tag: First transfer tag of this run.
        client: The client, for the timeline.
    """

    executable: int
    args: list[int]
    first_result: int
    results: list[HostArray]
    first_tag: int
    client: int


class Collective(msgspec.Struct, frozen=True, array_like=True, tag=25, gc=False):
    """Take part in a collective over groups of devices.

    The same shard of each group is one member.

    Attributes:
        kind: Which collective.
        differing: Number of shards of a group that differ: all or one.
        groups: Number of groups.
        shard_bytes: Size of a shard of the arguments in bytes.
        given: The groups of arguments that this host has shards of, of one value each.
        made: The groups of results that this host has shards of, of one value each.
        targets: Each host that receives, itself included. Empty if this host has no argument.
        sources: Each host that contributes, itself included.
        number: Index among the collectives of its program.
        after: Collectives that finish before this one can begin on all hosts.
    """

    kind: GroupCollective
    differing: int
    groups: int
    shard_bytes: int
    given: list[GivenGroup]
    made: list[MadeGroup]
    targets: list[PeerMessage]
    sources: list[PeerMessage]
    number: int
    after: list[int]


class RowExchange(msgspec.Struct, frozen=True, array_like=True, tag=30, gc=False):
    """Send rows to the shards that the data choose, and make arrays of the rows received.

    Attributes:
        direction: Whether rows go to bins, or return.
        bins: Bins of each target shard of a dispatch; 0 otherwise.
        credit: Rows that a source shard may send to a target shard in a round; 0 if not a dispatch.
        round: Which lot of `credit` rows is sent.
        rows: Rows of each shard of the side that rows come from, and return to.
        choices: Choices of each row.
        is_each: Whether there is a row for each choice.
        row_bytes: Size of each row in bytes.
        given: The groups of arguments that this host has shards of.
        made: The groups of results that this host has shards of.
        targets: Each host that receives, itself included. Empty if this host has no argument.
        sources: Each host that sends to this one, itself included.
    """

    direction: RowDirection
    bins: int
    credit: int
    round: int
    rows: int
    choices: int
    is_each: bool
    row_bytes: int
    given: list[GivenGroup]
    made: list[MadeGroup]
    targets: list[PeerMessage]
    sources: list[PeerMessage]


class FreeExecutable(msgspec.Struct, frozen=True, array_like=True, tag=13, gc=False):
    """Forget a program.

    Attributes:
        executable: The program.
    """

    executable: int


class ReadProgram(msgspec.Struct, frozen=True, array_like=True, tag=20, gc=False):
    """Parse a whole program: its dataflow, and the code of each of its functions.

    Attributes:
        ticket: Correlates the answer.
        program: IFRT IR as written by the client's compiler.
    """

    ticket: int
    program: bytes


class LoadProgram(msgspec.Struct, frozen=True, array_like=True, tag=21, gc=False):
    """Keep this host's part of a whole program for later runs.

    Attributes:
        executable: The program.
        steps: The host's steps in each run, in order. Buffers are slots: first the arguments, then
            the buffers that the run makes; tags count from the run's first tag.
    """

    executable: int
    steps: list[Command]


class RunProgram(msgspec.Struct, frozen=True, array_like=True, tag=14, gc=False):
    """Run a whole program.

    Attributes:
        sequence: Sequence number in the island's launch order.
        previous: Sequence number of the launch or run that this host must have begun last; filled
            in when the command is dispatched.
        acknowledge: When the host must acknowledge it; filled in when the command is dispatched.
        executable: The program.
        steps: Range of the host's steps to run.
        args: Its arguments: the first slots.
        first_buffer: The buffer of the first slot after the arguments; the others follow
            consecutively.
        first_tag: First transfer tag of this run.
        completion: The buffer that holds the completion, if requested.
        plan: The plan that its collectives follow, counted from 1; 0 if no plan will be made.
        client: The client, for the timeline.
    """

    sequence: int
    previous: int
    acknowledge: Acknowledge
    executable: int
    steps: tuple[int, int]
    args: list[int]
    first_buffer: int
    first_tag: int
    completion: int | None
    plan: int
    client: int


class AdoptPlan(msgspec.Struct, frozen=True, array_like=True, tag=27, gc=False):
    """Adopt a plan for the collectives of a program; runs name the plan that they follow.

    Attributes:
        executable: The program.
        plan: Number of the plan: that of the previous plan plus one.
        script: The script that a host proposed.
    """

    executable: int
    plan: int
    script: str


class ProgramText(msgspec.Struct, frozen=True, array_like=True, tag=15, gc=False):
    """Return the texts of optimised programs, one after another.

    Attributes:
        ticket: Correlates the answer.
        executables: The programs.
    """

    ticket: int
    executables: list[int]


class Spill(msgspec.Struct, frozen=True, array_like=True, tag=22, gc=False):
    """Spill buffers to host memory; all buffers that share memory with them are listed too.

    Attributes:
        buffers: The buffers.
    """

    buffers: list[int]


class Restore(msgspec.Struct, frozen=True, array_like=True, tag=23, gc=False):
    """Swap buffers back in to their devices, with all that share memory with them.

    Attributes:
        buffers: The buffers.
    """

    buffers: list[int]


class EndInput(msgspec.Struct, frozen=True, array_like=True, tag=24, gc=False):
    """End an input: every batch from this one on is an error.

    Attributes:
        input: The input.
        batches: Number of batches before its end.
        error: The error.
    """

    input: int
    batches: int
    error: str


class ReportArrival(msgspec.Struct, frozen=True, array_like=True, tag=28, gc=False):
    """Report when a buffer sent by other islands has arrived, or has become an error.

    Attributes:
        buffer: The buffer.
    """

    buffer: int


class ReportEnd(msgspec.Struct, frozen=True, array_like=True, tag=29, gc=False):
    """Report when all launches so far have finished."""


class LoadColocated(msgspec.Struct, frozen=True, array_like=True, tag=34, gc=False):
    """Load a Python function of a client, which runs in a process of that client's.

    Attributes:
        ticket: Correlates the answer.
        executable: The function.
        name: Its name.
        program: Pickled function, in the format of JAX's `colocated_python`.
        devices: The number of each device of the cluster.
        own: The number of each device of this host.
        client: The client.
        user: The user that the client's process runs as; none for the hosts' own.
    """

    ticket: int
    executable: int
    name: str
    program: bytes
    devices: list[int]
    own: list[int]
    client: int
    user: int | None


class RunColocated(msgspec.Struct, frozen=True, array_like=True, tag=35, gc=False):
    """Run a Python function of a client.

    Attributes:
        executable: The function.
        args: Its arguments.
        first_result: The first result; the others follow consecutively.
        results: This host's shards of each result.
        completion: The buffer that holds the completion, if requested.
        client: The client.
        stream: Runs of one stream follow one another; those of several may be concurrent.
    """

    executable: int
    args: list[int]
    first_result: int
    results: list[HostArray]
    completion: int | None
    client: int
    stream: int


class EndClient(msgspec.Struct, frozen=True, array_like=True, tag=19, gc=False):
    """A client has disconnected: end its Python functions, and release idle pooled memory.

    Attributes:
        client: The client.
    """

    client: int


class Peers(msgspec.Struct, frozen=True, array_like=True, tag=16, gc=False):
    """Connect to the data plane of all hosts.

    Sent whenever a host joins and none is missing but those that are lost.

    Attributes:
        peers: Their addresses.
        first_tag: Messages with smaller tags are for an earlier process of the host: they are
            dropped.
    """

    peers: list[PeerAddress]
    first_tag: int


class Success(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    """Answer without a value."""


class ShardData(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Answer with the bytes of a `Read`.

    Attributes:
        data: The bytes.
    """

    data: bytes


class ShardDataSent(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Answer a `Read` whose bytes travel on the data plane, under the ticket as tag."""


class ProgramCompiled(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Answer with the metadata of a compiled program.

    Attributes:
        compiled: The metadata.
    """

    compiled: ProgramMetadata


class ProgramRead(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Answer `ReadProgram` with the program's dataflow and code.

    Attributes:
        text: The program, as `ir::Program` prints it.
        batched: The same with runs of small calls fused into one call each.
        functions: The code of each function of `batched`, in its order.
    """

    text: str
    batched: str
    functions: list[FunctionCode]


class OnlyCollectives(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """Answer `PartitionProgram`: the program has collectives only, so hosts run it as it is."""


class ProgramPartitioned(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """Answer `PartitionProgram` with the parts of the program.

    Attributes:
        text: The program, as `ir::Program` prints it.
        functions: The code of each of its functions, in order.
        members: For each island, the program's devices in the order of the island's computations.
        costs: Costs of a run, such as the bytes that cross islands.
    """

    text: str
    functions: list[PartitionedFunction]
    members: list[list[int]]
    costs: list[tuple[str, float]]


class OptimisedText(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Answer `ProgramText` with the text of the optimised program.

    Attributes:
        text: The text.
    """

    text: str


class Finished(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Acknowledge launches.

    Those up to and including the oldest one to be acknowledged are finished, or enqueued under
    sequential dispatch.

    Attributes:
        busy: How long the host was busy with them, in nanoseconds; 0 if unknown.
    """

    busy: int


class CommandDone(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Answer a command that has a ticket.

    Attributes:
        ticket: Which command.
        reply: The answer.
    """

    ticket: int
    reply: HostReply


class CommandFailed(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Answer a command that has a ticket with an error.

    Attributes:
        ticket: Which command.
        error: The error.
    """

    ticket: int
    error: str


class OrderBroken(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Report a violation of the launch order; the island cannot continue.

    Attributes:
        message: The sequence number that was expected, and the one found.
    """

    message: str


class BatchMade(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """Report the next batch of an input, or that there are no more.

    Attributes:
        input: The input.
        end: Why there are no more: the end of the data, or an error of the input function.
    """

    input: int
    end: str | None


class Moved(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """Report rows or parts of a collective sent to other hosts.

    Attributes:
        client: The client they were sent for.
        bytes: Bytes sent.
    """

    client: int
    bytes: int


class PlanProposed(msgspec.Struct, frozen=True, array_like=True, tag=8, gc=False):
    """Propose a plan for the collectives of a program, or that they run unplanned again.

    Attributes:
        executable: The program.
        plan: The plan currently in use.
        script: The plan to use from now on; empty if the collectives are no longer planned.
        predicted: Measured time of a run, and its predicted time under the new plan, in
            nanoseconds, if there is one.
    """

    executable: int
    plan: int
    script: str
    predicted: tuple[int, int] | None


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag=9, gc=False):
    """Report that a buffer sent by other islands has arrived, or has become an error.

    Attributes:
        buffer: The buffer.
    """

    buffer: int


class BuffersLost(msgspec.Struct, frozen=True, array_like=True, tag=10, gc=False):
    """Report that buffers are errors here.

    They are an input of a launch over several hosts, or the results of a run in which a host
    callback has failed. Other devices may have them and wait for this host's. Once the controller
    has made errors of all that derives from them, it sends an empty message with this tag; the host
    takes part then.

    Attributes:
        client: The client.
        buffer: The first of the buffers.
        count: Number of consecutive buffers.
        tag: Tag of the controller's acknowledgement.
        error: The error.
    """

    client: int
    buffer: int
    count: int
    tag: int
    error: str


class PeersTried(msgspec.Struct, frozen=True, array_like=True, tag=11, gc=False):
    """Report which of the peers that `Peers` named last cannot be reached.

    Attributes:
        unreachable: Those that cannot.
    """

    unreachable: list[UnreachablePeer]


class ClientCalled(msgspec.Struct, frozen=True, array_like=True, tag=13, gc=False):
    """Call a function in a client's process.

    The answer is a message with the call's tag.

    Attributes:
        call: The call.
    """

    call: HostCall


class Undelivered(msgspec.Struct, frozen=True, array_like=True, tag=12, gc=False):
    """Report that a message has failed, to be passed on: this host does not reach its receiver.

    Attributes:
        to: The receiver.
        tag: Tag of the message.
        error: Why it has failed.
    """

    to: int
    tag: int
    error: str


Command: TypeAlias = (
    Launch
    | Put
    | AssembleShards
    | Copy
    | Bitcast
    | Send
    | Relay
    | Receive
    | Read
    | CheckReady
    | Delete
    | Free
    | Compile
    | PartitionProgram
    | CompileExchange
    | RunExchange
    | Collective
    | RowExchange
    | FreeExecutable
    | ReadProgram
    | LoadProgram
    | RunProgram
    | AdoptPlan
    | ProgramText
    | Spill
    | Restore
    | EndInput
    | ReportArrival
    | ReportEnd
    | LoadColocated
    | RunColocated
    | EndClient
    | Peers
)
"""A command to a host. Hosts execute commands in order; those that wait (for a computation or a
message) complete asynchronously and delay only the commands that depend on them."""

HostReply: TypeAlias = (
    Success
    | ShardData
    | ShardDataSent
    | ProgramCompiled
    | ProgramRead
    | OnlyCollectives
    | ProgramPartitioned
    | OptimisedText
)
"""The answer to a command."""

Report: TypeAlias = (
    Finished
    | CommandDone
    | CommandFailed
    | OrderBroken
    | BatchMade
    | Moved
    | PlanProposed
    | Arrived
    | BuffersLost
    | PeersTried
    | ClientCalled
    | Undelivered
)
"""A host's report."""


def ticket_of(command: Command) -> int | None:
    """Returns the ticket of the answer that the controller waits for; None if there is none."""
    match command:
        case Read():
            return command.ticket
        case CheckReady():
            return command.ticket
        case Compile():
            return command.ticket
        case PartitionProgram():
            return command.ticket
        case CompileExchange():
            return command.ticket
        case ReadProgram():
            return command.ticket
        case ProgramText():
            return command.ticket
        case LoadColocated():
            return command.ticket
    return None


def made_by(command: Command) -> list[int]:
    """Returns the buffers that a command makes, which are errors if it fails."""
    match command:
        case Launch():
            return list(range(command.first_result, command.first_result + command.results))
        case Put():
            return [command.buffer]
        case AssembleShards():
            return [command.buffer]
        case Copy():
            return [command.buffer]
        case Bitcast():
            return [command.buffer]
        case Receive():
            return [command.buffer]
        case RunExchange():
            return list(range(command.first_result, command.first_result + len(command.results)))
        case Collective():
            return [value.buffer for group in command.made for value in group.values]
        case RowExchange():
            return [value.buffer for group in command.made for value in group.values]
        case RunColocated():
            return list(range(command.first_result, command.first_result + len(command.results)))
    return []
