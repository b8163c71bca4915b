//! Requests about arrays: making, sharing, resharding, reading and freeing them.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{BufferId, Bytes, ClientId, Code, DeviceId, HostId, Status, TransferTag};
use ir::{ArraySpec, Sharding};
use protocol::{Command, ShardUpload};
use smallvec::{SmallVec, smallvec};

use super::{Controller, Outcome};
use crate::checks;
use crate::events::{CopySemantics, Handle, PutShard, Reply, RequestId, ShardSource};
use crate::objects::Buffer;
use crate::pending::Waiting;
use crate::reshard::{self, ShardMove};
use crate::submissions::TransferRole;

impl Controller {
    /// Names a buffer. If the client reuses a handle, the previous buffer is freed.
    pub(super) fn keep(&mut self, client: ClientId, handle: Handle, buffer: Buffer) {
        let old = self.client(client).buffers.insert(handle, buffer);
        self.free(client, old);
    }

    /// Frees a buffer that no longer has a name.
    pub(super) fn free(&mut self, client: ClientId, buffer: Option<Buffer>) {
        let Some(buffer) = buffer else { return };
        for &host in buffer.hosts.iter() {
            self.send(client, host, Command::Free { buffers: vec![buffer.id] });
        }
    }

    fn live(&self, client: ClientId, handle: Handle) -> Result<Buffer, Status> {
        self.clients[&client].live(handle).cloned()
    }

    /// Makes poisoned arrays that return `error` on use; `specs` are those that they would have
    /// had.
    pub(super) fn poison(
        &mut self,
        client: ClientId,
        handles: &[Handle],
        specs: Vec<Arc<ArraySpec>>,
        error: &Status,
    ) {
        let error = Arc::new(error.clone());
        for (&handle, spec) in handles.iter().zip(specs) {
            let id = BufferId(self.next_id());
            self.keep(client, handle, Buffer::poisoned(id, spec, error.clone()));
        }
    }

    /// Runs `make`; if it fails, its results are poisoned with the error.
    fn or_poison(
        &mut self,
        client: ClientId,
        results: &[Handle],
        make: impl FnOnce(&mut Self) -> Result<(), Status>,
    ) -> Outcome {
        let made = make(self);
        if let Err(error) = &made {
            let specs = vec![self.completion_spec.clone(); results.len()];
            self.poison(client, results, specs, error);
        }
        made.map(|()| Some(Reply::Done))
    }

    /// Makes the poisoned arrays that a client asks for.
    pub(super) fn make_errors(
        &mut self,
        client: ClientId,
        arrays: &[Handle],
        specs: Vec<ArraySpec>,
        error: &Status,
    ) -> Outcome {
        self.poison(client, arrays, specs.into_iter().map(Arc::new).collect(), error);
        Ok(Some(Reply::Done))
    }

    /// Makes an array from uploads that have all arrived.
    pub(super) fn put(
        &mut self,
        client: ClientId,
        array: Handle,
        spec: ArraySpec,
        shards: Vec<PutShard>,
    ) -> Outcome {
        let state = self.client(client);
        let mut uploads = Vec::with_capacity(shards.len());
        for shard in &shards {
            uploads.push(state.uploads.remove(&shard.upload).unwrap_or_default());
        }
        self.or_poison(client, &[array], |this| {
            let hosts = this.check_spec(&spec)?;
            checks::check_uploads(&spec, &shards, &uploads)?;
            let charge = this.charge(client, &spec)?;
            let spec = Arc::new(spec);
            let id = BufferId(this.next_id());
            let sent = uploads.iter().map(|data| Bytes(data.len() as u64)).sum();
            this.scheduler.accounts.note_moved(client, sent);
            let mut commands: BTreeMap<HostId, Vec<ShardUpload>> = BTreeMap::new();
            for (shard, data) in shards.into_iter().zip(uploads) {
                for (host, positions) in this.split_positions(&spec, &shard.positions) {
                    let upload = ShardUpload {
                        positions,
                        data: data.clone(),
                        tag: this.next_tag(),
                        dims: shard.dims.clone(),
                        byte_strides: shard.byte_strides.clone(),
                    };
                    commands.entry(host).or_default().push(upload);
                }
            }
            for (host, shards) in commands {
                this.send(client, host, Command::Put { buffer: id, spec: spec.clone(), shards });
            }
            this.keep(client, array, Buffer::new(id, spec, hosts, charge));
            Ok(())
        })
    }

