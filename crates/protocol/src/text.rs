//! The Python module of the protocol, generated from its definition.

use std::fmt::Write;

use crate::schema::{Doc, UnionSchema};
use crate::{MessageSchema, Role, Schema};

/// Longest line of the module, in characters.
const WIDTH: usize = 100;

const HEAD: &str = "\
\"\"\"What the controller and its hosts say to each other; `make protocol` writes this file.

The definitions are in ``crates/protocol/src``: commands in ``command.rs``, reports in
``report.rs``.
\"\"\"

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec
";

/// Returns `python/fairway/host/messages.py`.
pub fn python_module() -> String {
    let schema = Schema::new();
    let mut out = HEAD.to_owned();
    constants(&mut out);
    for choice in &schema.choices {
        write!(out, "\n\nclass {}(enum.IntEnum):\n", choice.name).unwrap();
        docstring(&mut out, &choice.doc, &[]);
        out.push('\n');
        for (name, number, doc) in &choice.items {
            writeln!(out, "    {name} = {number}").unwrap();
            paragraph(&mut out, "    \"\"\"", 4, &format!("{}\"\"\"", joined(doc)));
        }
    }
    schema.records().iter().for_each(|record| class(&mut out, record));
    for union in &schema.unions {
        union.messages.iter().for_each(|message| class(&mut out, message));
    }
    out.push('\n');
    for union in &schema.unions {
        alias(&mut out, union);
    }
    tickets(&mut out, schema.messages("Command"));
    made(&mut out, schema.messages("Command"));
    out
}

fn constants(out: &mut String) {
    let limit = crate::COMMAND_FRAME_LIMIT;
    write!(
        out,
        "\nCOMMAND_FRAME_LIMIT = {limit}\n\"\"\"Longest frame of commands, in bytes.\"\"\"\n"
    )
    .unwrap();
}

/// One text of the lines of a comment, without links of rustdoc.
fn joined(doc: &Doc) -> String {
    let text = doc.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
    text.replace("[`", "`").replace("`]", "`")
}

/// The first sentence of a comment, and the rest.
fn summary(doc: &Doc) -> (String, String) {
    let text = joined(doc);
    match text.split_once(". ") {
        Some((first, rest)) => (format!("{first}."), rest.trim().to_owned()),
        None => (text, String::new()),
    }
}

/// Appends a text, wrapped, with `first` before its first line and `indent` blanks before others.
fn paragraph(out: &mut String, first: &str, indent: usize, text: &str) {
    let mut line = first.to_owned();
    let mut is_empty = true;
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            writeln!(out, "{line}").unwrap();
            (line, is_empty) = (" ".repeat(indent), true);
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    writeln!(out, "{line}").unwrap();
}

fn docstring(out: &mut String, doc: &Doc, fields: &[(&str, String)]) {
    let (first, rest) = summary(doc);
    if rest.is_empty() && fields.is_empty() {
        writeln!(out, "    \"\"\"{first}\"\"\"").unwrap();
        return;
    }
    writeln!(out, "    \"\"\"{first}").unwrap();
    if !rest.is_empty() {
        out.push('\n');
        paragraph(out, "    ", 4, &rest);
    }
    if !fields.is_empty() {
        out.push_str("\n    Attributes:\n");
        for (name, doc) in fields {
            paragraph(out, &format!("        {name}: "), 12, doc);
        }
    }
    out.push_str("    \"\"\"\n");
}

fn class(out: &mut String, message: &MessageSchema) {
    let tag = message.number.map_or(String::new(), |number| format!(", tag={number}"));
    let options = format!("frozen=True, array_like=True{tag}, gc=False");
    write!(out, "\n\nclass {}(msgspec.Struct, {options}):\n", message.name).unwrap();
    let fields: Vec<_> = message.fields.iter().map(|f| (f.name, joined(&f.doc))).collect();
    docstring(out, &message.doc, &fields);
    if !fields.is_empty() {
        out.push('\n');
    }
    for field in &message.fields {
        writeln!(out, "    {}: {}", field.name, field.python).unwrap();
    }
}

fn alias(out: &mut String, union: &UnionSchema) {
    let names: Vec<_> = union.messages.iter().map(|message| message.name).collect();
    let line = format!("{}: TypeAlias = {}", union.name, names.join(" | "));
    if line.len() <= WIDTH {
        write!(out, "\n{line}\n").unwrap();
    } else {
        let line = names.join(" | ");
        let names = if line.len() + 4 <= WIDTH { line } else { names.join("\n    | ") };
        write!(out, "\n{}: TypeAlias = (\n    {names}\n)\n", union.name).unwrap();
    }
    paragraph(out, "\"\"\"", 0, &format!("{}\"\"\"", joined(&union.doc)));
}

fn tickets(out: &mut String, commands: &[MessageSchema]) {
    out.push_str(
        "\n\ndef ticket_of(command: Command) -> int | None:\n    \
         \"\"\"Returns the ticket of the answer that the controller waits for; None if there is none.\
         \"\"\"\n    match command:\n",
    );
    for command in commands {
        if let Role::Answers(field) = command.role {
            let name = command.name;
            write!(out, "        case {name}():\n            return command.{field}\n").unwrap();
        }
    }
    out.push_str("    return None\n");
}

fn made(out: &mut String, commands: &[MessageSchema]) {
    out.push_str(
        "\n\ndef made_by(command: Command) -> list[int]:\n    \
         \"\"\"Returns the buffers that a command makes, which are errors if it fails.\"\"\"\n    \
         match command:\n",
    );
    for command in commands {
        let value = match command.role {
            Role::None | Role::Answers(_) => continue,
            Role::Makes(field) => format!("[command.{field}]"),
            Role::MakesEach(field) => {
                format!("[value.buffer for group in command.{field} for value in group.values]")
            }
            Role::MakesRange(first, count) => {
                let is_list = command
                    .fields
                    .iter()
                    .any(|field| field.name == count && field.python.starts_with("list"));
                let count = if is_list {
                    format!("len(command.{count})")
                } else {
                    format!("command.{count}")
                };
                format!("list(range(command.{first}, command.{first} + {count}))")
            }
        };
        write!(out, "        case {}():\n            return {value}\n", command.name).unwrap();
    }
    out.push_str("    return []\n");
}
