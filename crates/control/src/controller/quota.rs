//! Charges arrays and runs to the memory quotas of their clients.

use base::{Bytes, ClientId, Code, DeviceId, Status};
use ir::ArraySpec;
use rustc_hash::FxHashMap;

use super::Controller;
use crate::memory::{Charge, ShardMemory};
use crate::programs::{Executable, ExecutableForm, Run};

impl Controller {
    /// Charges an array to its client's quota; `None` if none of its memory is accounted.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`: the client would hold more than a device has.
    pub(super) fn charge(
        &self,
        client: ClientId,
        spec: &ArraySpec,
    ) -> Result<Option<Charge>, Status> {
        let memory = &self.scheduler.memory;
        if memory.is_limited() {
            let shards = memory.shards(spec).map(|(_, shard)| shard);
            let shape = || format!("an array of shape {:?} of {}", spec.dims, spec.dtype.name());
            self.check_fits(client, shards, &FxHashMap::default(), shape)?;
        }
        Ok(self.charge_made(client, spec))
    }

    /// Charges an array made by a run; that it fits was checked when the run began.
    pub(super) fn charge_made(&self, client: ClientId, spec: &ArraySpec) -> Option<Charge> {
        let memory = &self.scheduler.memory;
        if !memory.is_limited() {
            return None;
        }
        let shards: Vec<_> = memory.shards(spec).collect();
        (!shards.is_empty()).then(|| self.clients[&client].quota.charge(shards))
    }

    /// Fails if a run of a program does not fit besides what its client holds.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`: the client would hold more than a device has.
    pub(super) fn check_run_fits(
        &self,
        client: ClientId,
        executable: &Executable,
        run: &Run,
    ) -> Result<(), Status> {
        let memory = &self.scheduler.memory;
        if !memory.is_limited() {
            return Ok(());
        }
        let mut released: FxHashMap<DeviceId, u64> = FxHashMap::default();
        // The footprint of a whole program already includes its donations.
        if matches!(executable.form, ExecutableForm::Gang) {
            for index in executable.donated(&run.keep) {
                let Some(handle) = run.args.get(index as usize) else { continue };
                for view in self.clients[&client].buffers[handle].storage.iter() {
                    view.charged(|shard| *released.entry(shard.device).or_default() += shard.bytes);
                }
            }
        }
        let shards = memory.demand(executable.id);
        let what = || format!("a run of {}", executable.compiled.name);
        self.check_fits(client, shards, &released, what)
    }

    fn check_fits(
        &self,
        client: ClientId,
        shards: impl Iterator<Item = ShardMemory>,
        released: &FxHashMap<DeviceId, u64>,
        what: impl FnOnce() -> String,
    ) -> Result<(), Status> {
        let quota = &self.clients[&client].quota;
        let mut wanted: FxHashMap<DeviceId, u64> = FxHashMap::default();
        for shard in shards {
            *wanted.entry(shard.device).or_default() += shard.bytes;
        }
        let mut devices: Vec<_> = wanted.into_iter().collect();
        devices.sort_unstable();
        for (device, bytes) in devices {
            let Some(capacity) = self.scheduler.memory.capacity(device) else { continue };
            let held = quota.held(device);
            let free = capacity.saturating_sub(held) + released.get(&device).unwrap_or(&0);
            if bytes > free {
                return Err(Status::new(
                    Code::ResourceExhausted,
                    format!(
                        "{} needs {} of device {device}, of whose {} this client has {} in use; \
                         delete arrays, donate arguments, or use more devices",
                        what(),
                        Bytes(bytes),
                        Bytes(capacity),
                        Bytes(held)
                    ),
                ));
            }
        }
        Ok(())
    }
}
