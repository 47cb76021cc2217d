//! The description of a run.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::Result;
use refrain::engine::{Engine, Prefix};
use refrain::kernels::{cpu_name, processors};
use refrain::quantities::tokens_text;
use refrain::store::hex;
use refrain_eval::tasks::LoadedTask;
use refrain_eval::{MachineInfo, Matrix, ModelInfo, RunInfo, Variant};

use crate::machine;
use crate::settings::{Context, prefix_hash};

/// SHA-256 of each file that variants have as a prefix, by the prefix.
pub(crate) fn prefix_texts(variants: &[Variant]) -> Result<BTreeMap<String, String>> {
    let mut texts = BTreeMap::new();
    for variant in variants {
        if let Prefix::Text(path) = &variant.prefix {
            texts.insert(variant.prefix.to_string(), prefix_hash(path)?);
        }
    }
    Ok(texts)
}

/// Whether a variant averages over stable layers, as SamKV does.
pub(crate) fn is_sam_kv(variants: &[Variant]) -> bool {
    variants.iter().any(|variant| variant.method.starts_with("sam_kv"))
}

/// Stable layers in words, counted from 1; those of a model without a calibration are built in.
pub(crate) fn layers_text(stable: Option<Range<usize>>) -> String {
    stable.map_or("built in".to_owned(), |layers| format!("{} to {}", layers.start + 1, layers.end))
}

/// The description of a run of the model of this name, which the engine has open.
pub(crate) fn about(
    context: &Context,
    name: &str,
    matrix: &Matrix,
    variants: &[Variant],
    engine: &Engine,
    jobs: &[LoadedTask],
) -> Result<RunInfo> {
    let mut names: Vec<Vec<String>> = vec![Vec::new(); 2];
    for variant in variants {
        for (names, name) in names.iter_mut().zip([&variant.method, &variant.policy]) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
    }
    let policies = names.pop().unwrap_or_default();
    let (config, device) = (engine.decoder().config(), engine.decoder().device());
    let file = refrain::resolve(&context.global.model, &context.models)?;
    let model = ModelInfo {
        name: name.to_owned(),
        file: file.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        fingerprint: hex::encode(&engine.fingerprint()),
        layers: config.num_layers(),
        heads: config.heads,
        kv_heads: config.kv_heads,
        context: config.context,
        precision: engine.decoder().precision().to_string(),
        kv: engine.settings().kv.to_string(),
    };
    let setting = |name: &str, value: String| (name.to_owned(), value);
    let stable = layers_text(engine.stable_layers().map(|layers| layers.range()));
    let most =
        |most: Option<usize>, otherwise: &str| most.map_or(otherwise.to_owned(), |most| most.to_string());
    let settings = [
        setting("tokens of a chunk", format!("{}, cut by structure", engine.settings().chunk_tokens)),
        setting("tokens left of a chunk", tokens_text(engine.settings().left_tokens)),
        setting("prefix of a chunk", "none where a method names none".to_owned()),
        setting("tokens forced", matrix.forced.to_string()),
        setting("chat template", matrix.chat.to_string()),
        setting("attention maps", matrix.maps.to_string()),
        setting("new tokens at most", most(matrix.max_tokens, "the benchmark's")),
        setting("tokens of a LongBench prompt at most", most(matrix.max_prompt_tokens, "by the context")),
    ];
    let texts = prefix_texts(variants)?.into_iter();
    // Models of one run have calibrations of their own.
    let calibrated =
        is_sam_kv(variants).then(|| setting(&format!("stable layers of SamKV on {name}"), stable));
    let settings = settings.into_iter().chain(calibrated);
    let settings = settings.chain(texts.map(|(prefix, hash)| setting(&prefix, hash)));
    let now = machine::now();
    let (isa, processor) = processors(&**device);
    Ok(RunInfo {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        command: machine::command(),
        matrix: matrix.text(),
        started: now,
        seconds: 0.0,
        machine: MachineInfo {
            cpu: cpu_name(),
            isa,
            device: processor,
            threads: device.threads(),
            memory: machine::all_memory().unwrap_or(0),
            os: machine::system(),
        },
        models: vec![model],
        tasks: jobs.iter().map(|job| job.about.clone()).collect(),
        methods: names.pop().unwrap_or_default(),
        policies,
        seed: matrix.seed,
        settings: settings.collect(),
    })
}
