//! Reshardings that clients have prepared.

use std::sync::Arc;

use base::{ClientId, ExecutableId, Status};
use ir::ArraySpec;

use super::{Controller, Outcome};
use crate::checks::invalid;
use crate::events::{CopySemantics, Handle, Reply, RequestId};
use crate::programs::{Executable, Run};
use crate::resharding::Resharding;

impl Controller {
    /// Gives a resharding a handle.
    pub(super) fn prepare_resharding(
        &mut self,
        client: ClientId,
        request: RequestId,
        resharding: Resharding,
    ) -> Outcome {
        self.check_devices(&resharding.devices)?;
        for output in &resharding.outputs {
            self.check_devices(&output.devices)?;
        }
        let made = Executable::resharding(Arc::new(resharding), ExecutableId(self.next_id()));
        self.name_executable(client, request, made);
        Ok(None)
    }

    /// Reshards the arguments of a run.
    pub(super) fn run_resharding(
        &mut self,
        client: ClientId,
        run: &Run,
        (executable, resharding): (&Executable, &Resharding),
    ) -> Result<Reply, Status> {
        let outputs = resharding.outputs.len();
        let (given, wanted) = (run.args.len(), run.results.len());
        if given != outputs || (wanted != 0 && wanted != outputs) {
            return Err(invalid(format!("a resharding of {outputs} arrays is given {given}")));
        }
        let names: Vec<Handle> = match wanted {
            0 => (0..outputs).map(|_| self.client(client).mint()).collect(),
            _ => run.results.to_vec(),
        };
        let state = &self.clients[&client];
        let resharded = |(&handle, sharding): (&Handle, &ir::Sharding)| {
            let given = &state.live(handle)?.spec;
            let (dtype, dims) = (given.dtype, given.dims.clone());
            Ok(ArraySpec { dtype, dims, sharding: sharding.clone() })
        };
        let specs: Vec<ArraySpec> = run
            .args
            .iter()
            .zip(&resharding.outputs)
            .map(resharded)
            .collect::<Result<_, Status>>()?;
        let made = match wanted {
            0 => names.iter().copied().zip(specs.iter().cloned().map(Arc::new)).collect(),
            _ => Vec::new(),
        };
        let semantics = match resharding.donates {
            true => CopySemantics::DonateInput,
            false => CopySemantics::AlwaysCopy,
        };
        self.reshard(client, &run.args, &names, specs, semantics)?;
        // It has no completion of its own: its results can be awaited.
        let status = run.status.map_or(0, |name| match name {
            0 => self.client(client).mint(),
            name => name,
        });
        Ok(Reply::Executed { status, outputs: made, compiled: executable.compiled.clone() })
    }
}
