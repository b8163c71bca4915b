//! Whether islands are there, and were all the time.

use base::{Code, DeviceId, IslandId, Status};

use super::Controller;

impl Controller {
    /// Returns the islands that hold `devices`, each with its current incarnation.
    pub(super) fn islands_of(&self, devices: &[DeviceId]) -> Vec<(IslandId, u32)> {
        let mut islands: Vec<(IslandId, u32)> = Vec::new();
        for &device in devices {
            let island = self.device(device).island;
            if !islands.iter().any(|known| known.0 == island) {
                islands.push((island, self.incarnations.current(island)));
            }
        }
        islands
    }

    /// Fails if a host of the island is lost, or if the island is still starting.
    pub(super) fn check_island(&self, island: IslandId) -> Result<(), Status> {
        let hosts = &self.cluster.island(island).expect("islands are known").hosts;
        match hosts.iter().find_map(|&host| self.scheduler.host(host).lost.as_ref()) {
            Some(error) => Err(error.clone()),
            None if self.awaited.contains(&island) => {
                let message = format!("island {island} is starting; try again once it is up");
                // Users of Pathways retry after DATA_LOSS only, not after other codes.
                let was_lost = self.incarnations.was_lost(island);
                let code = if was_lost { Code::DataLoss } else { Code::Unavailable };
                Err(Status::new(code, message))
            }
            None => Ok(()),
        }
    }

    /// Returns whether one of these incarnations was lost and all of the islands are up again.
    pub(super) fn was_lost(&self, islands: &[(IslandId, u32)]) -> bool {
        let ended = |&known: &(IslandId, u32)| self.incarnations.end(known).is_some();
        islands.iter().any(ended) && islands.iter().all(|known| self.check_island(known.0).is_ok())
    }

    /// Fails if an island is lost, or was lost since this incarnation, even if it is up again.
    pub(super) fn check_incarnations(&self, islands: &[(IslandId, u32)]) -> Result<(), Status> {
        for &known in islands {
            match self.incarnations.end(known) {
                Some(error) => return Err(error.clone()),
                None => self.check_island(known.0)?,
            }
        }
        Ok(())
    }
}
