//! Text format of programs and step graphs, line by line; printing and parsing round-trip.

mod placement;
mod program;
mod step;

use std::fmt::{self, Display};

use thiserror::Error;

use crate::Dims;

/// Maximum number of devices or tiles in one list of a text.
const COUNT_LIMIT: u32 = 1 << 20;

/// A parse error.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("line {line}: expected {expected}, found {found:?}")]
pub struct TextError {
    /// Number of the line, from 1.
    pub line: u32,
    /// The expected token.
    pub expected: &'static str,
    /// The text found there.
    pub found: String,
}

/// Parses each line; empty lines and `//` comments are skipped.
fn read_lines(
    text: &str,
    mut read: impl FnMut(&mut Words<'_>) -> Result<(), TextError>,
) -> Result<(), TextError> {
    for (number, line) in text.lines().enumerate() {
        let line = line.split("//").next().unwrap_or_default();
        let mut words = Words { rest: line.trim(), line: number as u32 + 1 };
        if !words.rest.is_empty() {
            read(&mut words)?;
            if !words.rest.is_empty() {
                return words.error("the end of the line");
            }
        }
    }
    Ok(())
}

/// A name, quoted if necessary.
pub(crate) struct Name<'a>(pub &'a str);

impl Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.0.is_empty() && self.0.chars().all(is_plain) {
            return f.write_str(self.0);
        }
        let escaped = self.0.bytes().flat_map(|byte| match byte {
            b'"' | b'\\' | b'/' | b'\0'..=b' ' => format!("\\{byte:02x}").into_bytes(),
            byte => vec![byte],
        });
        write!(f, "\"{}\"", String::from_utf8_lossy(&escaped.collect::<Vec<u8>>()))
    }
}

fn is_plain(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '.' | '$' | '-')
}

/// Numbers in parentheses, each with a prefix.
pub(crate) struct List<'a>(pub char, pub &'a [u32]);

impl Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = if self.0 == ' ' { String::new() } else { self.0.to_string() };
        let items: Vec<String> = self.1.iter().map(|number| format!("{mark}{number}")).collect();
        write!(f, "({})", items.join(", "))
    }
}

/// Numbers in brackets, with runs of three or more as `first..end`.
pub(crate) struct Ranges<'a>(pub &'a [u32]);

impl Display for Ranges<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut items = Vec::new();
        let mut rest = self.0;
        while let Some(&first) = rest.first() {
            let run = rest.iter().zip(first..).take_while(|(found, next)| *found == next).count();
            if run > 2 || (run == 2 && self.0.len() == 2 && first == 0) {
                items.push(format!("{first}..{}", first + run as u32));
                rest = &rest[run..];
            } else {
                items.push(first.to_string());
                rest = &rest[1..];
            }
        }
        write!(f, "[{}]", items.join(","))
    }
}

/// The rest of a line.
pub(crate) struct Words<'a> {
    pub rest: &'a str,
    pub line: u32,
}

impl<'a> Words<'a> {
    pub fn error<T>(&self, expected: &'static str) -> Result<T, TextError> {
        let found = self.rest.chars().take(40).collect();
        Err(TextError { line: self.line, expected, found })
    }

    /// Consumes `mark` if it comes next.
    pub fn take(&mut self, mark: &str) -> bool {
        let Some(rest) = self.rest.strip_prefix(mark) else { return false };
        let word = mark.ends_with(|c: char| c.is_ascii_alphanumeric());
        if word && rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_') {
            return false;
        }
        self.rest = rest.trim_start();
        true
    }

    pub fn expect(&mut self, mark: &'static str) -> Result<(), TextError> {
        if self.take(mark) { Ok(()) } else { self.error(mark) }
    }

    pub fn while_(&mut self, test: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !test(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        word
    }

    pub fn number<T: std::str::FromStr>(&mut self) -> Result<T, TextError> {
        let before = self.rest;
        match self.while_(|c| c.is_ascii_digit() || c == '-').parse() {
            Ok(number) => {
                self.rest = self.rest.trim_start();
                Ok(number)
            }
            Err(_) => {
                self.rest = before;
                self.error("a number")
            }
        }
    }

    /// Parses a number with this unit, if that comes next.
    pub fn quantity(&mut self, unit: &str) -> Option<u64> {
        let before = self.rest;
        let number = self.number().ok();
        let found = number.filter(|_| self.take(unit));
        if found.is_none() {
            self.rest = before;
        }
        found
    }

    pub fn name(&mut self) -> Result<String, TextError> {
        if !self.rest.starts_with('@') {
            return self.error("@name");
        }
        self.rest = &self.rest[1..];
        if !self.rest.starts_with('"') {
            let name = self.while_(is_plain).to_owned();
            self.rest = self.rest.trim_start();
            return Ok(name);
        }
        self.rest = &self.rest[1..];
        let quoted = self.while_(|c| c != '"');
        self.expect("\"")?;
        let mut bytes = Vec::new();
        let mut rest = quoted.as_bytes();
        while let [first, after @ ..] = rest {
            let code = after.get(..2).and_then(|code| std::str::from_utf8(code).ok());
            match (first, code.and_then(|code| u8::from_str_radix(code, 16).ok())) {
                (b'\\', Some(byte)) => {
                    bytes.push(byte);
                    rest = &after[2..];
                }
                (byte, _) => {
                    bytes.push(*byte);
                    rest = after;
                }
            }
        }
        String::from_utf8(bytes).or_else(|_| self.error("a name in UTF-8"))
    }

    /// Parses `(%1, %2)`: numbers with a prefix.
    pub fn list(&mut self, mark: &str) -> Result<Vec<u32>, TextError> {
        self.items("(", ")", |words| {
            if mark.is_empty() || words.take(mark) {
                words.number()
            } else {
                words.error("a value or node")
            }
        })
    }

    pub fn items<T>(
        &mut self,
        open: &'static str,
        close: &'static str,
        mut item: impl FnMut(&mut Self) -> Result<T, TextError>,
    ) -> Result<Vec<T>, TextError> {
        self.expect(open)?;
        let mut items = Vec::new();
        while !self.take(close) {
            if !items.is_empty() && !self.take(",") {
                return self.error("a comma, or the end of the list");
            }
            items.push(item(self)?);
        }
        Ok(items)
    }

    /// Parses `[0..4,7]`.
    pub fn ranges(&mut self) -> Result<Vec<u32>, TextError> {
        let mut numbers = Vec::new();
        self.items("[", "]", |words| {
            let first: u32 = words.number()?;
            let end = if words.take("..") { words.number()? } else { first.saturating_add(1) };
            if end.saturating_sub(first) > COUNT_LIMIT || numbers.len() as u32 > COUNT_LIMIT {
                return words.error("fewer numbers");
            }
            numbers.extend(first..end);
            Ok(())
        })?;
        Ok(numbers)
    }

    pub fn shape(&mut self) -> Result<Dims, TextError> {
        let mut dims = Dims::new();
        if self.take("x") {
            return Ok(dims);
        }
        loop {
            dims.push(self.number()?);
            if !self.rest.starts_with('x') {
                return Ok(dims);
            }
            self.rest = &self.rest[1..];
        }
    }
}
