//! Reads messages of hosts, which are trusted little: every length and number is checked.

use std::io::{Cursor, Read};

use thiserror::Error;

/// Errors of reading a message.
#[derive(Debug, Error)]
pub enum ProtocolError {
    /// Not MessagePack, or not of the expected structure.
    #[error("a report is malformed at byte {at}: expected {expected}")]
    Malformed {
        /// Offset in the report.
        at: u64,
        /// What was expected there.
        expected: &'static str,
    },
}

pub(crate) type Result<T> = std::result::Result<T, ProtocolError>;

/// A position in a message.
#[derive(Debug)]
pub struct Decoder<'a>(Cursor<&'a [u8]>);

impl<'a> Decoder<'a> {
    /// Begins to read a message.
    pub(crate) fn new(message: &'a [u8]) -> Self {
        Self(Cursor::new(message))
    }

    /// Checks that the message ends here.
    pub(crate) fn end(&self) -> Result<()> {
        if self.left() == 0 { Ok(()) } else { Err(self.malformed("the end of the report")) }
    }

    pub(crate) fn malformed(&self, expected: &'static str) -> ProtocolError {
        ProtocolError::Malformed { at: self.0.position(), expected }
    }

    fn left(&self) -> u64 {
        self.0.get_ref().len() as u64 - self.0.position()
    }

    /// Checks that the rest of the message can hold `length` elements of at least a byte each.
    fn length(&self, length: u32, expected: &'static str) -> Result<usize> {
        let fits = u64::from(length) <= self.left();
        if fits { Ok(length as usize) } else { Err(self.malformed(expected)) }
    }

    /// Reads the number of elements of an array.
    pub(crate) fn array(&mut self) -> Result<usize> {
        let length = rmp::decode::read_array_len(&mut self.0);
        let length = length.map_err(|_| self.malformed("an array"))?;
        self.length(length, "an array that fits")
    }

    /// Reads the beginning of an array of exactly `length` elements.
    pub(crate) fn array_of(&mut self, length: usize, expected: &'static str) -> Result<()> {
        if self.array()? == length { Ok(()) } else { Err(self.malformed(expected)) }
    }

    /// Reads the beginning of a message: its number, and how many fields follow.
    pub(crate) fn message(&mut self) -> Result<(u8, usize)> {
        match self.array()? {
            0 => Err(self.malformed("the number of a message")),
            length => Ok((self.integer("the number of a message")?, length - 1)),
        }
    }

    pub(crate) fn integer<T: rmp_integer::Integer>(&mut self, expected: &'static str) -> Result<T> {
        T::read(&mut self.0).ok_or_else(|| self.malformed(expected))
    }

    pub(crate) fn float(&mut self) -> Result<f64> {
        rmp::decode::read_f64(&mut self.0).map_err(|_| self.malformed("a number"))
    }

    pub(crate) fn bool(&mut self) -> Result<bool> {
        rmp::decode::read_bool(&mut self.0).map_err(|_| self.malformed("true or false"))
    }

    pub(crate) fn bytes(&mut self) -> Result<Vec<u8>> {
        let length = rmp::decode::read_bin_len(&mut self.0);
        let length = length.map_err(|_| self.malformed("bytes"))?;
        self.take(length)
    }

    pub(crate) fn text(&mut self) -> Result<String> {
        let length = rmp::decode::read_str_len(&mut self.0);
        let length = length.map_err(|_| self.malformed("a text"))?;
        String::from_utf8(self.take(length)?).map_err(|_| self.malformed("a text in UTF-8"))
    }

    /// Reads nil if it is next; returns whether it was.
    pub(crate) fn nil(&mut self) -> bool {
        let at = self.0.position();
        let is_nil = self.0.get_ref().get(at as usize) == Some(&0xc0);
        self.0.set_position(at + u64::from(is_nil));
        is_nil
    }

    fn take(&mut self, length: u32) -> Result<Vec<u8>> {
        let length = self.length(length, "as many bytes as announced")?;
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes).map_err(|_| self.malformed("more bytes"))?;
        Ok(bytes)
    }
}

/// Whole numbers of each width.
pub(crate) mod rmp_integer {
    use std::io::Cursor;

    /// A whole number that MessagePack can hold in any of its forms, if the value fits.
    pub trait Integer: Sized {
        /// Reads a number; `None` if there is none, or it does not fit.
        fn read(from: &mut Cursor<&[u8]>) -> Option<Self>;
    }

    macro_rules! integers {
        ($($type:ty),*) => { $(
            impl Integer for $type {
                fn read(from: &mut Cursor<&[u8]>) -> Option<Self> {
                    rmp::decode::read_int(from).ok()
                }
            }
        )* };
    }

    integers!(u8, u32, u64, i64);
}
