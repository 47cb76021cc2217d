//! Compiles the kernels over emulated threads where the feature `emulate` asks for them.

fn main() {
    println!("cargo::rerun-if-changed=kernels");
    #[cfg(feature = "emulate")]
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .debug(false)
        .flag("-Wno-unknown-pragmas")
        .file("kernels/emulated.cpp")
        .compile("refrain_emulated_kernels");
}
