//! Steps of whole programs, bound to the buffers and messages of a run.

use std::sync::Arc;

use base::{BufferId, ClientId, TransferTag};
use protocol::Command;

/// The bindings of a run's slots and tags to buffers and message tags.
#[derive(Debug)]
pub(crate) struct RunOf {
    pub args: Arc<[BufferId]>,
    pub first_buffer: BufferId,
    pub first_tag: TransferTag,
    pub client: ClientId,
}

impl RunOf {
    pub fn buffer(&self, slot: BufferId) -> BufferId {
        match self.args.get(slot.0 as usize) {
            Some(&buffer) => buffer,
            None => BufferId(self.first_buffer.0 + slot.0 - self.args.len() as u64),
        }
    }

    fn slot(&self, slot: &mut BufferId) {
        *slot = self.buffer(*slot);
    }

    fn tag(&self, tag: &mut TransferTag) {
        tag.0 += self.first_tag.0;
    }

    /// Returns a step with the buffers and messages of the run.
    ///
    /// # Errors
    /// There is no model of the step.
    pub fn bind(&self, step: &Command) -> Result<Command, String> {
        let mut step = step.clone();
        match &mut step {
            Command::Launch { args, first_result, client, .. } => {
                args.iter_mut().for_each(|arg| self.slot(arg));
                self.slot(first_result);
                *client = self.client;
            }
            Command::AssembleShards { buffer, shards, .. } => {
                self.slot(buffer);
                shards.iter_mut().for_each(|shard| self.slot(&mut shard.source));
            }
            Command::Copy { source, buffer, .. } => {
                self.slot(source);
                self.slot(buffer);
            }
            Command::Send { source, pieces, .. } => {
                self.slot(source);
                pieces.iter_mut().for_each(|piece| self.tag(&mut piece.tag));
            }
            Command::Relay { relays } => {
                for relay in relays {
                    self.tag(&mut relay.tag);
                    self.tag(&mut relay.onward);
                }
            }
            Command::Receive { buffer, shards, relays, .. } => {
                self.slot(buffer);
                let pieces = shards.iter_mut().flat_map(|shard| &mut shard.pieces);
                pieces.for_each(|piece| self.tag(&mut piece.tag));
                for relay in relays {
                    self.tag(&mut relay.tag);
                    self.tag(&mut relay.onward);
                }
            }
            Command::Free { buffers } => buffers.iter_mut().for_each(|buffer| self.slot(buffer)),
            other => return Err(format!("there is no model of the step {other:?}")),
        }
        Ok(step)
    }
}
