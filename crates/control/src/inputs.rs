//! Input pipelines: prefetched batches, and whether a launch that takes batches can have them.
//!
//! A launch is dispatched when all hosts of its inputs have made the batches that it takes. So no
//! host waits for a batch while launches of other clients are queued behind it, and as hosts
//! prefetch batches, no launch waits for a report while they keep up.
//!
//! When one host cannot make more, all hosts are notified before the launch that would take the
//! first missing batch is dispatched, and all return the same error for it. Otherwise some hosts
//! would enter collectives that others never join.

use std::collections::{BTreeMap, BTreeSet};

use base::{ExecutableId, HostId, InputId};
use rustc_hash::FxHashMap;

/// State of one input.
#[derive(Debug, Default)]
struct Input {
    /// Programs that take its batches.
    programs: BTreeSet<ExecutableId>,
    /// Number of batches that each of its hosts has made.
    made: BTreeMap<HostId, u64>,
    /// Number of batches taken by dispatched launches.
    taken: u64,
    /// Number of batches before its end, once a host has reached it.
    end: Option<u64>,
}

/// State of all inputs.
#[derive(Debug, Default)]
pub(crate) struct Inputs(FxHashMap<InputId, Input>);

impl Inputs {
    /// Registers a program that takes batches made by these hosts.
    pub fn open(&mut self, input: InputId, program: ExecutableId, hosts: &[HostId]) {
        let state = self.0.entry(input).or_default();
        state.programs.insert(program);
        for &host in hosts {
            state.made.entry(host).or_default();
        }
    }

    /// Unregisters a program.
    pub fn close(&mut self, program: ExecutableId) {
        self.0.retain(|_, input| {
            let was_its = input.programs.remove(&program);
            !was_its || !input.programs.is_empty()
        });
    }

    /// A host is lost and makes no more batches.
    pub fn lose(&mut self, host: HostId) {
        for input in self.0.values_mut() {
            input.made.remove(&host);
        }
    }

    /// A host has made the next batch.
    pub fn made(&mut self, input: InputId, host: HostId) {
        let state = self.0.get_mut(&input);
        if let Some(made) = state.and_then(|input| input.made.get_mut(&host)) {
            *made += 1;
        }
    }

    /// A host cannot make more batches. Returns the number it has made, and the other hosts; `None`
    /// if the end was known to come no later.
    pub fn ended(&mut self, input: InputId, host: HostId) -> Option<(u64, Vec<HostId>)> {
        let state = self.0.get_mut(&input)?;
        let made = *state.made.get(&host)?;
        if state.end.is_some_and(|end| end <= made) {
            return None;
        }
        state.end = Some(made);
        let others = state.made.keys().copied().filter(|&other| other != host);
        Some((made, others.collect()))
    }

    /// Returns whether the next batches are made, one per occurrence of an input in `wanted`.
    pub fn have(&self, wanted: &[InputId]) -> bool {
        wanted.iter().enumerate().all(|(place, input)| {
            let Some(state) = self.0.get(input) else { return true };
            let before = wanted[..place].iter().filter(|other| *other == input).count();
            let batches = state.taken + before as u64 + 1;
            let needed = state.end.map_or(batches, |end| batches.min(end));
            state.made.values().all(|&made| made >= needed)
        })
    }

    /// Takes batches for a launch that is dispatched.
    pub fn take(&mut self, wanted: &[InputId]) {
        for input in wanted {
            if let Some(state) = self.0.get_mut(input) {
                state.taken += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INPUT: InputId = InputId(7);
    const HOSTS: [HostId; 2] = [HostId(0), HostId(1)];

    fn inputs() -> Inputs {
        let mut inputs = Inputs::default();
        inputs.open(INPUT, ExecutableId(1), &HOSTS);
        inputs
    }

    #[test]
    fn all_hosts_must_have_made_a_batch() {
        let mut inputs = inputs();
        inputs.made(INPUT, HOSTS[0]);
        inputs.made(INPUT, HOSTS[0]);
        assert!(!inputs.have(&[INPUT]));
        inputs.made(INPUT, HOSTS[1]);
        assert!(inputs.have(&[INPUT]));
        assert!(!inputs.have(&[INPUT, INPUT]));
        inputs.take(&[INPUT]);
        assert!(!inputs.have(&[INPUT]));
        inputs.made(INPUT, HOSTS[1]);
        assert!(inputs.have(&[INPUT]));
    }

    #[test]
    fn the_first_host_to_end_ends_all() {
        let mut inputs = inputs();
        inputs.made(INPUT, HOSTS[0]);
        inputs.made(INPUT, HOSTS[0]);
        assert_eq!(inputs.ended(INPUT, HOSTS[0]), Some((2, vec![HOSTS[1]])));
        assert!(!inputs.have(&[INPUT]), "batches before the end are still to be made by all");
        inputs.made(INPUT, HOSTS[1]);
        assert_eq!(inputs.ended(INPUT, HOSTS[1]), Some((1, vec![HOSTS[0]])));
        assert!(inputs.have(&[INPUT; 5]), "what comes after the end is an error, had at once");
        assert_eq!(inputs.ended(INPUT, HOSTS[1]), None);
    }

    #[test]
    fn an_input_is_there_as_long_as_a_program_takes_it() {
        let mut inputs = inputs();
        inputs.open(INPUT, ExecutableId(2), &HOSTS);
        inputs.close(ExecutableId(1));
        assert!(!inputs.have(&[INPUT]));
        inputs.lose(HOSTS[0]);
        inputs.made(INPUT, HOSTS[1]);
        assert!(inputs.have(&[INPUT]));
        inputs.close(ExecutableId(2));
        assert!(inputs.0.is_empty());
    }
}
