//! Descriptions of modelled hosts and programs.

use std::sync::Arc;

use ir::{DType, Dims, Partition};
use protocol::{
    Compiled, CompiledSharding, FunctionCode, HostChannel, HostInfo, HostReply, OutputSpec,
};

/// Returns what a modelled host sends when it joins.
///
/// # Arguments
/// - `channels`: number of its channels, of 1 Gbit/s each. With some, large arrays are striped, and
///   relayed by neighbouring hosts.
pub(crate) fn host_info(
    process: u32,
    devices: u32,
    device_memory: Option<u64>,
    channels: u32,
) -> HostInfo {
    let channel = |number| HostChannel { address: format!("{process}/{number}"), rate: 1e9 };
    HostInfo {
        process,
        data_address: format!("modelled/{process}"),
        channels: (0..channels).map(channel).collect(),
        jaxlib: "modelled".to_owned(),
        platform: "modelled".to_owned(),
        platform_version: String::new(),
        device_kind: "modelled".into(),
        memories: Arc::new(["device".into()]),
        devices,
        device_memory,
    }
}

/// Returns the description of a function of one array, which is returned as it is taken.
pub(crate) fn compiled(name: &str, dtype: DType, dims: &[i64], partition: Partition) -> Compiled {
    let cut = CompiledSharding { partition, encoded: bytes::Bytes::new() };
    let layout: Vec<i64> = (0..dims.len() as i64).rev().collect();
    let dims = Dims::from_slice(dims);
    Compiled {
        name: name.to_owned(),
        parameters: Some(vec![cut.clone()]),
        parameter_layouts: vec![layout.clone()],
        outputs: vec![OutputSpec { dtype, dims, cut, memory: None }],
        output_layouts: vec![layout],
        parameter_count: 1,
        ..Compiled::default()
    }
}

/// An array of which each of two devices has half.
pub(crate) fn halves() -> Partition {
    Partition::Tiled { counts: Dims::from_slice(&[2]), tile_of: [0, 1].into() }
}

/// Parses a modelled program's text, in which the program's name is the time of one computation.
pub(crate) fn read_program(program: &[u8]) -> HostReply {
    let text = String::from_utf8_lossy(program).into_owned();
    let time = text.lines().next().and_then(|line| line.split('@').nth(1)).unwrap_or("0");
    let functions = text.lines().filter(|line| line.starts_with("function"));
    let code = || FunctionCode { options: Vec::new(), artifact: time.as_bytes().to_vec() };
    let functions = functions.map(|_| code()).collect();
    HostReply::ProgramRead { batched: text.clone(), text, functions }
}
