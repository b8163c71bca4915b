//! Checks of exchanges between groups, and the shapes that follow from them.

use crate::{
    ArraySpec, DType, Dims, Ends, Node, Partition, Program, ProgramError, Region, Side, Sparse,
    ValueId,
};

impl Sparse {
    /// Checks a node of this exchange and returns its shapes; `number` is the node's.
    ///
    /// # Errors
    /// The first value that is not valid.
    pub fn ends(&self, program: &Program, number: u32, node: &Node) -> Result<Ends, ProgramError> {
        let (taken, made) = self.widths();
        let count = |what, found: usize, each: usize| {
            let (found, expected) = (found as u32, each as u32);
            match found > 0 && found.is_multiple_of(expected) {
                true => Ok(()),
                false => Err(ProgramError::Count { node: number, what, found, expected }),
            }
        };
        count("arguments", node.args.len(), taken)?;
        count("results", node.results.len(), made)?;
        let args: Vec<u32> = node.args.iter().map(|arg| arg.0).collect();
        let results: Vec<u32> = node.results.clone().collect();
        let check = Check { program, node: number };
        match *self {
            Self::Dispatch { bins, credit, .. } => {
                let (rows, choices) = check.split(&args, taken);
                let (received, origins) = check.split(&results, made);
                let counts: Vec<u32> = results.chunks(made).map(|group| group[2]).collect();
                let source = check.side(&choices, Some(DType::S32), 2)?;
                let target = check.side(&origins, Some(DType::S32), 1)?;
                let k = check.dims(choices[0])[1];
                let tail = check.tail(received[0])?;
                let is_each = check.dims(rows[0]).len() == tail.len() + 2;
                let sent = if is_each { [&[k], &tail[..]].concat() } else { tail.clone() };
                check.like(&rows, &choices, source.rows, &sent)?;
                check.like(&received, &origins, target.rows, &tail)?;
                check.like(&counts, &origins, bins, &[])?;
                check.same_type(rows.iter().chain(&received))?;
                let ends = Ends { is_each, ..check.ends(source, target, k, received[0])? };
                let most = u64::from(source.shards).saturating_mul(u64::from(credit));
                check.that(origins[0], most <= u64::from(target.rows), "room for every credit")?;
                check.that(counts[0], bins > 0 && credit > 0, "at least one bin and one credit")?;
                Ok(ends)
            }
            Self::Collect => {
                let (rows, origins) = check.split(&args, taken);
                let target = check.side(&origins, Some(DType::S32), 1)?;
                let source = check.side(&results, None, 2)?;
                let tail = check.tail(rows[0])?;
                let k = check.dims(results[0])[1];
                check.like(&rows, &origins, target.rows, &tail)?;
                check.like(&results, &results, source.rows, &[&[k], &tail[..]].concat())?;
                check.same_type(rows.iter().chain(&results))?;
                check.ends(source, target, k, rows[0])
            }
            Self::Reduce => check.collective((&args, false), (&results, false)),
            Self::Gather => check.collective((&args, false), (&results, true)),
            Self::Scatter => check.collective((&args, true), (&results, false)),
        }
    }
}

struct Check<'a> {
    program: &'a Program,
    node: u32,
}