    /// Groups device positions by the host that owns them.
    fn split_positions(&self, spec: &ArraySpec, positions: &[u32]) -> BTreeMap<HostId, Vec<u32>> {
        let mut split: BTreeMap<HostId, Vec<u32>> = BTreeMap::new();
        for &position in positions {
            let device = spec.sharding.devices[position as usize];
            split.entry(self.device(device).host).or_default().push(position);
        }
        split
    }

    /// Makes a buffer whose shard at position `p` is shared with `sources[p]`.
    fn gather(
        &mut self,
        client: ClientId,
        handle: Handle,
        spec: ArraySpec,
        sources: &[(Buffer, u32)],
    ) -> Result<(), Status> {
        let hosts = self.check_spec(&spec)?;
        checks::check_counts("shards", spec.sharding.devices.len(), sources.len())?;
        for (position, (source, from)) in sources.iter().enumerate() {
            checks::check_shared(&spec, position, source, *from as usize)?;
        }
        let (id, spec) = (BufferId(self.next_id()), Arc::new(spec));
        let shards: Vec<_> =
            sources.iter().map(|(source, from)| (source.id, &*source.spec, *from)).collect();
        for (host, command) in reshard::share(&self.cluster, (id, &spec), &shards) {
            self.send(client, host, command);
        }
        self.note_shared(client, (id, &spec), sources);
        let read = sources.iter().map(|source| source.0.id).collect();
        self.client(client).lineage.note(id, 1, read);
        self.keep(client, handle, Buffer::sharing(id, spec, hosts, sources));
        Ok(())
    }

    /// Assembles one array from single-device arrays.
    pub(super) fn assemble(
        &mut self,
        client: ClientId,
        array: Handle,
        mut spec: ArraySpec,
        parts: &[Handle],
    ) -> Outcome {
        self.or_poison(client, &[array], |this| {
            let mut sources = Vec::with_capacity(parts.len());
            for &part in parts {
                sources.push((this.live(client, part)?, 0));
            }
            if let Some((first, _)) = sources.first() {
                spec.dtype = first.spec.dtype;
            }
            this.gather(client, array, spec, &sources)
        })
    }

    /// Disassembles an array: makes a single-device array of each of its first shards, one per
    /// result.
    pub(super) fn disassemble(
        &mut self,
        client: ClientId,
        array: Handle,
        results: &[Handle],
    ) -> Outcome {
        self.or_poison(client, results, |this| {
            let buffer = this.live(client, array)?;
            if results.len() > buffer.spec.sharding.devices.len() {
                return Err(Status::new(
                    Code::InvalidArgument,
                    format!("array {array} has fewer than {} shards", results.len()),
                ));
            }
            for (position, &result) in results.iter().enumerate() {
                let sharding = &buffer.spec.sharding;
                let spec = ArraySpec {
                    dtype: buffer.spec.dtype,
                    dims: sharding.shard_dims(&buffer.spec.dims, position),
                    sharding: Sharding::single(sharding.devices[position], sharding.memory.clone()),
                };
                this.gather(client, result, spec, &[(buffer.clone(), position as u32)])?;
            }
            Ok(())
        })
    }

    /// Rearranges whole shards among arrays on the same devices.
    pub(super) fn remap(
        &mut self,
        client: ClientId,
        arrays: &[Handle],
        results: &[Handle],
        specs: Vec<ArraySpec>,
        sources: &[Vec<ShardSource>],
        semantics: CopySemantics,
    ) -> Outcome {
        self.or_poison(client, results, |this| {
            checks::check_counts("result names", specs.len(), results.len())?;
            let mut inputs = Vec::with_capacity(arrays.len());
            for &array in arrays {
                inputs.push(this.live(client, array)?);
            }
            for ((&result, spec), sources) in results.iter().zip(specs).zip(sources) {
                let mut shards = Vec::with_capacity(sources.len());
                for source in sources {
                    shards.push((inputs[source.array as usize].clone(), source.position));
                }
                this.gather(client, result, spec, &shards)?;
            }
            // The results share the inputs' buffers, so donation only gives up the names.
            let _ = semantics;
            Ok(())
        })
    }

    /// Reinterprets the same bytes under other specs.
    pub(super) fn bitcast(
        &mut self,
        client: ClientId,
        arrays: &[Handle],
        results: &[Handle],
        specs: Vec<ArraySpec>,
        semantics: CopySemantics,
    ) -> Outcome {
        self.or_poison(client, results, |this| {
            for (array, result, spec) in matched(arrays, results, specs)? {
                let source = this.live(client, array)?;
                let hosts = this.check_spec(&spec)?;
                checks::check_bitcast(&source.spec, &spec)?;
                let charge = this.charge(client, &spec)?;
                let (source, buffer) = (source.id, BufferId(this.next_id()));
                this.client(client).lineage.note(buffer, 1, smallvec![source]);
                let spec = Arc::new(spec);
                for &host in hosts.iter() {
                    this.send(
                        client,
                        host,
                        Command::Bitcast { source, buffer, spec: spec.clone() },
                    );
                }
                this.keep(client, result, Buffer::new(buffer, spec, hosts, charge));
                this.finish_input(client, array, semantics);
            }
            Ok(())
        })
    }

