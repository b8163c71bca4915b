//! What hosts say to the controller.

use std::sync::Arc;

use base::{BufferId, Bytes, ClientId, ExecutableId, HostId, InputId, Nanos, Status, TransferTag};

use crate::{CommandTicket, Compiled, CostAnalysis, FunctionCode, PartitionedFunction};

record! { from hosts
    /// A network path of a host to other islands, with capacity of its own.
    pub struct HostChannel {
        /// Where peers connect to it.
        pub address: String,
        /// Bandwidth in each direction, in bits per second.
        pub rate: f64,
    }
}

record! { from hosts
    /// The description that a host sends when it joins.
    pub struct HostInfo {
        /// Process id on its machine.
        pub process: u32,
        /// Data-plane address for hosts of its island, and for all peers if it has no channels.
        pub data_address: String,
        /// Its channels onto the network between islands.
        pub channels: Vec<HostChannel>,
        /// Version of the host's jaxlib.
        pub jaxlib: String,
        /// Platform that selects JAX's lowerings: `cpu`, `cuda`.
        pub platform: String,
        /// Version text of the platform.
        pub platform_version: String,
        /// The vendor's name for its devices.
        pub device_kind: Arc<str>,
        /// Memory kinds of its devices, the default first.
        pub memories: Arc<[Arc<str>]>,
        /// Devices it owns.
        pub devices: u32,
        /// Memory of each of its devices in bytes; none if it is not to be accounted.
        pub device_memory: Option<u64>,
    }
}

record! { from hosts
    /// The first message of a host (handshake).
    pub struct Hello {
        /// Token that proves it was started for this run.
        pub token: String,
        /// The number of the host.
        pub host: HostId,
        /// Its devices, addresses and versions.
        pub info: HostInfo,
    }
}

record! { from hosts
    /// A peer that a host cannot reach.
    pub struct UnreachablePeer {
        /// The peer.
        pub host: HostId,
        /// The address that was tried, and what happened.
        pub error: String,
    }
}

record! { from hosts
    /// A call of a host to a function in a client's process.
    pub struct HostCall {
        /// The client.
        pub client: ClientId,
        /// The function, by the client's number for it.
        pub function: u64,
        /// Tag of the answer, and of the operands if they travel on the data plane.
        pub tag: TransferTag,
        /// Size of the results in bytes.
        pub result_bytes: u64,
        /// The operands; none if they travel on the data plane.
        pub operands: Option<bytes::Bytes>,
    }
}

messages! { from hosts
    /// A host's report.
    pub enum Report {
        /// Acknowledge launches.
        ///
        /// Those up to and including the oldest one to be acknowledged are finished, or enqueued
        /// under sequential dispatch.
        1 Finished {
            /// How long the host was busy with them, in nanoseconds; 0 if unknown.
            busy: Nanos,
        },
        /// Answer a command that has a ticket.
        2 CommandDone {
            /// Which command.
            ticket: CommandTicket,
            /// The answer.
            reply: HostReply,
        },
        /// Answer a command that has a ticket with an error.
        3 CommandFailed {
            /// Which command.
            ticket: CommandTicket,
            /// The error.
            error: Status,
        },
        /// Report a violation of the launch order; the island cannot continue.
        4 OrderBroken {
            /// The sequence number that was expected, and the one found.
            message: String,
        },
        /// Report the next batch of an input, or that there are no more.
        6 BatchMade {
            /// The input.
            input: InputId,
            /// Why there are no more: the end of the data, or an error of the input function.
            end: Option<Status>,
        },
        /// Report rows or parts of a collective sent to other hosts.
        7 Moved {
            /// The client they were sent for.
            client: ClientId,
            /// Bytes sent.
            bytes: Bytes,
        },
        /// Propose a plan for the collectives of a program, or that they run unplanned again.
        8 PlanProposed {
            /// The program.
            executable: ExecutableId,
            /// The plan currently in use.
            plan: u32,
            /// The plan to use from now on; empty if the collectives are no longer planned.
            script: String,
            /// Measured time of a run, and its predicted time under the new plan, in nanoseconds,
            /// if there is one.
            predicted: Option<(Nanos, Nanos)>,
        },
        /// Report that a buffer sent by other islands has arrived, or has become an error.
        9 Arrived {
            /// The buffer.
            buffer: BufferId,
        },
        /// Report that buffers are errors here.
        ///
        /// They are an input of a launch over several hosts, or the results of a run in which a host
        /// callback has failed. Other devices may have them and wait for this host's. Once the
        /// controller has made errors of all that derives from them, it sends an empty message with
        /// this tag; the host takes part then.
        10 BuffersLost {
            /// The client.
            client: ClientId,
            /// The first of the buffers.
            buffer: BufferId,
            /// Number of consecutive buffers.
            count: u64,
            /// Tag of the controller's acknowledgement.
            tag: TransferTag,
            /// The error.
            error: Status,
        },
        /// Report which of the peers that `Peers` named last cannot be reached.
        11 PeersTried {
            /// Those that cannot.
            unreachable: Vec<UnreachablePeer>,
        },
        /// Call a function in a client's process. The answer is a message with the call's tag.
        13 ClientCalled {
            /// The call.
            call: Box<HostCall>,
        },
        /// Report that a message has failed, to be passed on: this host does not reach its receiver.
        12 Undelivered {
            /// The receiver.
            to: HostId,
            /// Tag of the message.
            tag: TransferTag,
            /// Why it has failed.
            error: Status,
        },
    }
}

messages! { from hosts
    /// The answer to a command.
    pub enum HostReply {
        /// Answer without a value.
        0 Success {},
        /// Answer with the bytes of a `Read`.
        1 ShardData {
            /// The bytes.
            data: bytes::Bytes,
        },
        /// Answer a `Read` whose bytes travel on the data plane, under the ticket as tag.
        5 ShardDataSent {},
        /// Answer with the metadata of a compiled program.
        2 ProgramCompiled {
            /// The metadata.
            compiled: Box<Compiled>,
        },
        /// Answer `ReadProgram` with the program's dataflow and code.
        3 ProgramRead {
            /// The program, as [`ir::Program`] prints it.
            text: String,
            /// The same with runs of small calls fused into one call each.
            batched: String,
            /// The code of each function of `batched`, in its order.
            functions: Vec<FunctionCode>,
        },
        /// Answer `PartitionProgram`: the program has collectives only, so hosts run it as it is.
        6 OnlyCollectives {},
        /// Answer `PartitionProgram` with the parts of the program.
        7 ProgramPartitioned {
            /// The program, as [`ir::Program`] prints it.
            text: String,
            /// The code of each of its functions, in order.
            functions: Vec<PartitionedFunction>,
            /// For each island, the program's devices in the order of the island's computations.
            members: Vec<Vec<u32>>,
            /// Costs of a run, such as the bytes that cross islands.
            costs: CostAnalysis,
        },
        /// Answer `ProgramText` with the text of the optimised program.
        4 OptimisedText {
            /// The text.
            text: String,
        },
    }
}
