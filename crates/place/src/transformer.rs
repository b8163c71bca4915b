//! How long a step of a transformer takes that is cut over a machine, by what each layer computes,
//! reads and tells others.
//!
//! A layer takes as long as its products, what it reads and writes besides, and what it tells the
//! devices that share it; or as long as its host takes to launch all of that, whichever is more.
//! Stages of a pipeline take turns with microbatches, one forward and one backward (1F1B).
//!
//! Source: sizes of products and of what is kept, Narayanan et al. 2021 (arXiv:2104.04473) §5.1 and
//! Korthikanti et al. 2022 (arXiv:2205.05198) §4; the constants are fitted, see [`Accelerator`].

use base::{BitsPerSecond, Bytes, Nanos};
use thiserror::Error;

use crate::links::{Links, Reached};

/// Bytes of a number that is computed with.
const NUMBER: f64 = 2.0;
/// Bytes of each parameter on its device: itself and its gradient in 16 and 32 bits, and what Adam
/// keeps in 32.
const PER_PARAMETER: f64 = 18.0;
/// Bytes of each parameter's gradient that devices with the same parameters tell each other.
const PER_GRADIENT: f64 = 4.0;
/// Bytes of each parameter that a step of Adam reads and writes.
const PER_UPDATE: f64 = 16.0;
/// Rows of heads and samples that a fused softmax takes at a time.
///
/// Source: Megatron-LM, the check of its fused kernels.
const FUSED: u32 = 4;

/// What a transformer is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transformer {
    /// How many layers.
    pub layers: u32,
    /// Numbers of each token.
    pub hidden: u32,
    /// Heads of attention.
    pub heads: u32,
    /// Tokens of a sample.
    pub sequence: u32,
    /// Different tokens.
    pub vocabulary: u32,
    /// Experts of every layer; 1 where there is no choice.
    pub experts: u32,
    /// Experts that a token visits.
    pub active: u32,
}

impl Transformer {
    /// One whose tokens all visit the same.
    pub fn dense(layers: u32, hidden: u32, heads: u32, sequence: u32, vocabulary: u32) -> Self {
        Self { layers, hidden, heads, sequence, vocabulary, experts: 1, active: 1 }
    }

    /// All parameters.
    ///
    /// ```
    /// use place::Transformer;
    /// let gpt3 = Transformer::dense(96, 12_288, 96, 2048, 51_200);
    /// assert!((gpt3.parameters() / 175e9 - 1.0).abs() < 0.01);
    /// ```
    pub fn parameters(&self) -> f64 {
        f64::from(self.layers) * self.of_layer(1.0) + self.of_embedding()
    }

    /// Parameters of a layer, of whose experts so many devices have a part each.
    fn of_layer(&self, spread: f64) -> f64 {
        let square = f64::from(self.hidden).powi(2);
        square * (4.0 + 8.0 * f64::from(self.experts) / spread)
    }

    fn of_embedding(&self) -> f64 {
        f64::from(self.vocabulary) * f64::from(self.hidden)
    }
}

/// How it is cut.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Parallelism {
    /// Copies that take different samples.
    pub data: u32,
    /// Devices that share every layer.
    pub tensor: u32,
    /// Stages.
    pub pipeline: u32,
    /// Copies among which experts are spread.
    pub expert: u32,
    /// Samples of a copy that go through the stages at a time.
    pub micro_batch: u32,
    /// Samples of a step, of all copies.
    pub batch: u32,
    /// Whether what is needed backward is computed again instead of kept.
    pub recomputes: bool,
}

impl Parallelism {
    /// How many devices it takes.
    pub fn devices(&self) -> u32 {
        self.data * self.tensor * self.pipeline
    }

    /// Microbatches of a step.
    pub fn micro_batches(&self) -> u32 {
        self.batch / (self.data * self.micro_batch)
    }
}

/// What cannot be cut that way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum TransformerError {
    /// A number that is no multiple of another.
    #[error("{what} is {found}; expected a multiple of {of}")]
    Multiple {
        /// Of what.
        what: &'static str,
        /// How much there is.
        found: u32,
        /// What it is divided by.
        of: u32,
    },
    /// Nothing of something.
    #[error("{what} is 0; expected at least 1")]
    None {
        /// Of what.
        what: &'static str,
    },
    /// It does not fit.
    #[error("a device needs {needed}; it has {has}. Try more stages, or more devices a layer")]
    Memory {
        /// By each device.
        needed: Bytes,
        /// What one has.
        has: Bytes,
    },
}

