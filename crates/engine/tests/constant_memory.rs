//! Resident memory of a very long answer. A process of its own: the kernel counts for all of it.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use refrain_engine::{Engine, GenerateRequest, Prompt, Sampling, Settings};
use refrain_eviction::POLICIES;
use refrain_fusion::Vanilla;
use refrain_kernels::Dtype;
use refrain_store::Store;

const TOKENS: usize = 12_000;

fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// The tiny model with a context that is long enough; what it says is of no interest.
fn model(folder: &Path) -> PathBuf {
    let from = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    for file in std::fs::read_dir(from).unwrap() {
        let path = file.unwrap().path();
        std::fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
    }
    let config = folder.join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let mut parsed: serde_json::Value = serde_json::from_str(&text).unwrap();
    parsed["max_position_embeddings"] = (TOKENS + 100).into();
    std::fs::write(&config, parsed.to_string()).unwrap();
    folder.to_owned()
}

/// Full attention of this model holds 8 MiB more after 12,000 tokens than after 1,000. What is touched comes in huge pages of
/// 2 MiB, of which the first are there from the start.
#[test]
fn twelve_thousand_tokens_under_morph_kv_take_no_more_memory_than_a_thousand() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { kv: Dtype::F32, ..Settings::default() };
    let engine = Engine::open(&model(folder.path()), Store::in_memory(1 << 20), settings, |_, _| ()).unwrap();
    let prompt = Prompt { question: (1..80).collect(), ..Prompt::default() };
    let sampling = Sampling { max_tokens: TOKENS, ..Sampling::default() };
    let measure = |policy: &str| {
        let eviction = POLICIES.parse(policy).unwrap();
        let request = GenerateRequest {
            eviction,
            ignore_eos: true,
            ..GenerateRequest::new(Arc::new(Vanilla), sampling.clone())
        };
        let mut seen = Vec::new();
        let answer = engine.answer(&prompt, &request, |progress| {
            if progress.tokens % 1000 == 0 {
                seen.push((resident(), progress.kv_bytes, progress.retained));
            }
            true
        });
        (answer.unwrap().stats, seen)
    };
    let (account, seen) = measure("morph_kv:capacity=600");
    assert_eq!((account.answer_tokens, seen.len()), (TOKENS, 12));
    assert_eq!(account.kv_bytes, 601 * engine.decoder().shape().token_bytes(engine.settings().kv));
    assert!(
        seen.iter().all(|(_, bytes, retained)| (*bytes, *retained) == (account.kv_bytes, 601)),
        "{seen:?}"
    );
    let grown =
        |seen: &[(usize, usize, usize)]| seen.iter().map(|s| s.0).max().unwrap().saturating_sub(seen[0].0);
    let bounded = grown(&seen);
    // Text, token ids and times of the answer grow; keys and values do not.
    assert!(bounded <= 1 << 20, "{} KiB more than after 1,000 tokens", bounded >> 10);
    let (account, seen) = measure("full");
    assert_eq!(account.retained_tokens, prompt.len() + TOKENS - 1);
    assert!(
        grown(&seen) > 4 << 20,
        "full attention grows: the measurement can tell ({} KiB)",
        grown(&seen) >> 10
    );
}
