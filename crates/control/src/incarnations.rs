//! Incarnations of islands: arrays and programs of an earlier incarnation are gone.

use base::{IslandId, Status};

/// Incarnation of an island: how often it was lost.
#[derive(Debug, Clone, Default)]
struct Incarnation {
    count: u32,
    /// How the previous incarnation ended.
    lost: Option<Status>,
}

/// The current incarnation of each island, indexed by island id.
#[derive(Debug)]
pub(crate) struct Incarnations(Vec<Incarnation>);

impl Incarnations {
    /// Creates the first incarnations of this many islands.
    pub fn new(islands: usize) -> Self {
        Self(vec![Incarnation::default(); islands])
    }

    /// Adds an island.
    pub fn add(&mut self) {
        self.0.push(Incarnation::default());
    }

    fn of(&self, island: IslandId) -> &Incarnation {
        &self.0[island.0 as usize]
    }

    /// Returns the number of the current incarnation of an island.
    pub fn current(&self, island: IslandId) -> u32 {
        self.of(island).count
    }

    /// Returns whether an island was ever lost.
    pub fn was_lost(&self, island: IslandId) -> bool {
        self.of(island).lost.is_some()
    }

    /// Returns how the last incarnation ended, if this one is not the current one.
    pub fn end(&self, (island, count): (IslandId, u32)) -> Option<&Status> {
        let known = self.of(island);
        known.lost.as_ref().filter(|_| known.count != count)
    }

    /// An island is lost: its next incarnation begins.
    pub fn lose(&mut self, island: IslandId, error: &Status) {
        let known = &mut self.0[island.0 as usize];
        known.count += 1;
        known.lost = Some(error.clone());
    }
}
