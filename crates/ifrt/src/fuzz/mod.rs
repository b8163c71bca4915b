//! Damaged requests of clients: decoded as the service does, and handled by a controller, whose hosts
//! answer with damaged reports.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base::{ClientId, HostId, Nanos, Random};
use control::{Config, Controller, Event, Share};
use fuzzing::damaged;
use proptest::prelude::*;
use prost::Message;
use protocol::{CommandTicket, HostInfo, Report};
use topology::{Cluster, IslandSpec};

use crate::decode::{self, Asked};
use crate::proto as p;
use crate::proto::ifrt_request::Request as Body;
use crate::{limits, service, session};

mod requests;

use requests::{ARRAYS, DEVICES, upload, valid};

const CLIENT: ClientId = ClientId(1);
/// Longest time that a request may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Tickets that hosts answer; few commands are given.
const TICKETS: u64 = 48;

fn host(process: u32) -> HostInfo {
    HostInfo {
        process,
        data_address: "unix:/nowhere".to_owned(),
        channels: Vec::new(),
        jaxlib: "0.10.2".to_owned(),
        platform: "cpu".to_owned(),
        platform_version: "1".to_owned(),
        device_kind: "cpu".into(),
        memories: Arc::new(["device".into(), "unpinned_host".into()]),
        devices: 2,
        device_memory: Some(1 << 30),
    }
}

/// Returns a controller of two islands with a client and its arrays.
fn controller() -> Controller {
    let cluster = Cluster::new(&[IslandSpec::new(1, 2); 2]);
    let mut controller = Controller::new(cluster, Config::default());
    for number in 0..2 {
        let event = Event::HostJoined { host: HostId(number), info: host(number) };
        controller.handle(Nanos(0), event);
    }
    let share = Share::default();
    controller.handle(Nanos(0), Event::ClientJoined { client: CLIENT, share });
    for array in 0..ARRAYS {
        let data = vec![0; 32].into();
        controller.handle(Nanos(1), Event::UploadArrived { client: CLIENT, upload: array, data });
        let asked = ask(Body::MakeArrayFromHostBufferRequest(upload(array))).unwrap();
        submit(&mut controller, array, asked);
    }
    controller
}

fn ask(body: Body) -> Result<Asked, base::Status> {
    decode::request(body)
}

fn submit(controller: &mut Controller, id: u64, asked: Asked) {
    let (Asked::Controller(request) | Asked::Read { request, .. }) = asked else { return };
    drop(controller.handle(Nanos(2), Event::Request { client: CLIENT, id, request }));
}

/// Decodes a request and lets the controller handle it, as a session does.
fn take(controller: &mut Controller, id: u64, bytes: &[u8]) {
    if limits::check_request(bytes).is_err() {
        return;
    }
    let Ok(request) = p::IfrtRequest::decode(bytes) else { return };
    let Some(body) = request.request else { return };
    let names = decode::result_names(&body);
    match ask(body) {
        Ok(Asked::DeviceAssignment { replicas, partitions }) => {
            let _ = session::default_assignment(replicas, partitions, DEVICES);
        }
        Ok(asked) => submit(controller, id, asked),
        Err(error) => {
            let request = session::errors(names, error);
            drop(controller.handle(Nanos(3), Event::Request { client: CLIENT, id, request }));
        }
    }
}

/// Returns a report of a host: mostly an answer to one of the first commands.
fn report(seed: u64) -> Vec<u8> {
    let mut random = Random::of(&[seed]);
    let ticket: CommandTicket = random.below(TICKETS);
    protocol::encode(&match random.below(4) {
        0 => protocol::sample_of::<Report>(seed),
        _ => Report::CommandDone { ticket, reply: protocol::sample_of(seed) },
    })
}

proptest! {
    #[test]
    fn fuzz_requests(bytes in damaged(valid)) {
        let (mut controller, began) = (controller(), Instant::now());
        take(&mut controller, ARRAYS, &bytes);
        controller.handle(Nanos(4), Event::ClientLeft(CLIENT));
        prop_assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    }

    #[test]
    fn fuzz_sessions(
        requests in prop::collection::vec(damaged(valid), 1..5),
        reports in prop::collection::vec((0..2_u32, damaged(report)), 0..4),
    ) {
        let (mut controller, began) = (controller(), Instant::now());
        for (id, bytes) in (ARRAYS..).zip(&requests) {
            take(&mut controller, id, bytes);
        }
        for (host, bytes) in reports {
            if let Ok(report) = protocol::decode(&bytes) {
                drop(controller.handle(Nanos(5), Event::Host { host: HostId(host), report }));
            }
        }
        take(&mut controller, ARRAYS + 9, &requests[0]);
        let cause = "it was fuzzed".to_owned();
        controller.handle(Nanos(6), Event::HostLost { host: HostId(1), cause });
        controller.handle(Nanos(7), Event::ClientLeft(CLIENT));
        prop_assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    }

    #[test]
    fn fuzz_session_metadata(bytes in damaged(metadata)) {
        if let Ok(session) = p::GrpcIfrtSessionMetadata::decode(&bytes[..]) {
            let _ = service::check_version(&session.version.unwrap_or_default());
            let (share, _) = service::share(&session.initialization_data.unwrap_or_default(), None);
            prop_assert!((1..=1_000_000).contains(&share.weight));
        }
        let _ = p::GrpcHostBufferStoreMetadata::decode(&bytes[..]);
        let _ = p::GrpcGetVersionRequest::decode(&bytes[..]);
    }
}

