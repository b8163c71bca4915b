//! Programs that are requests in JSON (`PluginProgram`), as pathwaysutils makes them.
//!
//! `reshardRequest` reshards arrays. `persistenceWriteRequest` and `persistenceReadRequest`, and lists
//! of them, move arrays between devices and files; hosts do that in a process of their client's, like
//! the client's own Python functions. `profileRequest` is not known.

use std::sync::Arc;

use base::{Code, DeviceId, Status};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use control::{Colocated, Request, Resharding};
use ir::{ArraySpec, DType, Dims, Sharding};
use prost::Message;
use serde_json::Value;

use crate::proto as p;
use crate::sharding::{invalid, partition};

/// What the client writes before the JSON.
const PREFIX: &[u8] = b"__serialized_plugin_program ";
/// What hosts find before a request to move arrays between devices and files.
const PERSISTENCE: &[u8] = b"fairway persistence 1\n";

type Result<T> = std::result::Result<T, Status>;

/// Decodes a program.
pub(crate) fn request(program: &[u8]) -> Result<Request> {
    let text = program.strip_prefix(PREFIX).unwrap_or(program);
    let given: Value = serde_json::from_slice(text)
        .map_err(|error| invalid(format!("a plugin program is no JSON: {error}")))?;
    let Some((kind, body)) = given.as_object().and_then(|object| object.iter().next()) else {
        return Err(unknown("{}"));
    };
    match kind.as_str() {
        "reshardRequest" => resharding(body),
        "persistenceWriteRequest" => persistence(text, &[body], true),
        "persistenceReadRequest" => persistence(text, &[body], false),
        "bulk_persistence_write_request" => persistence(text, &each(body, "write_requests")?, true),
        "bulk_persistence_read_request" => persistence(text, &each(body, "read_requests")?, false),
        other => Err(unknown(other)),
    }
}

fn unknown(kind: &str) -> Status {
    let text = format!(
        "Bad PluginProgram: requests {kind:?} are unknown here; known are reshardRequest, \
         persistenceWriteRequest, persistenceReadRequest and their bulk forms"
    );
    Status::new(Code::Unimplemented, text)
}

fn field<'a>(value: &'a Value, name: &str) -> Result<&'a Value> {
    value.get(name).ok_or_else(|| invalid(format!("Bad PluginProgram: {name} is missing")))
}

fn each<'a>(value: &'a Value, name: &str) -> Result<Vec<&'a Value>> {
    let list = field(value, name)?.as_array();
    let list = list.ok_or_else(|| invalid(format!("Bad PluginProgram: {name} is no list")))?;
    Ok(list.iter().collect())
}

fn integers(value: &Value, name: &str) -> Result<Vec<i64>> {
    let bad = || invalid(format!("Bad PluginProgram: {name} holds what is no integer"));
    each(value, name)?.into_iter().map(|item| item.as_i64().ok_or_else(bad)).collect()
}

fn resharding(body: &Value) -> Result<Request> {
    let donates = body.get("donateInput").and_then(Value::as_bool).unwrap_or(false);
    let outputs = each(body, "outSharding")?;
    let sharding = |given: &Value| {
        let op = field(given, "xla_hlo_sharding")?;
        let memory = given.get("memory_kind").and_then(Value::as_str);
        let devices = integers(field(given, "devices")?, "device_ids")?;
        // Reshardings are of arrays of any rank: the tiles say it.
        let op = op_sharding(op)?;
        let mut sharding = self::sharding(&op, rank_of(&op), &devices)?;
        sharding.memory = memory.map(Into::into);
        Ok(sharding)
    };
    let outputs: Vec<Sharding> = outputs.into_iter().map(sharding).collect::<Result<_>>()?;
    // The client gives as many shards of each argument as there are devices.
    let inputs = each(body, "inSharding")?;
    let devices = match inputs.first() {
        Some(first) => integers(field(first, "devices")?, "device_ids")?,
        None => return Err(invalid("Bad PluginProgram: it names no array")),
    };
    let devices = numbers(&devices);
    Ok(Request::PrepareResharding(Resharding { devices, outputs, donates }))
}

