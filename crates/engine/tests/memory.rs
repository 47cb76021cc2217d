//! Peak memory of a long prompt. A process of its own: the kernel counts the peak for all of it.
#![cfg(target_os = "linux")]

#[path = "../../../tests/common/needs.rs"]
mod needs;

use std::sync::Arc;

use refrain_engine::{Engine, Prompt, PromptChunk, Settings};
use refrain_eviction::Eviction;
use refrain_fusion::{FusionMethod, Vanilla};
use refrain_store::Store;

const TOKENS: usize = 4096;
const MARGIN: usize = 150 << 20;

/// Never an n×n matrix: at 4096 tokens one would be 64 MiB a head.
#[test]
fn peak_memory_is_weights_and_cache_and_little_more() {
    let Some(path) = needs::real_model("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    let engine = Engine::open(&path, Store::in_memory(1 << 20), Settings::default(), |_, _| ()).unwrap();
    let ids: Vec<u32> = (0..TOKENS as u32).map(|i| i * 7919 % 49_152).collect();
    let chunk = |(i, tokens): (usize, &[u32])| PromptChunk::whole(i, i.to_string(), tokens.to_vec());
    let prompt = Prompt {
        system: ids[..32].to_vec(),
        system_reusable: true,
        chunks: ids[32..TOKENS - 64].chunks(512).enumerate().map(chunk).collect(),
        question: ids[TOKENS - 64..].to_vec(),
        ..Prompt::default()
    };
    let account =
        engine.measure(&prompt, &(Arc::new(Vanilla) as Arc<dyn FusionMethod>), Eviction::full()).unwrap();
    assert_eq!(account.prompt_tokens, TOKENS);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    let peak = line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10;
    let allowed = engine.decoder().weight_bytes() + account.kv_bytes + MARGIN;
    let mib = |bytes: usize| bytes >> 20;
    println!("peak {} MiB, allowed {} MiB", mib(peak), mib(allowed));
    assert!(peak <= allowed, "peak {} MiB is more than {} MiB", mib(peak), mib(allowed));
}
