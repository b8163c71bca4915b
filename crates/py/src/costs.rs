//! Measured costs of channels, from Python.

use base::{BitsPerSecond, Nanos};
use cost::ChannelCost;
use plan::{SearchSpace, StopReason};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Rate, latency in nanoseconds, rate of sums, incast, and contention with each other channel.
pub(crate) type CostArguments = (f64, u64, f64, f64, Vec<f64>);

pub(crate) fn channel_costs(costs: Vec<CostArguments>) -> PyResult<Vec<ChannelCost>> {
    costs.into_iter().map(cost).collect()
}

fn cost((rate, latency, sums, incast, overlap): CostArguments) -> PyResult<ChannelCost> {
    let is_rate = |rate: f64| rate.is_finite() && rate > 0.0;
    let is_part = |part: &f64| (0.0..=100.0).contains(part);
    if !is_rate(rate) || !is_rate(sums) || !is_part(&incast) || !overlap.iter().all(is_part) {
        return Err(PyValueError::new_err(format!(
            "a channel of {rate} bit/s, {sums} bit/s of sums and an incast of {incast} that \
             overlaps others by {overlap:?} cannot be"
        )));
    }
    let (rate, sums) = (BitsPerSecond(rate), BitsPerSecond(sums));
    Ok(ChannelCost { rate, latency: Nanos(latency), sums, incast, overlap })
}

pub(crate) fn name_of(reason: StopReason) -> &'static str {
    match reason {
        StopReason::Exhausted => "all plans",
        StopReason::Evaluations => "limit reached",
        StopReason::Converged => "converged",
    }
}

/// Costs of the channels, and the numbers of segments that may be chosen.
pub(crate) fn channels_of(
    costs: Vec<CostArguments>,
    segments: Vec<u64>,
) -> PyResult<(Vec<ChannelCost>, SearchSpace)> {
    let costs = channel_costs(costs)?;
    if costs.is_empty() || segments.is_empty() || segments.contains(&0) {
        return Err(PyValueError::new_err("expected channels, and numbers of segments from 1 on"));
    }
    Ok((costs, SearchSpace { segments, ..SearchSpace::default() }))
}
