//! `refrain bench store`: the loss of quantised chunks, and the speed of loading.

use std::hint::black_box;
use std::thread;
use std::time::Instant;

use anyhow::Result;
use refrain::engine::{Document, Engine};
use refrain::store::{ChunkId, KvQuantization, Scope, Store};
use serde::Serialize;
use serde_json::json;

use super::measurement::{Setup, Spread};
use super::prompts::{documents, engine, questions};
use crate::args;
use crate::methods::{self, Method};
use crate::output::{bytes, count, print, print_json};
use crate::settings::Context;
use crate::table::Table;

/// One quantization.
#[derive(Debug, Serialize)]
struct EncodingResult {
    quantization: String,
    /// Bytes of keys and values of a token, all layers.
    bytes_per_token: f64,
    /// Distance of each method's answers to vanilla's.
    methods: Vec<MethodFidelity>,
    /// Bytes that were loaded, as they are used: of the elements' own type.
    load_bytes: u64,
    /// Seconds to read and verify all layers, and decode them, from files in the system's memory: one thread, and all.
    load_seconds: [Spread; 2],
    /// Seconds of reading files into new memory of the store.
    kept_seconds: [Spread; 2],
    /// Seconds of reading from the store's memory.
    memory_seconds: [Spread; 2],
    /// Seconds to copy the loaded bytes from memory to memory.
    copy_seconds: [Spread; 2],
    /// Seconds to copy them to new memory, a layer of a chunk at a time.
    new_copy_seconds: [Spread; 2],
}

#[derive(Debug, Serialize)]
struct MethodFidelity {
    method: String,
    kl: f64,
    top1: f64,
    positions: usize,
}

/// `refrain bench store`
pub(crate) fn run(context: &Context, args: &args::StoreBench) -> Result<()> {
    let (questions, documents) = (questions(args.questions.as_deref())?, documents(&args.docs)?);
    let (methods, policy) = (methods::methods(&args.methods)?, methods::policy("full")?);
    let mut rows = Vec::new();
    let mut about = None;
    for quantization in KvQuantization::ALL {
        let mut context = context.clone();
        context.global.store_dtype = quantization;
        let (engine, folder) = engine(&context)?;
        about.get_or_insert_with(|| Setup::new(&**engine.decoder().device(), args.runs));
        let near = fidelities(&context, &engine, &documents, &questions, &methods, &policy, args.tokens)?;
        rows.push(EncodingResult::new(quantization, &engine, folder.path(), near, args.runs)?);
    }
    let Some(about) = about else { return Ok(()) };
    if context.json {
        return print_json(&json!({ "about": about, "prompts": questions.len(), "results": rows }));
    }
    let what = format!(
        "{}, {} over {}, up to {} of each answer, against vanilla",
        context.global.model,
        count(questions.len(), "prompt"),
        count(documents.len(), "document"),
        count(args.tokens, "token")
    );
    print(&format!("{}\n{what}\n\n{}\n{}", about.machine(), costs(&rows).text(), speeds(&rows).text()))
}