    /// Copies shards position by position to other devices or another memory kind.
    pub(super) fn copy(
        &mut self,
        client: ClientId,
        arrays: &[Handle],
        results: &[Handle],
        devices: Option<Arc<[DeviceId]>>,
        memory: Option<Option<Arc<str>>>,
        semantics: CopySemantics,
    ) -> Outcome {
        self.or_poison(client, results, |this| {
            checks::check_counts("result names", arrays.len(), results.len())?;
            for (&array, &result) in arrays.iter().zip(results) {
                let source = this.live(client, array)?;
                let mut sharding = source.spec.sharding.clone();
                if let Some(devices) = &devices {
                    sharding.devices = devices.clone();
                }
                if let Some(memory) = &memory {
                    sharding.memory = memory.clone();
                }
                if sharding.devices.len() != source.spec.sharding.devices.len() {
                    return Err(Status::new(
                        Code::InvalidArgument,
                        format!(
                            "an array of {} shards cannot be copied to {} devices; reshard it",
                            source.spec.sharding.devices.len(),
                            sharding.devices.len()
                        ),
                    ));
                }
                let spec = ArraySpec {
                    dtype: source.spec.dtype,
                    dims: source.spec.dims.clone(),
                    sharding,
                };
                this.transfer(client, &source, result, spec, semantics)?;
                this.finish_input(client, array, semantics);
            }
            Ok(())
        })
    }

    /// Reshards arrays to any sharding on any devices.
    pub(super) fn reshard(
        &mut self,
        client: ClientId,
        arrays: &[Handle],
        results: &[Handle],
        specs: Vec<ArraySpec>,
        semantics: CopySemantics,
    ) -> Outcome {
        self.or_poison(client, results, |this| {
            for (array, result, spec) in matched(arrays, results, specs)? {
                let source = this.live(client, array)?;
                checks::check_same_array(&source.spec, &spec)?;
                this.transfer(client, &source, result, spec, semantics)?;
                this.finish_input(client, array, semantics);
            }
            Ok(())
        })
    }

    fn finish_input(&mut self, client: ClientId, array: Handle, semantics: CopySemantics) {
        if semantics == CopySemantics::DonateInput {
            self.delete(client, &[array]);
        }
    }

    /// Converts one array by sharing, by copies within hosts, or by messages between hosts.
    fn transfer(
        &mut self,
        client: ClientId,
        source: &Buffer,
        result: Handle,
        spec: ArraySpec,
        semantics: CopySemantics,
    ) -> Result<(), Status> {
        let hosts = self.check_spec(&spec)?;
        let (id, spec) = (BufferId(self.next_id()), Arc::new(spec));
        let may_share = semantics == CopySemantics::ReuseInput;
        let mut next_id = self.next_id();
        let from = (source.id, &*source.spec);
        let planned = reshard::plan(&self.cluster, from, (id, &spec), (client, may_share), || {
            next_id += 1;
            TransferTag(next_id)
        })?;
        self.advance_ids(next_id);
        let ShardMove::Commands(commands) = planned else {
            let positions = 0..spec.sharding.devices.len() as u32;
            let shards: Vec<_> = positions.map(|position| (source.clone(), position)).collect();
            return self.gather(client, result, Arc::unwrap_or_clone(spec), &shards);
        };
        let charge = self.charge(client, &spec)?;
        self.note_move(client, source, (id, &spec));
        self.client(client).lineage.note(id, 1, smallvec![source.id]);
        let moved = commands.iter().map(|(_, command)| reshard::brought(command)).sum();
        self.scheduler.accounts.note_moved(client, moved);
        self.send_moves(client, commands);
        self.keep(client, result, Buffer::new(id, spec, hosts, charge));
        Ok(())
    }

    /// Sends the commands of one transfer: receives are dispatched after all sends and relays.
    pub(super) fn send_moves(&mut self, client: ClientId, commands: Vec<(HostId, Command)>) {
        let transfer = self.next_id();
        let link = |command: &Command| match command {
            Command::Send { .. } | Command::Relay { .. } => TransferRole::Sends(transfer),
            Command::Receive { .. } => TransferRole::Receives(transfer),
            _ => TransferRole::None,
        };
        let linked: Vec<_> =
            commands.into_iter().map(|(host, command)| (host, link(&command), command)).collect();
        let count =
            linked.iter().filter(|(_, link, _)| matches!(link, TransferRole::Sends(_))).count();
        self.scheduler.announce(transfer, count as u32);
        for (host, link, command) in linked {
            self.send_linked(client, host, command, link);
        }
    }

