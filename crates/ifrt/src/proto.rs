//! Generated messages of the protocol.
#![allow(missing_docs, clippy::all)]

tonic::include_proto!("xla.ifrt.proxy");
