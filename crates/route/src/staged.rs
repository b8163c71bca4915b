//! A hierarchical all-reduce over the nodes of a Dragonfly in three hops, for small, latency-bound
//! tensors.
//!
//! First every chip sends its tensor to the others of its node, so that each has the node's sum. The
//! chips then send that over the links between nodes, and forward what they received to the others of
//! their node. Vectors are added as they arrive, so each stage begins one hop after the one before.
//!
//! Source: the multi-TSP system §5.6. Differs from the paper: where nodes are joined by several links,
//! each link carries a range of the tensor.

use base::{Address, Bytes, LinkId, Ticks, VertexId};
use smallvec::smallvec;
use topology::{Dragonfly, RotationalSymmetry};

use crate::layout::{Layout, RoutedCollective};
use crate::schedule::{Hop, RoutePlan, Schedule, Timing, Train, part};
use crate::task::{RouteTransfer, Task, Tasks};

/// Plans the all-reduce; `None` unless all nodes are joined directly and the tensor is not empty and
/// fits in memory three times.
///
/// The input is given twice: where it stays, and where sums accumulate, so that data do not change
/// while they are sent; data from other nodes are kept apart, and added when the result is read.
pub(crate) fn staged(
    dragonfly: &Dragonfly,
    tensor: Bytes,
    timing: Timing,
) -> Option<RoutedCollective> {
    let network = dragonfly.network();
    let vectors = timing.vectors(tensor);
    let is_held = 3 * vectors <= timing.buffer;
    let link = network.links().first()?;
    if dragonfly.groups() > 1 || vectors == 0 || !is_held {
        return None;
    }
    let nodes = dragonfly.nodes();
    let others = |node: u32| (0..nodes).filter(move |other| *other != node);
    let copies = others(0).map(|node| dragonfly.between_nodes(0, node).len()).min().unwrap_or(1);
    let (slot, hop) = (timing.slot(link), timing.hop(link));
    let mut stages = Stages {
        dragonfly,
        slot,
        hop,
        tasks: Vec::new(),
        schedule: Schedule { timing, trains: Vec::new(), ends: Vec::new() },
    };
    let [own, sums, far] = [0, 1, 2].map(|region| (region * vectors) as u32);
    let chips = network.endpoints() as usize;
    for copy in 0..copies {
        let range = part(vectors, copies as u64, copy as u64);
        let first = Ticks(range.start * slot.0);
        let part = |region: u32| Address(region + range.start as u32);
        let size = Bytes((range.end - range.start) * timing.vector.0);
        // Tasks that brought each chip its data in the stage before.
        let none = vec![Tasks::new(); chips];
        let near = stages.locally(&none, part(own), part(sums), size, first);
        if nodes == 1 {
            continue;
        }
        let mut came = none;
        for (node, other) in (0..nodes).flat_map(|node| others(node).map(move |to| (node, to))) {
            let link = dragonfly.between_nodes(node, other)[copy];
            let from = near[network.link(link).source.0 as usize].clone();
            let number = stages.send(link, from, part(sums), part(far), size, hop + first);
            came[network.link(link).target.0 as usize].push(number);
        }
        // Links inside nodes are free when the first stage has finished.
        let begin = (hop + hop).max(Ticks(vectors * slot.0)) + first;
        stages.locally(&came, part(far), part(sums), size, begin);
    }
    let results = if nodes == 1 { vec![Address(sums)] } else { vec![Address(sums), Address(far)] };
    let inputs = vec![Address(own), Address(sums)];
    let layout = Layout { shard: vectors, shards: 1, inputs, results };
    let plan = RoutePlan {
        circle: RotationalSymmetry::trivial(network),
        tasks: stages.tasks,
        schedule: stages.schedule,
    };
    Some(RoutedCollective { plan, layout })
}

struct Stages<'a> {
    dragonfly: &'a Dragonfly,
    slot: Ticks,
    hop: Ticks,
    tasks: Vec<Task>,
    schedule: Schedule,
}

impl Stages<'_> {
    /// Every chip sends the data it received to the others of its node; returns the tasks that bring
    /// each chip data. In the first stage chips send their own data.
    fn locally(
        &mut self,
        got: &[Tasks],
        read: Address,
        write: Address,
        size: Bytes,
        start: Ticks,
    ) -> Vec<Tasks> {
        let network = self.dragonfly.network();
        let is_first = got.iter().all(|tasks| tasks.is_empty());
        let mut came = vec![Tasks::new(); got.len()];
        for chip in (0..network.endpoints()).map(VertexId) {
            let from = &got[chip.0 as usize];
            if from.is_empty() && !is_first {
                continue;
            }
            let node = self.dragonfly.node_of(chip);
            let near = network.out_of(chip).iter().copied();
            for link in
                near.filter(|&link| self.dragonfly.node_of(network.link(link).target) == node)
            {
                let number = self.send(link, from.clone(), read, write, size, start);
                came[network.link(link).target.0 as usize].push(number);
            }
        }
        came
    }

    /// Adds a transfer that reduces into the other end of a link; returns its task number.
    fn send(
        &mut self,
        link: LinkId,
        from: Tasks,
        read: Address,
        write: Address,
        size: Bytes,
        start: Ticks,
    ) -> u32 {
        let number = self.tasks.len() as u32;
        let ends = self.dragonfly.network().link(link);
        let transfer = RouteTransfer::new(ends.source, ends.target, size);
        self.tasks.push(Task::Transfer(RouteTransfer {
            from,
            read,
            write,
            sums: true,
            ..transfer
        }));
        let count = self.schedule.timing.vectors(size);
        let hops = smallvec![Hop { link, start }];
        self.schedule.trains.push(Train { task: number, first: 0, count, hops });
        self.schedule.ends.push(start + self.hop + Ticks(count * self.slot.0));
        number
    }
}
