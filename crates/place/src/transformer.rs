//! Predicts the step time of a transformer under a parallelism strategy, from the computation, memory
//! traffic and communication of each layer.
//!
//! A layer takes as long as its matrix products, its other memory traffic and its communication in
//! tensor and expert groups; or as long as its host takes to launch it, whichever is more. Pipeline
//! stages alternate forward and backward microbatches (1F1B).
//!
//! Source: sizes of products and of what is kept, Narayanan et al. 2021 (arXiv:2104.04473) §5.1 and
//! Korthikanti et al. 2022 (arXiv:2205.05198) §4; the constants are fitted, see [`Accelerator`].

use base::{BitsPerSecond, Bytes, Nanos};
use cost::{ClosedForm, Reached};
use ir::CollectiveError;
use thiserror::Error;

/// Bytes of a 16-bit number.
const NUMBER: f64 = 2.0;
/// Bytes per parameter on its device: itself in 16 bits, its gradient in 32, and Adam's master copy and
/// two moments in 32.
const PER_PARAMETER: f64 = 18.0;
/// Bytes per parameter of the gradients that are all-reduced.
pub(crate) const PER_GRADIENT: f64 = 4.0;
/// Bytes per parameter that a step of Adam reads and writes.
const PER_UPDATE: f64 = 16.0;
/// The fused softmax requires a multiple of this many rows of heads and samples.
///
/// Source: Megatron-LM, the check of its fused kernels.
const FUSED: u32 = 4;

/// Dimensions of a transformer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transformer {
    /// Number of layers.
    pub layers: u32,
    /// Hidden size.
    pub hidden: u32,
    /// Number of attention heads.
    pub heads: u32,
    /// Sequence length: tokens of a sample.
    pub sequence: u32,
    /// Vocabulary size.
    pub vocabulary: u32,
    /// Experts per layer; 1 for a dense model.
    pub experts: u32,
    /// Experts to which each token is routed.
    pub active: u32,
}

impl Transformer {
    /// A dense model, with one expert.
    pub fn dense(layers: u32, hidden: u32, heads: u32, sequence: u32, vocabulary: u32) -> Self {
        Self { layers, hidden, heads, sequence, vocabulary, experts: 1, active: 1 }
    }

    /// Returns the number of parameters.
    ///
    /// ```
    /// use place::Transformer;
    /// let gpt3 = Transformer::dense(96, 12_288, 96, 2048, 51_200);
    /// assert!((gpt3.parameters() / 175e9 - 1.0).abs() < 0.01);
    /// ```
    pub fn parameters(&self) -> f64 {
        f64::from(self.layers) * self.of_layer(1.0) + self.of_embedding()
    }

    /// Parameters of a layer on one device, with experts spread over `spread` devices.
    fn of_layer(&self, spread: f64) -> f64 {
        let square = f64::from(self.hidden).powi(2);
        square * (4.0 + 8.0 * f64::from(self.experts) / spread)
    }

    fn of_embedding(&self) -> f64 {
        f64::from(self.vocabulary) * f64::from(self.hidden)
    }
}

/// A parallelism strategy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Parallelism {
    /// Data parallelism: copies that take different samples.
    pub data: u32,
    /// Tensor parallelism: devices that share every layer.
    pub tensor: u32,
    /// Pipeline parallelism: number of stages.
    pub pipeline: u32,
    /// Expert parallelism: copies among which experts are spread.
    pub expert: u32,
    /// Samples of a microbatch, per copy.
    pub micro_batch: u32,
    /// Global batch size: samples of a step, over all copies.
    pub batch: u32,
    /// Whether activations are recomputed in the backward pass instead of kept.
    pub recomputes: bool,
}

impl Parallelism {
    /// Returns the number of devices.
    pub fn devices(&self) -> u32 {
        self.data * self.tensor * self.pipeline
    }

    /// Passes of a layer relative to those without recomputation: forward counts one, backward two,
    /// and recomputation one more.
    pub(crate) fn passes_again(&self) -> f64 {
        if self.recomputes { 4.0 / 3.0 } else { 1.0 }
    }

    /// Returns the number of microbatches of a step, per copy.
    pub fn micro_batches(&self) -> u32 {
        self.batch / (self.data * self.micro_batch)
    }
}

/// Why a model cannot be split by a strategy.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum TransformerError {
    /// A number is not a multiple of another.
    #[error("{what} is {found}; expected a multiple of {of}")]
    Multiple {
        /// Name of the number.
        what: &'static str,
        /// Its value.
        found: u32,
        /// The divisor.
        of: u32,
    },
    /// A number is 0.
    #[error("{what} is 0; expected at least 1")]
    None {
        /// Name of the number.
        what: &'static str,
    },
    /// The step of a strategy has too many nodes.
    #[error("a step has {found} nodes; expected at most {most}")]
    Nodes {
        /// Number of nodes.
        found: u64,
        /// The maximum.
        most: u64,
    },
    /// A collective of a step is too large.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The model does not fit in memory.
    #[error("a device needs {needed}; it has {has}. Try more stages, or more devices a layer")]
    Memory {
        /// Memory that each device needs.
        needed: Bytes,
        /// Memory that it has.
        has: Bytes,
    },
}

