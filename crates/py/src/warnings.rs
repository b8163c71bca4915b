//! What the compiled half has to say, which no caller waits for: lines for the owner's logs.

use std::cmp::Ordering;
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

/// What becomes of a line.
#[derive(Debug, PartialEq, Eq)]
enum Admission {
    Shown,
    /// The first beyond the limit; the rest of the period, after which the count is due.
    Over(Duration),
    Counted,
}

impl Limit {
    /// Counts a line.
    fn admit(&mut self, now: Instant) -> Admission {
        let is_open = |begun: &Instant| self.count > LINES_MAX || now - *begun < PERIOD;
        let begun = self.period.filter(is_open).unwrap_or_else(|| {
            self.count = 0;
            now
        });
        self.period = Some(begun);
        self.count += 1;
        match self.count.cmp(&(LINES_MAX + 1)) {
            Ordering::Less => Admission::Shown,
            Ordering::Equal => Admission::Over(PERIOD.saturating_sub(now - begun)),
            Ordering::Greater => Admission::Counted,
        }
    }

    /// Ends the period; returns how many lines were over the limit.
    fn end(&mut self) -> u64 {
        self.period = None;
        std::mem::take(&mut self.count).saturating_sub(LINES_MAX)
    }
}

/// Says at the end of the period how many lines were over the limit.
fn sum_up_after(rest: Duration) {
    let summing = std::thread::Builder::new().spawn(move || {
        std::thread::sleep(rest);
        let more = LIMIT.lock().end();
        SINKS.lock().send(&format!("{more} more warnings came within {} s", PERIOD.as_secs()));
    });
    if summing.is_err() {
        LIMIT.lock().end();
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
        let admission = LIMIT.lock().admit(Instant::now());
        match admission {
            Admission::Shown => {}
            Admission::Over(rest) => return sum_up_after(rest),
            Admission::Counted => return,
        }
        let mut line = Line::default();
        event.record(&mut line);
        SINKS.lock().send(&(line.message + &line.fields));
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
            assert_eq!(limit.admit(start), Admission::Shown);
        }
        let later = start + PERIOD / 3;
        assert_eq!(limit.admit(later), Admission::Over(PERIOD - PERIOD / 3));
        for _ in 0..6 {
            assert_eq!(limit.admit(later), Admission::Counted);
        }
        assert_eq!(limit.admit(start + PERIOD), Admission::Counted, "until the count is said");
        assert_eq!(limit.end(), 8);
        assert_eq!(limit.admit(start + PERIOD), Admission::Shown);
        assert_eq!(limit.admit(start + 2 * PERIOD), Admission::Shown);
        assert_eq!(limit.count, 1, "another period");
    }
}
