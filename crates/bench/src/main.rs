//! Measurements for those who work on Refrain. Users have `refrain bench`.

mod activations;
mod cases;
mod device;
mod gpu;
mod gpu_cases;
mod kernels;
mod masks;
mod numbers;
mod precision;
mod random_model;
mod speculation;
mod targets;
mod turns;
mod worker;

use clap::Parser;

/// Measures what Refrain is made of.
#[derive(Debug, Parser)]
#[command(version)]
enum Command {
    /// Each kernel beside the peaks of this machine, or of its GPU; needs no model
    Kernels(kernels::Options),
    /// KL divergence and equal top tokens of bf16 and q8 weights against f32, on real prompts
    Precision(precision::Options),
    /// Logits of a device beside the CPU's; fails where they are too far apart
    Device(device::Options),
    /// Writes a model of random weights at the shape of a real one
    RandomModel(random_model::Options),
    /// Reports of a GPU's measurements in one, with what was aimed at beside what was measured
    Targets(targets::Options),
    /// Time to compile grammars, and to find the tokens that they allow, over a model's vocabulary
    Masks(masks::Options),
    /// Time a token with prompt lookup decoding and without, on questions whose answers copy from their documents
    Speculation(speculation::Options),
    /// KL divergence of a conversation's second turn from vanilla, taken over from the prefix cache and anew
    Turns(turns::Options),
    /// Replies to JSON commands on standard input with bare times, for tools/bench_peers.py
    Worker(worker::Options),
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::Kernels(options) => kernels::run(&options),
        Command::Precision(options) => precision::run(&options),
        Command::Device(options) => device::run(&options),
        Command::RandomModel(options) => random_model::run(&options),
        Command::Targets(options) => targets::run(&options),
        Command::Masks(options) => masks::run(&options),
        Command::Speculation(options) => speculation::run(&options),
        Command::Turns(options) => turns::run(&options),
        Command::Worker(options) => worker::run(&options),
    }
}
