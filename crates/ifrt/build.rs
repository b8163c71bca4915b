//! Generates the protocol's messages and service; needs no `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = protox::compile(["proto/ifrt_proxy.proto"], ["proto"])?;
    let service = tonic_prost_build::configure().build_client(false).bytes(".");
    service.codec_path("crate::limits::BoundedCodec").compile_fds(files)?;
    println!("cargo:rerun-if-changed=proto/ifrt_proxy.proto");
    Ok(())
}
