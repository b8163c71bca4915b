//! Controllers of islands whose hosts join one by one.

use std::sync::Arc;

use base::{HostId, Nanos};
use control::{Config, Controller, Effect, Event};
use protocol::HostInfo;
use topology::{Cluster, IslandSpec};

pub fn controller(islands: u32, hosts: u32) -> Controller {
    let spec = IslandSpec::new(hosts, 1);
    Controller::new(Cluster::new(&vec![spec; islands as usize]), Config::default())
}

fn info(host: u32, jaxlib: &str) -> HostInfo {
    HostInfo {
        process: 1000 + host,
        data_address: format!("unix:/nowhere/{host}"),
        channels: Vec::new(),
        jaxlib: jaxlib.to_owned(),
        platform: "cpu".to_owned(),
        platform_version: "1".to_owned(),
        device_kind: "cpu".into(),
        memories: Arc::new(["device".into()]),
        devices: 1,
        device_memory: None,
    }
}

pub fn join(controller: &mut Controller, host: u32, jaxlib: &str) -> Vec<Effect> {
    let event = Event::HostJoined { host: HostId(host), info: info(host, jaxlib) };
    controller.handle(Nanos(0), event)
}