/// What computes. Rates are those of data sheets; the rest is fitted.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Accelerator {
    /// Operations a second, of products of 16-bit numbers.
    pub flops: f64,
    /// What its memory moves.
    pub memory_rate: BitsPerSecond,
    /// How much memory it has.
    pub memory: Bytes,
    /// The part of all operations that endless products reach.
    pub efficiency: f64,
    /// Hidden numbers at which products reach half of that.
    pub narrow: f64,
    /// How often what tokens are is read or written between products, of what must be.
    pub passes: f64,
    /// How often attention's weights are.
    pub weights_passes: f64,
    /// What a host takes to launch a layer forward and backward, and what part more it takes each
    /// time that twice as many devices wait for each other.
    pub launch: Nanos,
    /// See there.
    pub straggle: f64,
    /// What it takes besides where softmax is not fused.
    pub unfused: Nanos,
    /// What all-reduces take, of what they take alone.
    pub reduces: f64,
    /// What the choice of tokens takes, of what its products should.
    pub head: f64,
    /// What updates take, of what memory should.
    pub update: f64,
    /// What a microbatch takes besides.
    pub overhead: Nanos,
    /// How sharply what is more hides what is less: the power of the mean of what a layer takes and
    /// what its launches take.
    pub sharpness: f64,
}

/// What a step takes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepTime {
    /// All of it.
    pub total: Nanos,
    /// A microbatch through a layer, forward and backward.
    pub layer: Nanos,
    /// The part of that in which devices tell each other.
    pub told: Nanos,
    /// Waiting for a pipeline to fill and to empty.
    pub bubble: Nanos,
    /// Gradients, all told after the last microbatch.
    pub gradients: Nanos,
    /// Updates of parameters.
    pub updates: Nanos,
    /// Memory of each device.
    pub memory: Bytes,
}

/// What a step of a model takes that is cut so.
///
/// # Arguments
/// - `reaches`: the part of rates between servers that is reached.
///
/// # Errors
/// It cannot be cut so, or does not fit.
pub fn step_time(
    model: &Transformer,
    accelerator: &Accelerator,
    links: &Links,
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
    // The last stage chooses tokens instead of passing on.
    let slowest = stage.max(layers + parts.head) + accelerator.overhead.0 as f64 / 1e9;
    let bubble = (stages - 1.0) * stage;
    let total = micro_batches * slowest + bubble + parts.gradients + parts.updates;
    Ok(StepTime {
        total: seconds(total),
        layer: seconds(parts.layer),
        told: seconds(parts.told),
        bubble: seconds(bubble),
        gradients: seconds(parts.gradients),
        updates: seconds(parts.updates),
        memory,
    })
}

fn check(model: &Transformer, cut: &Parallelism) -> Result<(), TransformerError> {
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

/// What each device keeps, when it has begun as many microbatches as it ever has at a time.
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

/// Seconds of what a step consists of.
struct Parts {
    layer: f64,
    told: f64,
    head: f64,
    passed_on: f64,
    gradients: f64,
    updates: f64,
}

impl Parts {
    fn new(
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
        // Forward is one, backward two, and forward again one more.
        let again = if cut.recomputes { 4.0 / 3.0 } else { 1.0 };
        let flops_s = with.flops * with.efficiency / (1.0 + with.narrow / hidden);
        let square = rows * hidden * hidden;
        let products = square * (24.0 + 48.0 * active) + 12.0 * rows * sequence * hidden;
        let between = NUMBER * rows * hidden * (12.0 + 24.0 / tensor) * with.passes;
        let weights = NUMBER * f64::from(model.heads) / tensor * rows * sequence;
        let read = between + weights * with.weights_passes;
        let size = NUMBER * rows * hidden;
        let told = again
            * (links.reduce_s(cut.tensor, size) * 4.0 * with.reduces
                + links.exchange_s(cut.tensor, cut.expert, size * active) * 4.0);
        let computed = again * (products / tensor / flops_s + read / bytes_s);
        let is_fused = (model.heads / cut.tensor * cut.micro_batch).is_multiple_of(FUSED);
        let seconds = |time: Nanos| time.0 as f64 / 1e9;
        let straggle = 1.0 + with.straggle * tensor.log2();
        let unfused = if is_fused { 0.0 } else { seconds(with.unfused) };
        let launched = again * (seconds(with.launch) * straggle + unfused);
        let sharp = with.sharpness;
        let layer = ((computed + told).powf(sharp) + launched.powf(sharp)).powf(1.0 / sharp);
        let tokens = rows * f64::from(model.vocabulary) / tensor;
        let head = 6.0 * tokens * hidden / (with.flops * with.efficiency) * with.head
            + 6.0 * NUMBER * tokens * with.passes / bytes_s;
        let layers = f64::from(model.layers) / f64::from(cut.pipeline);
        let shared = layers * model.of_layer(f64::from(cut.expert));
        let own = (shared + model.of_embedding()) / tensor;
        Self {
            layer,
            told,
            head,
            passed_on: if cut.pipeline > 1 {
                2.0 * links.pass_s(cut.tensor * cut.data, cut.pipeline, size / tensor)
            } else {
                0.0
            },
            gradients: links.apart_s(cut.tensor, cut.data, own * PER_GRADIENT),
            updates: own * PER_UPDATE * with.update / bytes_s,
        }
    }
}