/// A device. Rates are those of data sheets; the other constants are fitted.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Accelerator {
    /// Peak FLOP/s of 16-bit matrix products.
    pub flops: f64,
    /// Memory bandwidth.
    pub memory_rate: BitsPerSecond,
    /// Memory capacity.
    pub memory: Bytes,
    /// Fraction of the peak that infinitely large products reach.
    pub efficiency: f64,
    /// Hidden size at which products reach half of that.
    pub narrow: f64,
    /// Memory traffic of activations between products, relative to the minimum.
    pub passes: f64,
    /// Memory traffic of attention weights, relative to the minimum.
    pub weights_passes: f64,
    /// Time in which a host launches a layer forward and backward.
    pub launch: Nanos,
    /// Straggler effect: relative increase of `launch` for each doubling of the devices that
    /// synchronize.
    pub straggle: f64,
    /// Added launch time where softmax is not fused.
    pub unfused: Nanos,
    /// Slowdown of all-reduces relative to the time that they take alone.
    pub reduces: f64,
    /// Slowdown of the output layer (logits and loss) relative to its products.
    pub head: f64,
    /// Slowdown of parameter updates relative to their memory traffic.
    pub update: f64,
    /// Fixed overhead of a microbatch.
    pub overhead: Nanos,
    /// How sharply the longer of the execution and the launch of a layer hides the shorter (overlap):
    /// the exponent of the p-norm that combines them.
    pub sharpness: f64,
}

/// Predicted time of a step, and its parts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepTime {
    /// Total time of the step.
    pub total: Nanos,
    /// One microbatch through a layer, forward and backward.
    pub layer: Nanos,
    /// Communication within `layer`.
    pub communication: Nanos,
    /// Pipeline bubble: filling and draining.
    pub bubble: Nanos,
    /// All-reduce of gradients, exposed after the last microbatch.
    pub gradients: Nanos,
    /// Updates of parameters.
    pub updates: Nanos,
    /// Memory of each device.
    pub memory: Bytes,
}

/// Predicts the step time of a model under a strategy.
///
/// # Arguments
/// - `reaches`: fraction of the rates between servers that is reached.
///
/// # Errors
/// The strategy does not divide the model, or the model does not fit in memory.
pub fn step_time(
    model: &Transformer,
    accelerator: &Accelerator,
    links: &ClosedForm,
    reaches: f64,
    cut: &Parallelism,
) -> Result<StepTime, TransformerError> {
    check(model, cut)?;
    let memory = memory(model, cut);
    if memory > accelerator.memory {
        return Err(TransformerError::Memory { needed: memory, has: accelerator.memory });
    }
    let links = Reached { links, part: reaches };
    let parts = Parts::new(model, accelerator, &links, cut);
    let seconds = |value: f64| Nanos((value * 1e9) as u64);
    let (stages, micro_batches) = (f64::from(cut.pipeline), f64::from(cut.micro_batches()));
    let layers = f64::from(model.layers) / stages * parts.layer;
    let stage = layers + parts.passed_on;
    // The last stage computes logits instead of sending activations on.
    let slowest = stage.max(layers + parts.head) + accelerator.overhead.0 as f64 / 1e9;
    let bubble = (stages - 1.0) * stage;
    let total = micro_batches * slowest + bubble + parts.gradients + parts.updates;
    Ok(StepTime {
        total: seconds(total),
        layer: seconds(parts.layer),
        communication: seconds(parts.communication),
        bubble: seconds(bubble),
        gradients: seconds(parts.gradients),
        updates: seconds(parts.updates),
        memory,
    })
}

pub(crate) fn check(model: &Transformer, cut: &Parallelism) -> Result<(), TransformerError> {
    let counts = [
        ("data parallelism", cut.data),
        ("tensor parallelism", cut.tensor),
        ("pipeline parallelism", cut.pipeline),
        ("expert parallelism", cut.expert),
        ("the micro batch", cut.micro_batch),
        ("the batch", cut.batch),
        ("the number of layers", model.layers),
        ("the hidden size", model.hidden),
        ("the number of heads", model.heads),
        ("the sequence", model.sequence),
        ("the vocabulary", model.vocabulary),
        ("the number of experts", model.experts),
        ("the number of experts that a token visits", model.active),
    ];
    if let Some(&(what, _)) = counts.iter().find(|(_, count)| *count == 0) {
        return Err(TransformerError::None { what });
    }
    let multiples = [
        ("the batch", cut.batch, cut.data.saturating_mul(cut.micro_batch)),
        ("the number of layers", model.layers, cut.pipeline),
        ("the number of heads", model.heads, cut.tensor),
        ("data parallelism", cut.data, cut.expert),
        ("the number of experts", model.experts, cut.expert),
    ];
    match multiples.iter().find(|(_, found, of)| found % of != 0) {
        Some(&(what, found, of)) => Err(TransformerError::Multiple { what, found, of }),
        None => Ok(()),
    }
}

