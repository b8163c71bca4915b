//! Commands that the controller sends to hosts.

use std::ops::Range;
use std::sync::Arc;

use base::{BufferId, Bytes, ClientId, ExecutableId, HostId, InputId, Status, TransferTag};
use ir::ArraySpec;
use smallvec::SmallVec;

use crate::{
    AssembledShard, CompileRole, GivenGroup, GroupCollective, MadeGroup, PeerMessage,
    ReceivedShard, RelayHop, RowDirection, ShardSend, ShardUpload,
};

/// Correlates a command that asks a host for an answer with that answer.
pub type CommandTicket = u64;

choice! {
    /// When a host acknowledges a launch and those before it.
    pub enum Acknowledge {
        /// Never.
        0 No = "NO",
        /// When the devices have finished it.
        1 Finished = "FINISHED",
        /// When it has been enqueued on the devices.
        2 Enqueued = "ENQUEUED",
    }
}

record! { to hosts
    /// The data-plane address of a host.
    #[derive(Eq)]
    pub struct PeerAddress {
        /// The host.
        pub host: HostId,
        /// Its address.
        pub address: String,
        /// Messages of it with smaller tags never arrive: an earlier process was to send them.
        pub first_tag: TransferTag,
    }
}

messages! { to hosts
    /// A command to a host. Hosts execute commands in order; those that wait (for a computation or
    /// a message) complete asynchronously and delay only the commands that depend on them.
    pub enum Command {
        /// Run a program on this host's share of its devices.
        0 Launch [makes first_result for results] {
            /// Sequence number in the island's launch order.
            sequence: u64,
            /// Sequence number of the launch that this host must have enqueued last; filled in when
            /// the command is dispatched.
            previous: u64,
            /// When the host must acknowledge it; filled in when the command is dispatched.
            acknowledge: Acknowledge,
            /// The program.
            executable: ExecutableId,
            /// Its arguments.
            args: SmallVec<[BufferId; 8]>,
            /// The first result; the others follow consecutively.
            first_result: BufferId,
            /// Number of results.
            results: u32,
            /// Arguments that must not be donated.
            keep: SmallVec<[u32; 4]>,
            /// The buffer that holds the completion, if requested.
            completion: Option<BufferId>,
            /// The client, for the timeline.
            client: ClientId,
        },
        /// Make an array from bytes.
        1 Put [makes buffer] {
            /// The new buffer.
            buffer: BufferId,
            /// Its description.
            spec: Arc<ArraySpec>,
            /// The bytes that fill this host's device positions.
            shards: Vec<ShardUpload>,
        },
        /// Make an array that shares the shards of others.
        2 AssembleShards [makes buffer] {
            /// The new buffer.
            buffer: BufferId,
            /// Its description.
            spec: Arc<ArraySpec>,
            /// The source of each of this host's shards.
            shards: Vec<AssembledShard>,
        },
        /// Copy shards to other devices or memories of this host.
        3 Copy [makes buffer] {
            /// The source.
            source: BufferId,
            /// The new buffer.
            buffer: BufferId,
            /// Its description; positions correspond.
            spec: Arc<ArraySpec>,
        },
        /// Reinterpret the bytes of each shard.
        4 Bitcast [makes buffer] {
            /// The source.
            source: BufferId,
            /// The new buffer.
            buffer: BufferId,
            /// Its description; positions correspond.
            spec: Arc<ArraySpec>,
        },
        /// Send pieces of shards to other hosts once they are computed.
        5 Send {
            /// The source.
            source: BufferId,
            /// The pieces, in the order in which they are sent on each channel.
            pieces: Vec<ShardSend>,
            /// The client; its messages on one channel are sent in the order of these commands.
            client: ClientId,
        },
        /// Relay messages that this host itself does not need.
        26 Relay {
            /// The messages.
            relays: Vec<RelayHop>,
        },
        /// Make an array from messages of other hosts.
        6 Receive [makes buffer] {
            /// The new buffer.
            buffer: BufferId,
            /// Its description.
            spec: Arc<ArraySpec>,
            /// The pieces that fill this host's device positions.
            shards: Vec<ReceivedShard>,
            /// Messages among these to forward to other hosts of this island.
            relays: Vec<RelayHop>,
        },
        /// Fetch the bytes of a shard.
        7 Read [answers ticket] {
            /// Correlates the answer.
            ticket: CommandTicket,
            /// The buffer.
            buffer: BufferId,
            /// Which of this host's shards.
            shard: u32,
            /// Strides in bytes of the answer; none is row-major.
            byte_strides: Option<Vec<i64>>,
        },
        /// Answer once the buffers are computed.
        8 CheckReady [answers ticket] {
            /// Correlates the answer.
            ticket: CommandTicket,
            /// The buffers.
            buffers: Vec<BufferId>,
        },
        /// Free the device memory of buffers, for all buffers that share it.
        9 Delete {
            /// The buffers.
            buffers: Vec<BufferId>,
        },
        /// Forget buffers.
        10 Free {
            /// The buffers.
            buffers: Vec<BufferId>,
        },
        /// Compile a program, or load the executable that another host of the island compiled.
        12 Compile [answers ticket] {
            /// Correlates the answer.
            ticket: CommandTicket,
            /// The program.
            executable: ExecutableId,
            /// Portable artifact.
            program: Arc<Vec<u8>>,
            /// Serialized compile options.
            options: Arc<Vec<u8>>,
            /// The island-local numbers of its devices.
            devices: Vec<u32>,
            /// Replicas and partitions.
            grid: (u32, u32),
            /// The value of its first parameter, which is then no argument of a run: the number of
            /// the island in a program over several.
            island: Option<u32>,
            /// Whether to compile or to load.
            role: CompileRole,
        },
        /// Partition a program over several islands.
        ///
        /// Into computations of each, and collectives between them.
        33 PartitionProgram [answers ticket] {
            /// Correlates the answer.
            ticket: CommandTicket,
            /// Portable artifact.
            program: Arc<Vec<u8>>,
            /// For each of its devices, the island.
            islands: Vec<u32>,
        },
        /// Prepare collectives between islands.
        ///
        /// A program that has nothing else, or one that was partitioned off.
        17 CompileExchange [answers ticket] {
            /// Correlates the answer.
            ticket: CommandTicket,
            /// The program.
            executable: ExecutableId,
            /// Portable artifact, or the collective as it was partitioned off.
            program: Arc<Vec<u8>>,
            /// Whether it is such a collective.
            is_crossing: bool,
            /// Host of each device position.
            owners: Arc<[HostId]>,
        },
        /// Run a program that consists of collectives only, over the data plane.
        18 RunExchange [makes first_result for results] {
            /// The program.
            executable: ExecutableId,
            /// Its arguments.
            args: SmallVec<[BufferId; 8]>,
            /// The first result; the others follow consecutively.
            first_result: BufferId,
            /// This host's shards of each result.
            results: Vec<Arc<ArraySpec>>,
            /// First transfer tag of this run.
            first_tag: TransferTag,
            /// The client, for the timeline.
            client: ClientId,
        },
        /// Take part in a collective over groups of devices.
        ///
        /// The same shard of each group is one member.
        25 Collective [makes each made] {
            /// Which collective.
            kind: GroupCollective,
            /// Number of shards of a group that differ: all or one.
            differing: u32,
            /// Number of groups.
            groups: u32,
            /// Size of a shard of the arguments in bytes.
            shard_bytes: Bytes,
            /// The groups of arguments that this host has shards of, of one value each.
            given: Vec<GivenGroup>,
            /// The groups of results that this host has shards of, of one value each.
            made: Vec<MadeGroup>,
            /// Each host that receives, itself included. Empty if this host has no argument.
            targets: Vec<PeerMessage>,
            /// Each host that contributes, itself included.
            sources: Vec<PeerMessage>,
            /// Index among the collectives of its program.
            number: u32,
            /// Collectives that finish before this one can begin on all hosts.
            after: Vec<u32>,
        },
        /// Send rows to the shards that the data choose, and make arrays of the rows received.
        30 RowExchange [makes each made] {
            /// Whether rows go to bins, or return.
            direction: RowDirection,
            /// Bins of each target shard of a dispatch; 0 otherwise.
            bins: u32,
            /// Rows that a source shard may send to a target shard in a round; 0 if not a dispatch.
            credit: u32,
            /// Which lot of `credit` rows is sent.
            round: u32,
            /// Rows of each shard of the side that rows come from, and return to.
            rows: u32,
            /// Choices of each row.
            choices: u32,
            /// Whether there is a row for each choice.
            is_each: bool,
            /// Size of each row in bytes.
            row_bytes: Bytes,
            /// The groups of arguments that this host has shards of.
            given: Vec<GivenGroup>,
            /// The groups of results that this host has shards of.
            made: Vec<MadeGroup>,
            /// Each host that receives, itself included. Empty if this host has no argument.
            targets: Vec<PeerMessage>,
            /// Each host that sends to this one, itself included.
            sources: Vec<PeerMessage>,
        },
        /// Forget a program.
        13 FreeExecutable {
            /// The program.
            executable: ExecutableId,
        },
        /// Parse a whole program: its dataflow, and the code of each of its functions.
        20 ReadProgram [answers ticket] {
            /// Correlates the answer.
            ticket: CommandTicket,
            /// IFRT IR as written by the client's compiler.
            program: Arc<Vec<u8>>,
        },
        /// Keep this host's part of a whole program for later runs.
        21 LoadProgram {
            /// The program.
            executable: ExecutableId,
            /// The host's steps in each run, in order. Buffers are slots: first the arguments, then
            /// the buffers that the run makes; tags count from the run's first tag.
            steps: Arc<Vec<Command>>,
        },
        /// Run a whole program.
        14 RunProgram {
            /// Sequence number in the island's launch order.
            sequence: u64,
            /// Sequence number of the launch or run that this host must have begun last; filled in
            /// when the command is dispatched.
            previous: u64,
            /// When the host must acknowledge it; filled in when the command is dispatched.
            acknowledge: Acknowledge,
            /// The program.
            executable: ExecutableId,
            /// Range of the host's steps to run.
            steps: Range<u32>,
            /// Its arguments: the first slots.
            args: Arc<[BufferId]>,
            /// The buffer of the first slot after the arguments; the others follow consecutively.
            first_buffer: BufferId,
            /// First transfer tag of this run.
            first_tag: TransferTag,
            /// The buffer that holds the completion, if requested.
            completion: Option<BufferId>,
            /// The plan that its collectives follow, counted from 1; 0 if no plan will be made.
            plan: u32,
            /// The client, for the timeline.
            client: ClientId,
        },
        /// Adopt a plan for the collectives of a program; runs name the plan that they follow.
        27 AdoptPlan {
            /// The program.
            executable: ExecutableId,
            /// Number of the plan: that of the previous plan plus one.
            plan: u32,
            /// The script that a host proposed.
            script: Arc<str>,
        },
        /// Return the texts of optimised programs, one after another.
        15 ProgramText [answers ticket] {
            /// Correlates the answer.
            ticket: CommandTicket,
            /// The programs.
            executables: Vec<ExecutableId>,
        },
        /// Spill buffers to host memory; all buffers that share memory with them are listed too.
        22 Spill {
            /// The buffers.
            buffers: Vec<BufferId>,
        },
        /// Swap buffers back in to their devices, with all that share memory with them.
        23 Restore {
            /// The buffers.
            buffers: Vec<BufferId>,
        },
        /// End an input: every batch from this one on is an error.
        24 EndInput {
            /// The input.
            input: InputId,
            /// Number of batches before its end.
            batches: u64,
            /// The error.
            error: Status,
        },
        /// Report when a buffer sent by other islands has arrived, or has become an error.
        28 ReportArrival {
            /// The buffer.
            buffer: BufferId,
        },
        /// Report when all launches so far have finished.
        29 ReportEnd {},
        /// Load a Python function of a client, which runs in a process of that client's.
        34 LoadColocated [answers ticket] {
            /// Correlates the answer.
            ticket: CommandTicket,
            /// The function.
            executable: ExecutableId,
            /// Its name.
            name: String,
            /// Pickled function, in the format of JAX's `colocated_python`.
            program: Arc<Vec<u8>>,
            /// The number of each device of the cluster.
            devices: Vec<u32>,
            /// The number of each device of this host.
            own: Vec<u32>,
            /// The client.
            client: ClientId,
            /// The user that the client's process runs as; none for the hosts' own.
            user: Option<u32>,
        },
        /// Run a Python function of a client.
        35 RunColocated [makes first_result for results] {
            /// The function.
            executable: ExecutableId,
            /// Its arguments.
            args: SmallVec<[BufferId; 8]>,
            /// The first result; the others follow consecutively.
            first_result: BufferId,
            /// This host's shards of each result.
            results: Vec<Arc<ArraySpec>>,
            /// The buffer that holds the completion, if requested.
            completion: Option<BufferId>,
            /// The client.
            client: ClientId,
            /// Runs of one stream follow one another; those of several may be concurrent.
            stream: u64,
        },
        /// A client has disconnected: end its Python functions, and release idle pooled memory.
        19 EndClient {
            /// The client.
            client: ClientId,
        },
        /// Connect to the data plane of all hosts.
        ///
        /// Sent whenever a host joins and none is missing but those that are lost.
        16 Peers {
            /// Their addresses.
            peers: Vec<PeerAddress>,
            /// Messages with smaller tags are for an earlier process of the host: they are dropped.
            first_tag: TransferTag,
        },
    }
}
