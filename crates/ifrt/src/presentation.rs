//! How islands, hosts and devices are presented to a client.

use base::ClientId;
use control::{Controller, IslandState};
use topology::Device;

use crate::proto as p;
use crate::proto::attribute_map::value::{Int64List, Value};

/// Settings of the presentation of devices.
#[derive(Debug, Clone, Default)]
pub struct Presentation {
    /// Whether devices have the attribute `slice_index`, the island's number, for
    /// `create_hybrid_device_mesh`. Off by default since `jax.make_mesh` refuses devices of several
    /// slices.
    pub slice_index: bool,
    /// Directory of the controller's sockets for processes of this user.
    pub directory: String,
}

impl Presentation {
    /// Builds the response to a client's first request.
    pub(crate) fn init(
        &self,
        controller: &Controller,
        session: u64,
        client: ClientId,
    ) -> p::InitResponse {
        let cluster = controller.cluster();
        let first = controller.host_info(cluster.hosts()[0].id);
        let platform = first.map_or("cpu", |info| info.platform.as_str());
        let is_up = |device: &&Device| controller.island_state(device.island) == IslandState::Up;
        let physical = || cluster.devices().filter(is_up);
        let kinds = memory_kinds(cluster.devices());
        let slots = virtual_devices(controller, client);
        let all = || physical().chain(&slots);
        let memories = all().flat_map(|device| memories(device, &kinds)).collect();
        let ids = |devices: &mut dyn Iterator<Item = &Device>| -> Vec<i32> {
            devices.map(|device| device.id.0 as i32).collect()
        };
        p::InitResponse {
            platform_name: platform.to_owned(),
            platform_version: first.map_or_else(String::new, |info| info.platform_version.clone()),
            platform_id: fingerprint(platform),
            process_index: 0,
            runtime_type: "fairway".to_owned(),
            all_devices: all()
                .map(|device| self.device(device, platform, kinds.len(), client))
                .collect(),
            addressable_device_ids: ids(&mut all()),
            session_id: session,
            memories,
            // What `jax.devices()` lists; slices use the remaining device numbers.
            primary_device_ids: ids(&mut physical()),
            client_attributes: Some(client_attributes()),
        }
    }

    fn device(
        &self,
        device: &Device,
        platform: &str,
        kinds: usize,
        client: ClientId,
    ) -> p::init_response::Device {
        let integer = |number: u32| p::attribute_map::Value {
            value: Some(Value::Int64Value(i64::from(number))),
        };
        let coords = vec![i64::from(device.index), 0, 0];
        let mut attributes = std::collections::HashMap::from([
            ("island".to_owned(), integer(device.island.0)),
            ("host".to_owned(), integer(device.host.0)),
            ("core_on_chip".to_owned(), integer(0)),
            (
                "coords".to_owned(),
                p::attribute_map::Value {
                    value: Some(Value::Int64ListValue(Int64List { elements: coords })),
                },
            ),
        ]);
        attributes.insert("client_number".to_owned(), integer(client.0 as u32));
        let directory = Value::StringValue(self.directory.clone().into());
        let directory = p::attribute_map::Value { value: Some(directory) };
        attributes.insert("controller_directory".to_owned(), directory);
        if self.slice_index {
            attributes.insert("slice_index".to_owned(), integer(device.island.0));
        }
        let id = device.id.0 as i32;
        let first = id * kinds as i32;
        let name = device_name(platform, id);
        p::init_response::Device {
            id,
            local_hardware_id: device.local as i32,
            device_kind: device.kind.to_string(),
            debug_string: format!("{platform}:{id}"),
            to_string: name,
            default_memory_id: Some(first),
            memory_ids: (0..device.memories.len() as i32).map(|kind| first + kind).collect(),
            local_device_id: id,
            attributes: Some(p::AttributeMap { version_number: 0, attributes }),
            platform_name: platform.to_owned(),
        }
    }
}

/// Adds the reason why a client is refused to all devices, where the plugin finds it.
pub(crate) fn refuse(init: &mut p::InitResponse, reason: &str) {
    for device in &mut init.all_devices {
        let reason = Value::StringValue(reason.to_owned().into());
        let reason = p::attribute_map::Value { value: Some(reason) };
        let attributes = device.attributes.get_or_insert_default();
        attributes.attributes.insert("fairway_refusal".to_owned(), reason);
    }
}

/// Attributes that JAX queries: exported programs may keep Shardy's shardings, and the stock client
/// cannot serialize executables, so JAX does not try.
fn client_attributes() -> p::AttributeMap {
    let flag = |name: &str, value| {
        (name.to_owned(), p::attribute_map::Value { value: Some(Value::BoolValue(value)) })
    };
    let attributes =
        [flag("serialize_with_sdy", true), flag("supports_executable_serialization", false)];
    p::AttributeMap { version_number: 0, attributes: attributes.into() }
}

/// Returns the virtual devices of a client's slices; they are mapped to physical ones on allocation.
fn virtual_devices(controller: &Controller, client: ClientId) -> Vec<Device> {
    let described = |device: &&Device| !device.memories.is_empty();
    let Some(like) = controller.cluster().devices().find(described) else { return Vec::new() };
    controller.slice_numbers(client).map(|id| Device { id, ..like.clone() }).collect()
}

fn device_name(platform: &str, id: i32) -> String {
    let mut letters = platform.chars();
    let capital: String = letters.next().map(|c| c.to_ascii_uppercase()).into_iter().collect();
    format!("{capital}{}Device(id={id})", letters.as_str())
}

fn memory_kinds<'a>(devices: impl Iterator<Item = &'a Device>) -> Vec<String> {
    let mut kinds: Vec<String> = Vec::new();
    for device in devices {
        for memory in device.memories.iter() {
            if !kinds.iter().any(|kind| kind[..] == memory[..]) {
                kinds.push(memory.to_string());
            }
        }
    }
    kinds
}

fn memories(device: &Device, kinds: &[String]) -> Vec<p::init_response::Memory> {
    let id = device.id.0 as i32;
    let memory = |(index, kind): (usize, &std::sync::Arc<str>)| {
        let number = kinds.iter().position(|known| known[..] == kind[..]);
        p::init_response::Memory {
            id: id * kinds.len() as i32 + index as i32,
            memory_space_kind: kind.to_string(),
            device_ids: vec![id],
            debug_string: format!("memory {kind} of device {id}"),
            to_string: format!("{kind}:{id}"),
            kind_id: number.expect("collected from the devices") as i32,
        }
    };
    device.memories.iter().enumerate().map(memory).collect()
}

/// FNV-1a; the protocol requires a number per platform name, whose value has no meaning.
fn fingerprint(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
