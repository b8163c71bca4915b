//! Generates the protocol's messages and service; needs no `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = protox::compile(["proto/ifrt_proxy.proto"], ["proto"])?;
    tonic_prost_build::configure().build_client(false).bytes(".").compile_fds(files)?;
    println!("cargo:rerun-if-changed=proto/ifrt_proxy.proto");
    Ok(())
}
