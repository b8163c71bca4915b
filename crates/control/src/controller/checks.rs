//! Checks of arrays and devices against the cluster.

use std::sync::Arc;

use base::{DeviceId, HostId, Status};
use ir::{ArraySpec, Sharding};
use smallvec::SmallVec;

use super::Controller;
use crate::checks::{check_partition, check_shape, invalid};

impl Controller {
    /// Returns the hosts that hold shards of an array with this spec, none of which is lost. Fails
    /// if the shape, devices or memory kind are invalid, or if the sharding does not fit the shape.
    pub(super) fn check_spec(&self, spec: &ArraySpec) -> Result<Arc<[HostId]>, Status> {
        check_shape(&spec.dims)?;
        check_partition(spec)?;
        self.check_devices(&spec.sharding.devices)?;
        self.check_memory(&spec.sharding)?;
        let hosts = self.hosts_of(&spec.sharding.devices);
        for &host in hosts.iter() {
            let island = self.cluster.host(host).expect("devices name known hosts").island;
            self.check_island(island)?;
        }
        Ok(hosts)
    }

    /// Fails if `devices` is empty, a device does not exist, or two of them are one physical
    /// device.
    pub(super) fn check_devices(&self, devices: &[DeviceId]) -> Result<(), Status> {
        if devices.is_empty() {
            return Err(invalid("no device is named; name at least one"));
        }
        if let Some(device) = devices.iter().find(|&&device| self.cluster.device(device).is_none())
        {
            return Err(invalid(format!(
                "there is no device {device}; devices are 0 to {}",
                self.cluster.devices().count() - 1
            )));
        }
        let place = |&device: &DeviceId| {
            let known = self.device(device);
            (known.host, known.local, device)
        };
        let mut sorted: SmallVec<[_; 16]> = devices.iter().map(place).collect();
        sorted.sort_unstable();
        match sorted.windows(2).find(|pair| (pair[0].0, pair[0].1) == (pair[1].0, pair[1].1)) {
            None => Ok(()),
            Some([(.., one), (.., other)]) if one == other => {
                Err(invalid(format!("device {one} is named twice")))
            }
            Some(pair) => Err(invalid(format!(
                "devices {} and {} are one physical device, of two slices; one computation or \
                 array needs devices of their own: ask for one slice of them all",
                pair[0].2, pair[1].2
            ))),
        }
    }

    fn check_memory(&self, sharding: &Sharding) -> Result<(), Status> {
        let Some(memory) = &sharding.memory else { return Ok(()) };
        for &device in sharding.devices.iter() {
            let known = &self.device(device).memories;
            if !known.contains(memory) {
                return Err(invalid(format!(
                    "device {device} has no memory of kind {memory:?}; it has {known:?}"
                )));
            }
        }
        Ok(())
    }
}
