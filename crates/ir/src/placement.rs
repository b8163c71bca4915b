//! Placements: the device of a topology on which each device of a step is.

use std::sync::Arc;

use thiserror::Error;

use crate::step::{CollectiveOp, Devices, StepGraph, StepNode, StepOp};

/// Where the devices of a step are.
///
/// ```
/// use base::{Bytes, Nanos};
/// use ir::{Placement, StepGraph, StepOp};
/// let mut step = StepGraph::new("train", 2);
/// step.add("send", StepOp::Transfer { source: 0, target: 1, size: Bytes(64) }, &[]);
/// let placement = Placement::new("train", "torus:2x2", vec![3, 1]);
/// let placed = placement.apply(&step, 4).unwrap();
/// assert_eq!(placed.op(0), &StepOp::Transfer { source: 3, target: 1, size: Bytes(64) });
/// assert_eq!(Placement::parse(&placement.to_string()).unwrap(), placement);
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    /// Name of the step.
    pub step: String,
    /// Name of the topology.
    pub topology: String,
    /// By device of the step, its device of the topology.
    pub devices: Vec<u32>,
}

/// Why a placement does not fit a step or a topology.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum PlacementError {
    /// The numbers of devices differ.
    #[error("a placement of {found} devices is not one of a step of {devices} devices")]
    Devices {
        /// Devices that are placed.
        found: usize,
        /// Devices of the step.
        devices: u32,
    },
    /// The step has more devices than the topology.
    #[error("the step is of {found} devices; the topology has {devices}")]
    Full {
        /// Devices of the step.
        found: u32,
        /// Devices of the topology.
        devices: u32,
    },
    /// The step describes one of several parts.
    #[error("the step stands for {parts} parts; expected a step of all devices")]
    Parts {
        /// Number of parts.
        parts: u32,
    },
    /// A device of the topology does not exist.
    #[error("device {device} is placed on {found}; the topology has {devices} devices")]
    Range {
        /// Device of the step.
        device: u32,
        /// Where it is placed.
        found: u32,
        /// Devices of the topology.
        devices: u32,
    },
    /// Two devices of a step are on one device.
    #[error("devices {one} and {other} are both placed on {found}; expected one on each")]
    Twice {
        /// A device of the step.
        one: u32,
        /// Another.
        other: u32,
        /// Where both are.
        found: u32,
    },
}

impl Placement {
    /// Creates a placement.
    pub fn new(
        step: impl Into<String>,
        topology: impl Into<String>,
        devices: impl Into<Vec<u32>>,
    ) -> Self {
        Self { step: step.into(), topology: topology.into(), devices: devices.into() }
    }

    /// Checks that the placement is one of this step on a topology of `devices` devices.
    ///
    /// # Errors
    /// The first violation found.
    pub fn verify(&self, step: &StepGraph, devices: u32) -> Result<(), PlacementError> {
        if step.parts != 1 {
            return Err(PlacementError::Parts { parts: step.parts });
        }
        if self.devices.len() != step.devices as usize {
            let (found, devices) = (self.devices.len(), step.devices);
            return Err(PlacementError::Devices { found, devices });
        }
        if step.devices > devices {
            return Err(PlacementError::Full { found: step.devices, devices });
        }
        let mut on = vec![None; devices as usize];
        for (device, &found) in (0..).zip(&self.devices) {
            match on.get_mut(found as usize) {
                None => return Err(PlacementError::Range { device, found, devices }),
                Some(Some(one)) => {
                    return Err(PlacementError::Twice { one: *one, other: device, found });
                }
                Some(free) => *free = Some(device),
            }
        }
        Ok(())
    }

    /// Returns the step on the devices of a topology that has `devices` devices.
    ///
    /// # Errors
    /// As [`Self::verify`].
    pub fn apply(&self, step: &StepGraph, devices: u32) -> Result<StepGraph, PlacementError> {
        self.verify(step, devices)?;
        let mut placed = StepGraph::new(step.name.clone(), devices);
        let at = |device: u32| self.devices[device as usize];
        let all = |devices: &Devices| -> Devices { devices.iter().map(|&one| at(one)).collect() };
        for (number, node) in (0..).zip(step.nodes()) {
            let op = match &node.op {
                StepOp::Compute { devices, time } => StepOp::compute(all(devices), *time),
                &StepOp::Transfer { source, target, size } => {
                    StepOp::Transfer { source: at(source), target: at(target), size }
                }
                StepOp::Collective(op) => StepOp::Collective(Box::new(CollectiveOp {
                    devices: all(&op.devices),
                    ..CollectiveOp::clone(op)
                })),
            };
            let (name, priority) = (Arc::clone(&node.name), node.priority);
            placed.add_node(StepNode { name, op, priority }, step.dependencies(number));
        }
        Ok(placed)
    }
}
