//! Gangs: devices of a program that compute together, each one device of its step graph.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base::DeviceId;

use crate::{ArraySpec, Collective, CollectiveKind, CollectiveOp, Function, Operation, Program};

/// Union-find of devices that ever compute together.
pub(crate) struct GangMap {
    /// Gang of each device of the program.
    pub of: BTreeMap<u32, u32>,
    pub count: u32,
}

impl GangMap {
    pub fn of(program: &Program) -> Self {
        let mut together: BTreeMap<u32, u32> = BTreeMap::new();
        for node in &program.nodes {
            let Operation::Call { function, devices, .. } = &node.operation else { continue };
            for device in devices.iter() {
                together.entry(device.0).or_insert(device.0);
            }
            if program.functions[function.0 as usize].collectives.is_none()
                && let Some(first) = devices.first()
            {
                let first = root(&mut together, first.0);
                for device in devices.iter() {
                    let other = root(&mut together, device.0);
                    together.insert(first.max(other), first.min(other));
                }
            }
        }
        for device in program.values.iter().flat_map(|spec| spec.sharding.devices.iter()) {
            together.entry(device.0).or_insert(device.0);
        }
        let devices: Vec<u32> = together.keys().copied().collect();
        let mut numbers: BTreeMap<u32, u32> = BTreeMap::new();
        let mut of = BTreeMap::new();
        for device in devices {
            let count = numbers.len() as u32;
            let number = *numbers.entry(root(&mut together, device)).or_insert(count);
            of.insert(device, number);
        }
        Self { of, count: numbers.len() as u32 }
    }

    pub fn places(&self, spec: &ArraySpec) -> BTreeSet<u32> {
        spec.sharding.devices.iter().map(|device| self.of[&device.0]).collect()
    }

    /// Returns the collectives of a function as collectives of gangs, in stages that follow one
    /// another. Successive collectives of different hosts are one stage, and in it one collective if
    /// they are of the same kind between the same gangs.
    ///
    /// # Arguments
    /// - `devices`: those of a call.
    pub fn stages(&self, function: &Function, devices: &[DeviceId]) -> Vec<Vec<CollectiveOp>> {
        let mut stages: Vec<Vec<CollectiveOp>> = Vec::new();
        let mut busy: BTreeSet<u32> = BTreeSet::new();
        for op in function.collectives.iter().flatten() {
            if stages.is_empty() || op.devices.iter().any(|rank| busy.contains(rank)) {
                stages.push(Vec::new());
                busy.clear();
            }
            busy.extend(op.devices.iter());
            let (Some(stage), Some(op)) = (stages.last_mut(), self.between(op, devices)) else {
                continue;
            };
            match stage.iter_mut().find_map(|other| Some((joined(other, &op)?, other))) {
                Some((both, other)) => *other = both,
                None => stage.push(op),
            }
        }
        stages.retain(|stage| !stage.is_empty());
        stages
    }

    /// Returns the collective between the gangs of its ranks; none if that is one gang.
    fn between(&self, op: &CollectiveOp, devices: &[DeviceId]) -> Option<CollectiveOp> {
        let gang_of = |&rank: &u32| self.of[&devices[rank as usize].0];
        let gangs: Vec<u32> = op.devices.iter().map(gang_of).collect();
        let distinct: BTreeSet<u32> = gangs.iter().copied().collect();
        let places: BTreeMap<u32, usize> = distinct.iter().copied().zip(0..).collect();
        let (given, ranks) = (gangs.len(), places.len());
        let kind = match op.collective.kind() {
            CollectiveKind::AllToAll { sizes } => {
                let mut between = vec![0; ranks * ranks];
                for (pair, size) in sizes.iter().enumerate() {
                    let (source, target) = (gangs[pair / given], gangs[pair % given]);
                    if source != target {
                        between[places[&source] * ranks + places[&target]] += size;
                    }
                }
                CollectiveKind::AllToAll { sizes: between.into() }
            }
            &CollectiveKind::Broadcast { root } => {
                CollectiveKind::Broadcast { root: places[&gangs[root as usize]] as u32 }
            }
            &CollectiveKind::Reduce { root } => {
                CollectiveKind::Reduce { root: places[&gangs[root as usize]] as u32 }
            }
            kind => kind.clone(),
        };
        let collective = Collective::of_kind(kind, ranks as u32, op.collective.elements()).ok()?;
        let devices = distinct.into_iter().collect();
        (ranks > 1).then_some(CollectiveOp { collective, devices, ..*op })
    }
}

/// Returns two collectives of the same kind between the same devices as one.
fn joined(one: &CollectiveOp, other: &CollectiveOp) -> Option<CollectiveOp> {
    if one.devices != other.devices || one.element_bytes != other.element_bytes {
        return None;
    }
    let kind = match (one.collective.kind(), other.collective.kind()) {
        (CollectiveKind::AllToAll { sizes: one }, CollectiveKind::AllToAll { sizes: other }) => {
            let sizes: Arc<[u64]> = one.iter().zip(other.iter()).map(|(a, b)| a + b).collect();
            CollectiveKind::AllToAll { sizes }
        }
        (one, other) if one == other => one.clone(),
        _ => return None,
    };
    let elements = one.collective.elements() + other.collective.elements();
    let collective = Collective::of_kind(kind, one.collective.ranks(), elements).ok()?;
    Some(CollectiveOp { collective, ..one.clone() })
}

/// Returns the representative of a device's set; halves the path to it.
fn root(together: &mut BTreeMap<u32, u32>, mut device: u32) -> u32 {
    loop {
        let above = *together.entry(device).or_insert(device);
        if above == device {
            return device;
        }
        let next = together[&above];
        together.insert(device, next);
        device = next;
    }
}