/// Every method's answers to all questions beside vanilla's.
fn fidelities(
    context: &Context,
    engine: &Engine,
    documents: &[Document],
    questions: &[String],
    methods: &[Method],
    policy: &crate::methods::Policy,
    tokens: usize,
) -> Result<Vec<MethodFidelity>> {
    let bar = context.bar("comparing", "{pos}/{len} prompts");
    bar.set_length(questions.len() as u64);
    let mut sums = vec![(0.0, 0.0, 0); methods.len()];
    for question in questions {
        let prompt = engine.prompt(documents, question, &Default::default())?;
        let built: Vec<_> =
            methods.iter().map(|method| (method.spec.clone(), method.built.clone())).collect();
        let found = engine.compare(&prompt, &built, &policy.built, tokens)?;
        for ((kl, top1, positions), found) in sums.iter_mut().zip(found) {
            *kl += found.kl * found.positions as f64;
            *top1 += found.top1 * found.positions as f64;
            *positions += found.positions;
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let near = methods.iter().zip(sums).map(|(method, (kl, top1, positions))| MethodFidelity {
        method: method.spec.clone(),
        kl: kl / positions as f64,
        top1: top1 / positions as f64,
        positions,
    });
    Ok(near.collect())
}

impl EncodingResult {
    fn new(
        quantization: KvQuantization,
        engine: &Engine,
        folder: &std::path::Path,
        methods: Vec<MethodFidelity>,
        runs: u32,
    ) -> Result<EncodingResult> {
        let store = engine.store();
        let mut ids = Vec::new();
        for info in
            store.list(Scope::All)?.chunks.into_iter().filter(|info| info.quantization == quantization)
        {
            let detail = store.show(&info.key)?;
            ids.push(ChunkId {
                model: info.model,
                dtype: info.dtype,
                quantization,
                layers: info.layers,
                kv_heads: info.kv_heads,
                head_dim: info.head_dim,
                bos: info.bos,
                prefix: info.prefix,
                numerics: info.numerics.filter(|_| engine.settings().strict_numerics),
                namespace: info.namespace,
                tokens: detail.token_ids,
            });
        }
        let bytes: u64 = store
            .list(Scope::All)?
            .chunks
            .iter()
            .filter(|i| i.quantization == quantization)
            .map(|i| i.bytes)
            .sum();
        let tokens: usize = ids.iter().map(|id| id.tokens.len()).sum();
        let threads = [1, engine.decoder().device().threads()];
        // A store without memory: every run reads files, from the system's page cache.
        let cold = || Store::open(folder, 0).map_err(anyhow::Error::from);
        let warm = Store::open(folder, u64::MAX >> 1)?;
        load(&warm, &ids, 1)?;
        let load_bytes = load(&cold()?, &ids, 1)?;
        let source = vec![1_u8; load_bytes as usize];
        let mut target = vec![2_u8; source.len()];
        let keeping = || Store::open(folder, u64::MAX >> 1).map_err(anyhow::Error::from);
        let piece = load_bytes as usize / ids.iter().map(|id| id.layers).sum::<usize>().max(1);
        let mut seconds: [[Vec<f64>; 2]; 5] = Default::default();
        for _ in 0..runs {
            for (at, threads) in threads.into_iter().enumerate() {
                let (store, kept) = (cold()?, keeping()?);
                // The first use opens the index, which is not measured.
                store.stats();
                kept.stats();
                let times = [
                    timed(|| load(&store, &ids, threads))?,
                    timed(|| load(&kept, &ids, threads))?,
                    timed(|| load(&warm, &ids, threads))?,
                    timed(|| Ok(copy(&source, &mut target, threads)))?,
                    timed(|| Ok(copy_anew(&source, piece, threads)))?,
                ];
                seconds.iter_mut().zip(times).for_each(|(all, time)| all[at].push(time));
            }
        }
        let [load_seconds, kept_seconds, memory_seconds, copy_seconds, new_copy_seconds] =
            seconds.map(|of| of.map(Spread::of));
        Ok(EncodingResult {
            quantization: quantization.to_string(),
            bytes_per_token: bytes as f64 / tokens as f64,
            methods,
            load_bytes,
            load_seconds,
            kept_seconds,
            memory_seconds,
            copy_seconds,
            new_copy_seconds,
        })
    }

    fn rate(&self, of: &Spread) -> f64 {
        self.load_bytes as f64 / of.median / 1e9
    }
}

fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<f64> {
    let started = Instant::now();
    black_box(work()?);
    Ok(started.elapsed().as_secs_f64())
}

/// Brings in every layer of the chunks, each thread the next one, as an answer does; bytes as they are used.
fn load(store: &Store, ids: &[ChunkId], threads: usize) -> Result<u64> {
    let mut readers = Vec::new();
    for id in ids {
        readers.extend(store.reader(id)?);
    }
    let layers = ids.iter().map(|id| id.layers).max().unwrap_or(0);
    let part = |thread: usize| {
        let own = (0..layers).filter(|layer| layer % threads == thread);
        let pairs = own.flat_map(|layer| readers.iter().map(move |reader| (layer, reader)));
        let layers = pairs.filter_map(|(layer, reader)| reader.layer(layer));
        layers.map(|layer| black_box(&layer).bytes() as u64).sum::<u64>()
    };
    Ok(thread::scope(|scope| {
        let started: Vec<_> = (0..threads).map(|thread| scope.spawn(move || part(thread))).collect();
        started.into_iter().map(|thread| thread.join().unwrap_or(0)).sum()
    }))
}

/// Bytes copied.
fn copy(source: &[u8], target: &mut [u8], threads: usize) -> usize {
    let part = source.len().div_ceil(threads).max(1);
    thread::scope(|scope| {
        for (from, to) in source.chunks(part).zip(target.chunks_mut(part)) {
            scope.spawn(move || black_box(to).copy_from_slice(black_box(from)));
        }
    });
    source.len()
}

/// Copies to new memory, `piece` bytes at a time. Returns the number of pieces.
fn copy_anew(source: &[u8], piece: usize, threads: usize) -> usize {
    let part = source.len().div_ceil(threads).max(1);
    let pieces = |part: &[u8]| part.chunks(piece.max(1)).map(|piece| black_box(piece).to_vec()).collect();
    thread::scope(|scope| {
        let started: Vec<_> =
            source.chunks(part).map(|part| scope.spawn(move || -> Vec<Vec<u8>> { pieces(part) })).collect();
        started.into_iter().map(|thread| thread.join().map_or(0, |copied| black_box(copied).len())).sum()
    })
}

fn costs(rows: &[EncodingResult]) -> Table {
    let mut table = Table::new(&[
        "<at rest",
        "bytes a token",
        "of exact",
        "<method",
        "mean KL",
        "same top token",
        "positions",
    ]);
    let exact = rows.first().map_or(1.0, |row| row.bytes_per_token);
    for row in rows {
        for near in &row.methods {
            table.push(vec![
                row.quantization.clone(),
                bytes(row.bytes_per_token as u64),
                format!("{:.1} %", 100.0 * row.bytes_per_token / exact),
                near.method.clone(),
                format!("{:.4}", near.kl),
                format!("{:.1} %", 100.0 * near.top1),
                near.positions.to_string(),
            ]);
        }
    }
    table
}

fn speeds(rows: &[EncodingResult]) -> Table {
    let mut table = Table::new(&[
        "<at rest",
        "threads",
        "loaded",
        "from files",
        "of memcpy",
        "and kept",
        "of memcpy to new memory",
        "from memory",
        "memcpy",
        "to new memory",
    ]);
    for row in rows {
        for at in 0..2 {
            let all = [
                &row.load_seconds,
                &row.kept_seconds,
                &row.memory_seconds,
                &row.copy_seconds,
                &row.new_copy_seconds,
            ];
            let [load, kept, held, copy, new] = all.map(|of| row.rate(&of[at]));
            let rate = |rate: f64| format!("{rate:.1} GB/s");
            table.push(vec![
                row.quantization.clone(),
                if at == 0 { "1".to_owned() } else { "all".to_owned() },
                bytes(row.load_bytes),
                rate(load),
                format!("{:.0} %", 100.0 * load / copy),
                rate(kept),
                format!("{:.0} %", 100.0 * kept / new),
                rate(held),
                rate(copy),
                rate(new),
            ]);
        }
    }
    table
}