fn persistence(text: &[u8], requests: &[&Value], writes: bool) -> Result<Request> {
    let array = |given: &&Value| -> Result<ArraySpec> {
        let devices = integers(field(given, "devices")?, "device_ids")?;
        let op = op_sharding(field(given, "b64_hlo_sharding_string")?)?;
        let (dtype, dims) = match writes {
            true => (DType::Token, integers(given, "shape")?),
            false => {
                let shape = field(given, "shape")?;
                (
                    element_type(field(shape, "xla_primitive_type_str")?)?,
                    integers(shape, "dimensions")?,
                )
            }
        };
        let sharding = sharding(&op, dims.len(), &devices)?;
        Ok(ArraySpec { dtype, dims: Dims::from(dims), sharding })
    };
    let arrays: Vec<ArraySpec> = requests.iter().map(array).collect::<Result<_>>()?;
    let Some(first) = arrays.first() else {
        return Err(invalid("Bad PluginProgram: it names no array"));
    };
    let devices = first.sharding.devices.clone();
    let name = if writes { "persistence write" } else { "persistence read" }.to_owned();
    let (inputs, outputs) = if writes { (arrays, Vec::new()) } else { (Vec::new(), arrays) };
    let function = Colocated { name, inputs, outputs, takes_any_type: writes, user: None };
    Ok(Request::LoadColocated { program: [PERSISTENCE, text].concat(), devices, function })
}

fn op_sharding(encoded: &Value) -> Result<p::OpSharding> {
    let bad = |what: &str| invalid(format!("Bad PluginProgram: a sharding is {what}"));
    let text = encoded.as_str().ok_or_else(|| bad("no string"))?;
    let bytes = BASE64_STANDARD.decode(text).map_err(|error| bad(&error.to_string()))?;
    p::OpSharding::decode(&bytes[..]).map_err(|error| bad(&error.to_string()))
}

/// Returns the rank of an array that a sharding with tiles is of.
fn rank_of(op: &p::OpSharding) -> usize {
    let replicated = op.last_tile_dims.len().max(usize::from(op.replicate_on_last_tile_dim));
    op.tile_assignment_dimensions.len().saturating_sub(replicated)
}

fn sharding(op: &p::OpSharding, rank: usize, devices: &[i64]) -> Result<Sharding> {
    let partition = partition(op, rank, devices.len())?;
    let devices = numbers(devices);
    Ok(Sharding { devices, memory: None, partition })
}

/// Converts device numbers; one out of range becomes one that does not exist.
fn numbers(ids: &[i64]) -> Arc<[DeviceId]> {
    ids.iter().map(|&id| DeviceId(u32::try_from(id).unwrap_or(u32::MAX))).collect()
}

/// Returns the element type of XLA's name of it, such as `F32`.
fn element_type(name: &Value) -> Result<DType> {
    let text = name.as_str().unwrap_or_default();
    let found = match text.split_at_checked(1) {
        _ if text == "BF16" => Some(DType::BF16),
        _ if text == "PRED" => Some(DType::Bool),
        Some(("F", bits)) => DType::from_name(&format!("float{bits}")),
        Some(("S", bits)) => DType::from_name(&format!("int{bits}")),
        Some(("U", bits)) => DType::from_name(&format!("uint{bits}")),
        Some(("C", bits)) => DType::from_name(&format!("complex{bits}")),
        _ => None,
    };
    found.ok_or_else(|| invalid(format!("Bad PluginProgram: there is no element type {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_request_is_refused_with_what_is_wrong() {
        let refused = |text: &str| request(text.as_bytes()).unwrap_err().message;
        assert!(refused("nothing").contains("no JSON"));
        assert!(refused("{}").contains("known are reshardRequest"));
        assert!(refused(r#"{"profileRequest": {}}"#).contains("profileRequest"));
        assert!(refused(r#"{"reshardRequest": {}}"#).contains("outSharding is missing"));
        let read = r#"{"bulk_persistence_read_request": {"read_requests": []}}"#;
        assert!(refused(read).contains("names no array"));
    }

    #[test]
    fn element_types_are_those_of_xla() {
        let named = |name: &str| element_type(&Value::from(name)).ok();
        assert_eq!(named("BF16"), Some(DType::BF16));
        assert_eq!(named("F32"), Some(DType::F32));
        assert_eq!(named("S8"), Some(DType::S8));
        assert_eq!(named("U64"), Some(DType::U64));
        assert_eq!([named("X7"), named(""), named("Fü")], [None; 3]);
    }
}