    /// Reads the bytes of an array that a device holds as a whole.
    pub(super) fn read(
        &mut self,
        client: ClientId,
        request: RequestId,
        array: Handle,
        byte_strides: Option<Vec<i64>>,
    ) -> Outcome {
        let buffer = self.live(client, array)?;
        if !buffer.spec.sharding.is_replicated() {
            return Err(Status::new(
                Code::Unimplemented,
                "only an array that one device holds whole can be read; read its shards",
            ));
        }
        if let Some(strides) = &byte_strides {
            checks::check_read(&buffer.spec, strides)?;
        }
        let host = self.device(buffer.spec.sharding.devices[0]).host;
        let buffer = buffer.id;
        let state = self.client(client);
        let bytes = state.bytes_of(array);
        state.reads.insert(request, bytes);
        let ticket = self.await_hosts(client, request, &[host], Waiting::Read(buffer));
        self.send(client, host, Command::Read { ticket, buffer, shard: 0, byte_strides });
        Ok(None)
    }

    /// Replies once all arrays are computed.
    pub(super) fn check_ready(
        &mut self,
        client: ClientId,
        request: RequestId,
        arrays: &[Handle],
    ) -> Outcome {
        let mut per_host: BTreeMap<HostId, Vec<BufferId>> = BTreeMap::new();
        let mut buffers = SmallVec::new();
        for &array in arrays {
            let buffer = self.clients[&client].live(array)?;
            buffers.push(buffer.id);
            for &host in buffer.hosts.iter() {
                per_host.entry(host).or_default().push(buffer.id);
            }
        }
        if per_host.is_empty() {
            return Ok(Some(Reply::Done));
        }
        let hosts: Vec<HostId> = per_host.keys().copied().collect();
        let ticket = self.await_hosts(client, request, &hosts, Waiting::Ready(buffers));
        for (host, buffers) in per_host {
            self.send(client, host, Command::CheckReady { ticket, buffers });
        }
        Ok(None)
    }

    /// Frees device memory; the names stay and report the deletion.
    pub(super) fn delete(&mut self, client: ClientId, arrays: &[Handle]) {
        let mut per_host: BTreeMap<HostId, Vec<BufferId>> = BTreeMap::new();
        for array in arrays {
            let Some(buffer) = self.clients[&client].buffers.get(array) else { continue };
            buffer.mark_deleted();
            for &host in buffer.hosts.iter() {
                per_host.entry(host).or_default().push(buffer.id);
            }
        }
        for (host, buffers) in per_host {
            self.send(client, host, Command::Delete { buffers });
        }
    }

    /// Replies whether the memory of an array has been given up.
    pub(super) fn is_deleted(&self, client: ClientId, array: Handle) -> Outcome {
        let buffer = self.clients[&client].buffer(array)?;
        Ok(Some(Reply::Deleted(buffer.is_deleted())))
    }

    /// Removes names; buffers that no other name shares are freed.
    pub(super) fn destruct(&mut self, client: ClientId, arrays: &[Handle]) -> Outcome {
        let state = self.client(client);
        let mut per_host: BTreeMap<HostId, Vec<BufferId>> = BTreeMap::new();
        let mut missing = Vec::new();
        for array in arrays {
            match state.buffers.remove(array) {
                Some(buffer) => {
                    for &host in buffer.hosts.iter() {
                        per_host.entry(host).or_default().push(buffer.id);
                    }
                }
                None => missing.push(*array),
            }
        }
        for (host, buffers) in per_host {
            self.send(client, host, Command::Free { buffers });
        }
        if missing.is_empty() {
            return Ok(Some(Reply::Done));
        }
        Err(Status::new(Code::NotFound, format!("no array has the handles {missing:?}")))
    }
}

/// Zips arrays with the name and the spec of their results, after checking that the numbers match.
fn matched(
    arrays: &[Handle],
    results: &[Handle],
    specs: Vec<ArraySpec>,
) -> Result<impl Iterator<Item = (Handle, Handle, ArraySpec)>, Status> {
    checks::check_counts("result names", arrays.len(), results.len())?;
    checks::check_counts("descriptions", arrays.len(), specs.len())?;
    let names = arrays.iter().zip(results);
    Ok(names.zip(specs).map(|((&array, &result), spec)| (array, result, spec)))
}
