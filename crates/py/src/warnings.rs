//! What the compiled half has to say, which no caller waits for: lines for the owner's logs.

use std::fmt::{Debug, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::Registry;

/// Most lines that wait to be taken; the event that has one more does not wait.
const WAITING_MAX: usize = 256;
/// Most lines within a period; further ones are counted.
const LINES_MAX: u64 = 20;
const PERIOD: Duration = Duration::from_secs(60);

static SINKS: Mutex<Sinks> = Mutex::new(Sinks { open: Vec::new(), last: 0, printer: None });
static LIMIT: Mutex<Limit> = Mutex::new(Limit { period: None, count: 0 });

/// Who takes lines; a thread that prints them to standard error if there are none.
struct Sinks {
    open: Vec<(u64, SyncSender<String>)>,
    last: u64,
    printer: Option<SyncSender<String>>,
}

impl Sinks {
    fn send(&mut self, line: &str) {
        // Lines that do not fit are lost: what says them must not wait.
        if self.open.is_empty() {
            let printer = self.printer.get_or_insert_with(|| {
                let (sender, lines) = sync_channel(WAITING_MAX);
                std::thread::spawn(move || print(&lines));
                sender
            });
            drop(printer.try_send(line.to_owned()));
        }
        for (_, sender) in &self.open {
            drop(sender.try_send(line.to_owned()));
        }
    }
}

fn print(lines: &Receiver<String>) {
    while let Ok(line) = lines.recv() {
        eprintln!("fairway: {line}");
    }
}

/// Limits the number of lines: others can cause them, such as strangers that connect.
struct Limit {
    period: Option<Instant>,
    count: u64,
}

impl Limit {
    /// Counts a line; returns whether it is within the limit, and how many were not before it.
    fn admit(&mut self, now: Instant) -> (bool, u64) {
        let mut before = 0;
        if self.period.is_none_or(|begun| now.duration_since(begun) >= PERIOD) {
            before = self.count.saturating_sub(LINES_MAX);
            (self.period, self.count) = (Some(now), 0);
        }
        self.count += 1;
        (self.count <= LINES_MAX, before)
    }
}

/// The text of an event: its message, and the values of its fields after it.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let written = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            "error" | "reason" => write!(self.fields, ": {value:?}"),
            name => write!(self.fields, " ({name} {value:?})"),
        };
        written.expect("a string takes all");
    }
}

/// Makes lines of warnings, and of what this project's crates say beyond them.
struct Lines;

impl<S: Subscriber> Layer<S> for Lines {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        let is_ours = ["run", "control", "ifrt", "transport"]
            .iter()
            .any(|&ours| metadata.target().split("::").next() == Some(ours));
        *metadata.level() <= if is_ours { Level::INFO } else { Level::WARN }
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let (is_shown, before) = LIMIT.lock().admit(Instant::now());
        if !is_shown {
            return;
        }
        let mut line = Line::default();
        event.record(&mut line);
        let mut sinks = SINKS.lock();
        if before > 0 {
            sinks.send(&format!("{before} more warnings came within {} s", PERIOD.as_secs()));
        }
        sinks.send(&(line.message + &line.fields));
    }
}

/// Takes lines from now on, unless this process has another subscriber already.
pub(crate) fn subscribe() {
    drop(tracing::subscriber::set_global_default(Registry::default().with(Lines)));
}

/// Calls a function with each line, in a thread of its own, instead of printing it.
#[pyclass(frozen, name = "Warnings", module = "fairway._native")]
pub(crate) struct PyWarnings(u64);

#[pymethods]
impl PyWarnings {
    #[new]
    fn new(report: Py<PyAny>) -> Self {
        let (sender, lines) = sync_channel::<String>(WAITING_MAX);
        std::thread::spawn(move || {
            while let Ok(line) = lines.recv() {
                Python::attach(|py| {
                    if let Err(error) = report.call1(py, (line,)) {
                        error.write_unraisable(py, None);
                    }
                });
            }
        });
        let mut sinks = SINKS.lock();
        sinks.last += 1;
        let number = sinks.last;
        sinks.open.push((number, sender));
        Self(number)
    }

    /// Ends the calls.
    fn close(&self) {
        SINKS.lock().open.retain(|(number, _)| *number != self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_are_counted() {
        let (mut limit, start) = (Limit { period: None, count: 0 }, Instant::now());
        for _ in 0..LINES_MAX {
            assert_eq!(limit.admit(start), (true, 0));
        }
        for _ in 0..7 {
            assert_eq!(limit.admit(start), (false, 0));
        }
        assert_eq!(limit.admit(start + PERIOD), (true, 7));
        assert_eq!(limit.admit(start + 2 * PERIOD), (true, 0));
    }
}