impl Check<'_> {
    fn that(&self, value: u32, holds: bool, expected: &'static str) -> Result<(), ProgramError> {
        match holds {
            true => Ok(()),
            false => Err(ProgramError::Sparse { node: self.node, value, expected }),
        }
    }

    fn value(&self, value: u32) -> &ArraySpec {
        self.program.value(ValueId(value))
    }

    fn dims(&self, value: u32) -> &[i64] {
        &self.value(value).dims
    }

    /// Returns the extents of each row.
    fn tail(&self, value: u32) -> Result<Vec<i64>, ProgramError> {
        let dims = self.dims(value);
        self.that(value, !dims.is_empty(), "rows")?;
        Ok(dims[1..].to_vec())
    }

    /// Returns the first and the second value of each group.
    fn split(&self, values: &[u32], width: usize) -> (Vec<u32>, Vec<u32>) {
        values.chunks(width).map(|group| (group[0], group[1])).unzip()
    }

    /// Returns the shards of a side's groups, which must hold equal parts of the first axis, in device
    /// order.
    fn side(
        &self,
        groups: &[u32],
        dtype: Option<DType>,
        rank: usize,
    ) -> Result<Side, ProgramError> {
        let mut side = Side { shards: 0, rows: 0 };
        for &value in groups {
            let spec = self.value(value);
            let found = spec.dims.len();
            let has_rank = if dtype.is_some() { found == rank } else { found >= rank };
            self.that(value, has_rank, "as many axes as a sparse exchange has there")?;
            let is_known = dtype.is_none_or(|dtype| spec.dtype == dtype);
            self.that(value, is_known, "32-bit integers")?;
            let shards = spec.sharding.devices.len() as i64;
            let is_cut = is_cut_by_device(spec);
            self.that(value, is_cut, "equal parts of the first axis, one each device in order")?;
            let rows = spec.dims[0] / shards;
            let fits = rows > 0 && rows <= i64::from(i32::MAX) && rows * shards == spec.dims[0];
            self.that(value, fits, "equal parts of the first axis, one each device in order")?;
            let is_same = side.shards == 0 || i64::from(side.rows) == rows;
            self.that(value, is_same, "as many rows a device as the first group has")?;
            let shards = side.shards.saturating_add(shards as u32);
            side = Side { shards, rows: rows as u32 };
        }
        Ok(side)
    }

    /// Checks that values are partitioned like `others`, with `rows` per shard and row shape `tail`.
    fn like(
        &self,
        values: &[u32],
        others: &[u32],
        rows: u32,
        tail: &[i64],
    ) -> Result<(), ProgramError> {
        for (&value, &other) in values.iter().zip(others) {
            let (spec, other) = (self.value(value), self.value(other));
            let shards = spec.sharding.devices.len() as i64;
            let is_there =
                spec.sharding.devices == other.sharding.devices && is_cut_by_device(spec);
            self.that(value, is_there, "the cut of the rest of its group")?;
            let is_shaped =
                spec.dims.first() == Some(&(shards * i64::from(rows))) && &spec.dims[1..] == tail;
            self.that(value, is_shaped, "the shape that the other values ask for")?;
        }
        Ok(())
    }

    fn same_type<'v>(
        &self,
        mut values: impl Iterator<Item = &'v u32> + Clone,
    ) -> Result<(), ProgramError> {
        let first = values.clone().next().map(|&value| self.value(value).dtype);
        values.try_for_each(|&value| {
            self.that(value, Some(self.value(value).dtype) == first, "one type of all rows")
        })
    }

    /// Checks a collective over groups; a stacked value has an additional first axis, with an entry for
    /// each group. In the result, each side has one shard per device, `rows` is the number of distinct
    /// shards of a group, and `choices` the number of groups.
    fn collective(
        &self,
        (args, are_args_stacked): (&[u32], bool),
        (results, are_results_stacked): (&[u32], bool),
    ) -> Result<Ends, ProgramError> {
        let groups = args.len();
        self.that(args[0], groups == results.len(), "as many results as arguments")?;
        let first = self.value(if are_args_stacked { results[0] } else { args[0] });
        let devices = first.sharding.devices.len();
        self.that(args[0], devices > 0, "devices")?;
        let stacked = |dims: &[i64], leading: i64| -> Dims {
            std::iter::once(leading).chain(dims.iter().copied()).collect()
        };
        for (&arg, &result) in args.iter().zip(results) {
            let (given, made) = (self.value(arg), self.value(result));
            let is_there = given.sharding.devices == made.sharding.devices;
            self.that(result, is_there, "the devices of its argument")?;
            for (value, spec, is_stacked) in
                [(arg, given, are_args_stacked), (result, made, are_results_stacked)]
            {
                let count = groups as i64;
                let dims =
                    if is_stacked { stacked(&first.dims, count) } else { first.dims.clone() };
                let is_alike = spec.dtype == first.dtype && spec.dims == dims;
                self.that(value, is_alike, "the shape and type of what the first group has")?;
                let has_devices = spec.sharding.devices.len() == devices;
                self.that(value, has_devices, "as many devices as the first group has")?;
                let is_cut = (0..devices).all(|at| {
                    let wanted = first.sharding.region(&first.dims, at).map(|region| {
                        if is_stacked {
                            let start = stacked(&region.start, 0);
                            Region { start, size: stacked(&region.size, count) }
                        } else {
                            region
                        }
                    });
                    spec.sharding.region(&spec.dims, at) == wanted
                });
                self.that(value, is_cut, "the cut of what the first group has")?;
            }
        }
        let rows = if first.sharding.is_replicated() { 1 } else { devices as u32 };
        let side = Side { shards: devices.saturating_mul(groups) as u32, rows };
        let row_bytes = self.value(args[0]).shard_bytes(0).0;
        let choices = groups as u32;
        Ok(Ends { source: side, target: side, choices, row_bytes, is_each: false })
    }

    /// Combines the sides of a dispatch or collect; `rows` is the row value of a target group.
    fn ends(&self, source: Side, target: Side, k: i64, rows: u32) -> Result<Ends, ProgramError> {
        let choices = i128::from(source.shards) * i128::from(source.rows) * i128::from(k);
        let fits = k > 0 && choices <= i128::from(i32::MAX);
        self.that(rows, fits, "choices that 32 bits can count")?;
        let row_bytes = self.value(rows).shard_bytes(0).0 / u64::from(target.rows);
        Ok(Ends { source, target, choices: k as u32, row_bytes, is_each: true })
    }
}

/// Whether each device holds the part of the first axis at its own index in the device list.
fn is_cut_by_device(spec: &ArraySpec) -> bool {
    if spec.sharding.devices.len() == 1 {
        return spec.sharding.is_replicated();
    }
    let Partition::Tiled { counts, tile_of } = &spec.sharding.partition else { return false };
    let is_first_axis = counts.iter().skip(1).all(|&count| count == 1);
    counts.first() == Some(&(spec.sharding.devices.len() as i64))
        && !spec.sharding.devices.is_empty()
        && is_first_axis
        && tile_of.iter().copied().eq(0..tile_of.len() as u32)
}
