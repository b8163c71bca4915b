//! The macros that define messages, the records inside them, and choices among a few numbers.
//!
//! ```text
//! messages! { to hosts
//!     /// A command to a host.
//!     pub enum Command {
//!         /// Fetch the bytes of a shard.
//!         7 Read [answers ticket] {
//!             /// Correlates the answer.
//!             ticket: CommandTicket,
//!             ...
//!         },
//!     }
//! }
//! ```
//!
//! The number of a message never changes its meaning. In brackets stands what fails when the
//! message cannot be carried out: `[answers field]`, the answer that the controller waits for under
//! that ticket; `[makes field]`, a buffer; `[makes field for count]`, consecutive buffers from
//! `field` on, as many as `count` says or lists.

/// Defines an enum of messages: its type, its encoding, its schema, and for messages `from hosts`
/// its decoding.
macro_rules! messages {
    (to hosts $($rest:tt)*) => { messages! { @type $($rest)* } };
    (from hosts $($rest:tt)*) => {
        messages! { @type $($rest)* }
        messages! { @decode $($rest)* }
    };
    (@type
        $(#[doc = $union_doc:literal])+
        pub enum $union:ident { $(
            $(#[doc = $doc:literal])+
            $number:literal $name:ident $([$($role:tt)+])? {
                $( $(#[doc = $field_doc:literal])+ $field:ident: $type:ty ),* $(,)?
            }
        ),* $(,)? }
    ) => {
        $(#[doc = $union_doc])+
        #[derive(Debug, Clone, PartialEq)]
        pub enum $union { $(
            $(#[doc = $doc])+
            $name { $( $(#[doc = $field_doc])+ $field: $type ),* }
        ),* }

        impl $crate::Field for $union {
            fn python() -> String {
                stringify!($union).to_owned()
            }

            fn define(schema: &mut $crate::Schema) {
                if !schema.begin_union(stringify!($union), &[$($union_doc),+]) {
                    return;
                }
                $(
                    $( <$type as $crate::Field>::define(schema); )*
                    schema.add_message(stringify!($union), $crate::MessageSchema {
                        number: Some($number),
                        name: stringify!($name),
                        doc: vec![$($doc),+],
                        fields: vec![$( field!($(#[doc = $field_doc])+ $field: $type) ),*],
                        role: role!($($($role)+)?),
                    });
                )*
            }

            fn write(&self, out: &mut $crate::Encoder<'_>) {
                match self { $(
                    Self::$name { $($field),* } => {
                        out.message($number, <[&str]>::len(&[$(stringify!($field)),*]));
                        $( $crate::Field::write($field, out); )*
                    }
                ),* }
            }
        }

        impl $union {
            /// Returns one random message of every kind, in the order of definition.
            pub fn samples(seed: u64) -> Vec<(&'static str, Self)> {
                let kinds = [$( (stringify!($name), $number) ),*];
                let made = kinds.iter().zip(Self::samplers()).map(|(&(name, number), make)| {
                    (name, make(&mut base::Random::of(&[seed, number])))
                });
                made.collect()
            }

            /// A maker of random messages of each kind.
            fn samplers() -> &'static [fn(&mut base::Random) -> Self] {
                &[$( |_random| Self::$name {
                    $( $field: <$type as $crate::Sample>::sample(_random) ),*
                } ),*]
            }
        }

        impl $crate::Sample for $union {
            fn sample(random: &mut base::Random) -> Self {
                let samplers = Self::samplers();
                samplers[random.below(samplers.len() as u64) as usize](random)
            }
        }
    };
    (@decode
        $(#[doc = $union_doc:literal])+
        pub enum $union:ident { $(
            $(#[doc = $doc:literal])+
            $number:literal $name:ident $([$($role:tt)+])? {
                $( $(#[doc = $field_doc:literal])+ $field:ident: $type:ty ),* $(,)?
            }
        ),* $(,)? }
    ) => {
        impl $crate::Decode for $union {
            fn read(
                decoder: &mut $crate::Decoder<'_>,
            ) -> std::result::Result<Self, $crate::ProtocolError> {
                let (number, fields) = decoder.message()?;
                match number { $(
                    $number if fields == <[&str]>::len(&[$(stringify!($field)),*]) => {
                        Ok(Self::$name { $( $field: <$type as $crate::Decode>::read(decoder)? ),* })
                    }
                )*
                    _ => Err(decoder.malformed(concat!("a known kind of ", stringify!($union)))),
                }
            }
        }
    };
}

/// Defines a record inside messages: its type, its encoding, its schema, and for records `from
/// hosts` its decoding. `as "Name"` gives it another name in Python.
macro_rules! record {
    (to hosts $($rest:tt)*) => { record! { @type $($rest)* } };
    (from hosts $($rest:tt)*) => {
        record! { @type $($rest)* }
        record! { @decode $($rest)* }
    };
    (@type
        $(#[doc = $doc:literal])+
        $(#[derive($($derive:ident),+)])?
        pub struct $name:ident $(as $python:literal)? {
            $( $(#[doc = $field_doc:literal])+ pub $field:ident: $type:ty ),* $(,)?
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Debug, Clone, PartialEq)]
        $(#[derive($($derive),+)])?
        pub struct $name { $( $(#[doc = $field_doc])+ pub $field: $type ),* }

        impl $crate::Field for $name {
            fn python() -> String {
                name!($name $($python)?).to_owned()
            }

            fn define(schema: &mut $crate::Schema) {
                $( <$type as $crate::Field>::define(schema); )*
                schema.add_record($crate::MessageSchema {
                    number: None,
                    name: name!($name $($python)?),
                    doc: vec![$($doc),+],
                    fields: vec![$( field!($(#[doc = $field_doc])+ $field: $type) ),*],
                    role: $crate::Role::None,
                });
            }

            fn write(&self, out: &mut $crate::Encoder<'_>) {
                out.array(<[&str]>::len(&[$(stringify!($field)),*]));
                $( $crate::Field::write(&self.$field, out); )*
            }
        }

        impl $crate::Sample for $name {
            fn sample(random: &mut base::Random) -> Self {
                Self { $( $field: $crate::Sample::sample(random) ),* }
            }
        }
    };
    (@decode
        $(#[doc = $doc:literal])+
        $(#[derive($($derive:ident),+)])?
        pub struct $name:ident $(as $python:literal)? {
            $( $(#[doc = $field_doc:literal])+ pub $field:ident: $type:ty ),* $(,)?
        }
    ) => {
        impl $crate::Decode for $name {
            fn read(
                decoder: &mut $crate::Decoder<'_>,
            ) -> std::result::Result<Self, $crate::ProtocolError> {
                let fields = <[&str]>::len(&[$(stringify!($field)),*]);
                decoder.array_of(fields, concat!("the fields of ", stringify!($name)))?;
                Ok(Self { $( $field: $crate::Decode::read(decoder)? ),* })
            }
        }
    };
}

/// Defines a choice that travels as a number.
macro_rules! choice {
    (
        $(#[doc = $doc:literal])+
        pub enum $name:ident {
            $( $(#[doc = $item_doc:literal])+ $number:literal $item:ident = $python:literal ),* $(,)?
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $( $(#[doc = $item_doc])+ $item = $number ),* }

        impl $crate::Field for $name {
            fn python() -> String {
                stringify!($name).to_owned()
            }

            fn define(schema: &mut $crate::Schema) {
                let items = vec![$( ($python, $number, vec![$($item_doc),+]) ),*];
                schema.add_choice(stringify!($name), &[$($doc),+], items);
            }

            fn write(&self, out: &mut $crate::Encoder<'_>) {
                out.uint(*self as u64);
            }
        }

        impl $crate::Sample for $name {
            fn sample(random: &mut base::Random) -> Self {
                let all = [$(Self::$item),*];
                all[random.below(all.len() as u64) as usize]
            }
        }
    };
}

/// The schema of one field.
macro_rules! field {
    ($(#[doc = $doc:literal])+ $field:ident: $type:ty) => {
        $crate::FieldSchema {
            name: stringify!($field),
            python: <$type as $crate::Field>::python(),
            doc: vec![$($doc),+],
        }
    };
}

/// What fails when a message cannot be carried out.
macro_rules! role {
    () => {
        $crate::Role::None
    };
    (answers $field:ident) => {
        $crate::Role::Answers(stringify!($field))
    };
    (makes $field:ident) => {
        $crate::Role::Makes(stringify!($field))
    };
    (makes $field:ident for $count:ident) => {
        $crate::Role::MakesRange(stringify!($field), stringify!($count))
    };
    (makes each $path:ident) => {
        $crate::Role::MakesEach(stringify!($path))
    };
}

/// The name of a record in Python.
macro_rules! name {
    ($name:ident) => {
        stringify!($name)
    };
    ($name:ident $python:literal) => {
        $python
    };
}