/// Returns what opens a session, or announces an upload.
fn metadata(seed: u64) -> Vec<u8> {
    use p::attribute_map::{Value, value};
    let number = |number| Value { value: Some(value::Value::Int64Value(number)) };
    let attributes = [("fairway_weight", 3), ("fairway_priority", -3)]
        .map(|(name, n)| (name.to_owned(), number(n)));
    let version = p::IfrtProxyVersion { protocol_version: 25, ifrt_serdes_version_number: 5 };
    let data = p::AttributeMap { attributes: attributes.into(), ..Default::default() };
    let session =
        p::GrpcIfrtSessionMetadata { version: Some(version), initialization_data: Some(data) };
    match seed % 3 {
        0 => p::GrpcHostBufferStoreMetadata { session_id: 1, handle: 2, buffer_size: 3 }
            .encode_to_vec(),
        1 => p::GrpcGetVersionRequest { max_version: Some(version), ..Default::default() }
            .encode_to_vec(),
        _ => session.encode_to_vec(),
    }
}

#[test]
fn what_is_damaged_is_sound_before() {
    let mut sound = 0;
    for seed in 0..1000 {
        let request = p::IfrtRequest::decode(&valid(seed)[..]).unwrap();
        sound += u32::from(ask(request.request.unwrap()).is_ok());
        protocol::decode::<Report>(&report(seed)).unwrap();
    }
    assert!(sound > 800, "{sound} of 1000 are decoded");
}

/// Decodes a request that would take hours, or all memory; returns the error.
fn refusal(body: Body) -> String {
    let began = Instant::now();
    let Err(error) = ask(body) else { panic!("it is decoded") };
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    error.message
}

#[test]
fn a_shard_has_one_source() {
    let count = 1 << 18;
    let sharding = p::ConcreteEvenShardingProto {
        devices: requests::devices(vec![0; count]),
        is_fully_replicated: true,
        ..Default::default()
    };
    let serialized_sharding = Some(requests::serialized("ConcreteEvenSharding", sharding));
    let spec = p::ArraySpecProto {
        dtype: requests::dtype(),
        sharding: Some(p::ShardingProto { serialized_sharding }),
        ..Default::default()
    };
    let mapping = p::remap_plan_proto::MappingProto {
        from_start: vec![0; count],
        from_end: vec![i64::MAX; count],
        from_step: vec![1; count],
        to_start: vec![0; count],
        to_end: vec![count as i64; count],
        to_step: vec![1; count],
        ..Default::default()
    };
    let plan = p::RemapPlanProto {
        output_specs: vec![spec],
        mappings: vec![mapping],
        ..Default::default()
    };
    let remap = p::RemapArraysRequest {
        plan: Some(plan),
        array_handles: vec![1],
        result_handles: vec![2],
        ..Default::default()
    };
    assert!(refusal(Body::RemapArraysRequest(remap)).contains("two sources"));
}

#[test]
fn axes_of_one_device_take_no_time() {
    let count = 1 << 18;
    let mut op = p::OpSharding {
        r#type: 3,
        tile_assignment_dimensions: vec![i64::from(count)],
        iota_reshape_dims: vec![1; count as usize],
        iota_transpose_perm: (0..count).collect(),
        ..Default::default()
    };
    op.iota_reshape_dims[0] = i64::from(count);
    let began = Instant::now();
    crate::sharding::partition(&op, 1, count as usize).unwrap();
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    op.tile_assignment_devices = vec![0; 4];
    op.tile_assignment_dimensions = vec![1];
    crate::sharding::partition(&op, 1, 1).unwrap_err();
}

#[test]
fn compile_options_are_bounded() {
    let computations = [0x0a, 0].repeat(limits::OPTIONS_BYTES);
    let options = p::Serialized { data: computations.into(), ..Default::default() };
    let compile = p::CompileRequest { compile_options: Some(options), ..Default::default() };
    assert!(refusal(Body::CompileRequest(compile)).contains("compile options of"));
}

#[test]
fn errors_are_of_as_many_arrays_as_requests_make() {
    let error = base::Status::new(base::Code::Internal, "no");
    let control::Request::MakeErrors { arrays, specs, .. } =
        session::errors(vec![1; 2 * limits::ARRAYS], error)
    else {
        panic!("it makes errors")
    };
    assert_eq!((arrays.len(), specs.len()), (limits::ARRAYS, limits::ARRAYS));
}
