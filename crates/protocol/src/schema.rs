//! The definition of the protocol as a value, from which the Python module is generated.

/// Documentation, one entry per line of comment.
pub(crate) type Doc = Vec<&'static str>;

/// One field of a message or record.
#[derive(Debug, Clone)]
pub struct FieldSchema {
    /// Its name in both languages.
    pub name: &'static str,
    /// Its type in Python.
    pub python: String,
    /// Its documentation.
    pub doc: Doc,
}

/// What fails when a message cannot be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Nothing that the controller waits for.
    None,
    /// The answer under the ticket in this field.
    Answers(&'static str),
    /// The buffer in this field.
    Makes(&'static str),
    /// Consecutive buffers from the one in the first field on; the second field has their number,
    /// or a list with an entry for each.
    MakesRange(&'static str, &'static str),
    /// The results of each group in this field.
    MakesEach(&'static str),
}

/// A message, or a record inside messages.
#[derive(Debug, Clone)]
pub struct MessageSchema {
    /// The number that begins it; `None` for a record.
    pub number: Option<u8>,
    /// Its name in Python, and in Rust where they are the same.
    pub name: &'static str,
    /// Its documentation.
    pub doc: Doc,
    /// Its fields in their order on the wire.
    pub fields: Vec<FieldSchema>,
    /// What fails with it.
    pub role: Role,
}

/// A choice that travels as a number.
#[derive(Debug, Clone)]
pub(crate) struct ChoiceSchema {
    pub name: &'static str,
    pub doc: Doc,
    /// Name in Python, number, documentation.
    pub items: Vec<(&'static str, u64, Doc)>,
}

/// Messages of which one is expected.
#[derive(Debug, Clone)]
pub(crate) struct UnionSchema {
    pub name: &'static str,
    pub doc: Doc,
    pub messages: Vec<MessageSchema>,
}

/// All messages, records and choices.
#[derive(Debug, Clone, Default)]
pub struct Schema {
    pub(crate) choices: Vec<ChoiceSchema>,
    pub(crate) records: Vec<MessageSchema>,
    pub(crate) unions: Vec<UnionSchema>,
}

impl Schema {
    /// Returns the messages of an enum, in their order of definition.
    pub fn messages(&self, union: &str) -> &[MessageSchema] {
        self.unions.iter().find(|one| one.name == union).map_or(&[], |one| &one.messages)
    }

    /// Returns the records inside messages.
    pub fn records(&self) -> &[MessageSchema] {
        &self.records
    }

    /// Adds an enum of messages; returns false if it is there.
    pub(crate) fn begin_union(&mut self, name: &'static str, doc: &[&'static str]) -> bool {
        let is_new = self.unions.iter().all(|known| known.name != name);
        if is_new {
            self.unions.push(UnionSchema { name, doc: doc.to_vec(), messages: Vec::new() });
        }
        is_new
    }

    pub(crate) fn add_message(&mut self, union: &str, message: MessageSchema) {
        let known = self.unions.iter_mut().find(|known| known.name == union);
        known.expect("it was begun").messages.push(message);
    }

    pub(crate) fn add_record(&mut self, record: MessageSchema) {
        if self.records.iter().all(|known| known.name != record.name) {
            self.records.push(record);
        }
    }

    pub(crate) fn add_choice(
        &mut self,
        name: &'static str,
        doc: &[&'static str],
        items: Vec<(&'static str, u64, Doc)>,
    ) {
        if self.choices.iter().all(|known| known.name != name) {
            self.choices.push(ChoiceSchema { name, doc: doc.to_vec(), items });
        }
    }
}
