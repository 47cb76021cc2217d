//! Compiles the kernels over emulated threads where the feature `emulate` asks for them.

fn main() {
    println!("cargo::rerun-if-changed=kernels");
    #[cfg(feature = "emulate")]
    emulate();
}

/// Compiles the kernels of this crate, or those of the folder that `REFRAIN_CUDA_KERNELS` names: `tools/cuda-mutations` tests altered ones.
#[cfg(feature = "emulate")]
fn emulate() {
    println!("cargo::rerun-if-env-changed=REFRAIN_CUDA_KERNELS");
    let folder = std::env::var("REFRAIN_CUDA_KERNELS").unwrap_or_else(|_| "kernels".to_owned());
    println!("cargo::rerun-if-changed={folder}");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .debug(false)
        .flag("-Wno-unknown-pragmas")
        .file(format!("{folder}/emulated.cpp"))
        .compile("refrain_emulated_kernels");
}
