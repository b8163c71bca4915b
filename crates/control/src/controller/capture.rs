//! Logs what clients do, and captures the last step of a client that disconnects.

use std::sync::Arc;

use base::{BufferId, ClientId};
use ir::{ArraySpec, Program, ProgramError};

use super::Controller;
use crate::objects::Buffer;
use crate::programs::Executable;

impl Controller {
    /// Logs a call, if the client is being captured.
    pub(super) fn note_call(
        &mut self,
        client: ClientId,
        executable: &Arc<Executable>,
        args: &[BufferId],
        specs: Vec<Arc<ArraySpec>>,
        first: BufferId,
        keep: &[u32],
    ) {
        if let Some(log) = self.logs.get_mut(&client) {
            log.note_call(executable, args, specs, first, keep);
        }
    }

    /// Notes a buffer that shares shards of others, if the client is being captured.
    pub(super) fn note_shared(
        &mut self,
        client: ClientId,
        buffer: (BufferId, &ArraySpec),
        sources: &[(Buffer, u32)],
    ) {
        if let Some(log) = self.logs.get_mut(&client) {
            log.note_shared(buffer, sources);
        }
    }

    /// Logs a transfer of an array, if the client is being captured.
    pub(super) fn note_move(
        &mut self,
        client: ClientId,
        source: &Buffer,
        target: (BufferId, &Arc<ArraySpec>),
    ) {
        if let Some(log) = self.logs.get_mut(&client) {
            log.note_move(source, target);
        }
    }

    /// Converts the last step of a disconnected client to a program.
    pub(super) fn finish_log(&mut self, client: ClientId) {
        let Some(log) = self.logs.remove(&client) else { return };
        let time = |executable: &Executable| {
            let factor = self.scheduler.factor(executable.id)?;
            Some(executable.expected_time().times(factor))
        };
        let Some(program) = log.into_program(format!("client_{}", client.0), &time) else { return };
        let checked = program.verify().map(|()| program);
        self.captured.push((client, checked));
    }

    /// Returns the last step of each disconnected client, or why it is not a valid program.
    pub fn captured(&self) -> &[(ClientId, Result<Program, ProgramError>)] {
        &self.captured
    }
}