/// Memory of each device at the peak of microbatches in flight.
fn memory(model: &Transformer, cut: &Parallelism) -> Bytes {
    let layers = f64::from(model.layers) / f64::from(cut.pipeline);
    let tensor = f64::from(cut.tensor);
    let own = layers * model.of_layer(f64::from(cut.expert)) + model.of_embedding();
    let rows = f64::from(cut.micro_batch) * f64::from(model.sequence);
    let hidden = f64::from(model.hidden);
    let weights = 5.0 * f64::from(model.heads) * f64::from(model.sequence) / hidden;
    let of_layer = rows * hidden * (10.0 + (24.0 + weights) / tensor);
    let begun = f64::from(cut.pipeline.min(cut.micro_batches()));
    let kept = if cut.recomputes {
        begun * layers * NUMBER * rows * hidden + of_layer
    } else {
        begun * layers * of_layer
    };
    Bytes((own / tensor * PER_PARAMETER + kept) as u64)
}

/// Seconds of the parts of a step.
pub(crate) struct Parts {
    pub layer: f64,
    communication: f64,
    pub head: f64,
    passed_on: f64,
    gradients: f64,
    pub updates: f64,
    /// Parameters of a device.
    pub own: f64,
    /// Bytes that each device has for an all-reduce of a layer, and for an all-to-all.
    pub sizes: [f64; 2],
}

impl Parts {
    pub fn new(
        model: &Transformer,
        with: &Accelerator,
        links: &Reached<'_>,
        cut: &Parallelism,
    ) -> Self {
        let (hidden, sequence) = (f64::from(model.hidden), f64::from(model.sequence));
        let (tensor, samples) = (f64::from(cut.tensor), f64::from(cut.micro_batch));
        let rows = samples * sequence;
        let active = f64::from(model.active);
        let bytes_s = with.memory_rate.0 / 8.0;
        let again = cut.passes_again();
        let flops_s = with.flops * with.efficiency / (1.0 + with.narrow / hidden);
        let square = rows * hidden * hidden;
        let products = square * (24.0 + 48.0 * active) + 12.0 * rows * sequence * hidden;
        let between = NUMBER * rows * hidden * (12.0 + 24.0 / tensor) * with.passes;
        let weights = NUMBER * f64::from(model.heads) / tensor * rows * sequence;
        let read = between + weights * with.weights_passes;
        let size = NUMBER * rows * hidden;
        let communication = again
            * (links.reduce_s(cut.tensor, size) * 4.0 * with.reduces
                + links.exchange_s(cut.tensor, cut.expert, size * active) * 4.0);
        let computed = again * (products / tensor / flops_s + read / bytes_s);
        let is_fused = (model.heads / cut.tensor * cut.micro_batch).is_multiple_of(FUSED);
        let seconds = |time: Nanos| time.0 as f64 / 1e9;
        let straggle = 1.0 + with.straggle * tensor.log2();
        let unfused = if is_fused { 0.0 } else { seconds(with.unfused) };
        let launched = again * (seconds(with.launch) * straggle + unfused);
        let sharp = with.sharpness;
        let layer =
            ((computed + communication).powf(sharp) + launched.powf(sharp)).powf(1.0 / sharp);
        let tokens = rows * f64::from(model.vocabulary) / tensor;
        let head = 6.0 * tokens * hidden / (with.flops * with.efficiency) * with.head
            + 6.0 * NUMBER * tokens * with.passes / bytes_s;
        let layers = f64::from(model.layers) / f64::from(cut.pipeline);
        let shared = layers * model.of_layer(f64::from(cut.expert));
        let own = (shared + model.of_embedding()) / tensor;
        Self {
            layer,
            communication,
            head,
            passed_on: if cut.pipeline > 1 {
                2.0 * links.pass_s(cut.tensor * cut.data, cut.pipeline, size / tensor)
            } else {
                0.0
            },
            gradients: links.apart_s(cut.tensor, cut.data, own * PER_GRADIENT),
            updates: own * PER_UPDATE * with.update / bytes_s,
            own,
            sizes: [size, size * active],
        }
    }
}
