//! `refrain chunks`: the store's contents.

use std::io::{self, BufRead, IsTerminal};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use refrain_model::{ModelFiles, Tokenizer};
use refrain_store::{ChunkDetail, ChunkInfo, Store};
use serde_json::json;

use crate::args::Chunks;
use crate::output::{Fail, age, bytes, count, one_line, paint, plain, print, print_json, warn};
use crate::settings::{Context, show as move_bar, tilde};
use crate::table::Table;
use crate::{models, output};

/// `refrain chunks`
pub(crate) fn run(context: &Context, command: &Chunks) -> Result<()> {
    let store = context.open_store()?;
    match command {
        Chunks::Ls => list(context, &store),
        Chunks::Show { key } => show(context, &store, key),
        Chunks::Rm { keys, all, yes } => remove(context, &store, keys, *all, *yes),
        Chunks::Verify => verify(context, &store),
    }
}

/// The model that the options name, if it is at hand; its headers are read, no weight.
fn model(context: &Context) -> Option<ModelFiles> {
    models::resolve(context).ok().and_then(|path| ModelFiles::open(path).ok())
}

/// What names the chunks of a model under these options.
fn identity(context: &Context, files: &ModelFiles) -> Option<[u8; 32]> {
    let precision = context.global.compute.0.map_or_else(|| files.native_precision(), Ok).ok()?;
    Some(refrain_engine::identity(files.fingerprint(), precision))
}

fn list(context: &Context, store: &Store) -> Result<()> {
    let listing = store.list()?;
    let current = model(context).and_then(|files| identity(context, &files));
    if context.json {
        let mut value = json!(listing);
        for (chunk, info) in value["chunks"].as_array_mut().into_iter().flatten().zip(&listing.chunks) {
            chunk["current_model"] = json!(current.map(|current| current == info.model));
        }
        return print_json(&value);
    }
    for file in &listing.unusable {
        warn(&format!("{} cannot be used: {}", file.path.display(), file.problem));
    }
    if listing.chunks.is_empty() {
        return print(&format!("no chunks in {}\n", tilde(&context.store)));
    }
    let others = current.is_some_and(|current| listing.chunks.iter().any(|info| info.model != current));
    let spaces = listing.chunks.iter().any(|info| !info.namespace.is_empty());
    let mut header = vec!["<key", "tokens", "size", "<type", "<model"];
    header.extend(spaces.then_some("<namespace"));
    header.extend(["age", "<text"]);
    let mut table = Table::new(&header);
    for info in &listing.chunks {
        let other = current.is_some_and(|current| current != info.model);
        let mut row = vec![
            info.key.short().to_string(),
            info.tokens.to_string(),
            bytes(info.bytes),
            info.dtype.to_string(),
            format!("{}{}", &info.model_hex()[..8], if other { " *" } else { "" }),
        ];
        row.extend(spaces.then(|| one_line(&info.namespace)));
        row.extend([age(since(info)), one_line(&info.label)]);
        table.push(row);
    }
    let total: u64 = listing.chunks.iter().map(|info| info.bytes).sum();
    let tokens: usize = listing.chunks.iter().map(|info| info.tokens).sum();
    let mut text = table.text();
    text.push_str(&format!(
        "{} of {tokens} tokens, {} in {}\n",
        count(listing.chunks.len(), "chunk"),
        bytes(total),
        tilde(&context.store)
    ));
    if others {
        text.push_str(&format!("* of another model than {}\n", context.global.model));
    }
    print(&text)
}

/// Seconds since the chunk was computed.
fn since(info: &ChunkInfo) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    now.saturating_sub(info.created)
}

fn show(context: &Context, store: &Store, key: &str) -> Result<()> {
    let detail = store.show(&store.resolve(key)?)?;
    let text = text(context, &detail);
    if context.json {
        let mut value = json!(detail);
        value["text"] = json!(text);
        return print_json(&value);
    }
    let info = &detail.info;
    let mut table = Table::new(&["<", "<"]);
    let place = info.path.as_ref().map_or_else(|| "memory".to_owned(), |path| tilde(path));
    for (name, value) in [
        ("key", info.key.to_string()),
        ("text from", one_line(&info.label)),
        ("tokens", info.tokens.to_string()),
        ("shape", format!("{} layers, {} KV heads of {}", info.layers, info.kv_heads, info.head_dim)),
        ("type", info.dtype.to_string()),
        ("size", bytes(info.bytes)),
        (
            "summaries",
            match info.summaries.as_slice() {
                [] => "(none)".to_owned(),
                kinds => format!("{}, {}", kinds.join(", "), bytes(info.summary_bytes)),
            },
        ),
        ("BOS", info.bos.to_string()),
        (
            "namespace",
            if info.namespace.is_empty() { "(none)".to_owned() } else { one_line(&info.namespace) },
        ),
        ("model", info.model_hex()),
        ("age", age(since(info))),
        ("file", place),
    ] {
        table.push(vec![name.to_owned(), value]);
    }
    let rows = table.text();
    print(rows.trim_start())?;
    match text {
        Some(text) => print(&format!("\n{}\n", plain(text.trim_end()))),
        None => {
            context.say(
                "\nits text is not shown: the chunk is of another model than --model, or that is not there",
            );
            Ok(())
        }
    }
}

/// A chunk's text, if its model is at hand.
fn text(context: &Context, detail: &ChunkDetail) -> Option<String> {
    let files = model(context).filter(|files| identity(context, files) == Some(detail.info.model))?;
    Some(Tokenizer::open(&files).ok()?.decode(&detail.token_ids, false))
}

fn remove(context: &Context, store: &Store, keys: &[String], all: bool, yes: bool) -> Result<()> {
    let listing = store.list()?.chunks;
    if all && !yes && (context.json || !io::stdin().is_terminal()) {
        return Err(Fail::new("nothing was removed: --all asks first, and nobody can answer")
            .hint("give --yes")
            .into());
    }
    let keys: Vec<_> = if all {
        let own = listing.iter().filter(|info| info.namespace == context.global.namespace);
        own.map(|info| info.key).collect()
    } else {
        keys.iter().map(|key| store.resolve(key)).collect::<Result<_, _>>()?
    };
    let size = listing.iter().filter(|info| keys.contains(&info.key)).map(|info| info.bytes).sum();
    if !yes && !context.json && io::stdin().is_terminal() && !keys.is_empty() {
        let question = format!("remove {}, {}? [y/N] ", count(keys.len(), "chunk"), bytes(size));
        print(&paint("1", &question, &io::stdout()))?;
        let mut line = String::new();
        io::stdin().lock().read_line(&mut line)?;
        if !matches!(line.trim().to_ascii_lowercase().as_str(), "y" | "yes") {
            return Err(Fail::new("nothing was removed").into());
        }
    }
    let mut removed = 0;
    for key in &keys {
        removed += usize::from(store.remove(key)?);
    }
    if context.json {
        return print_json(&json!({ "removed": removed, "bytes": size }));
    }
    print(&format!("removed {}, {}\n", count(removed, "chunk"), bytes(size)))
}

fn verify(context: &Context, store: &Store) -> Result<()> {
    let bar = context.bar("verifying", "{bytes} of {total_bytes}, {eta} left");
    let report = store.verify(|progress| move_bar(&bar, progress.bytes_done, progress.bytes))?;
    bar.finish_and_clear();
    if context.json {
        return print_json(&report);
    }
    for repair in &report.failed {
        let what = if repair.removed { "removed" } else { "left alone" };
        output::say(&format!("{what}: {}: {}", repair.path.display(), repair.problem));
    }
    for path in &report.foreign {
        output::say(&format!("left alone: {}: not the store's", path.display()));
    }
    for path in &report.orphans {
        output::say(&format!("removed: {}: a summary without its chunk", path.display()));
    }
    let removed = report.failed.iter().filter(|repair| repair.removed).count();
    let left = report.failed.len() - removed;
    let mut text = count(report.whole as usize, "chunk");
    if report.summaries > 0 {
        text.push_str(&format!(" and {} summaries", report.summaries));
    }
    text.push_str(&format!(" whole, {}", bytes(report.bytes)));
    text.push_str(&format!("; {removed} broken and removed"));
    if left > 0 {
        text.push_str(&format!(", {left} left alone"));
    }
    if !report.stale.is_empty() {
        text.push_str(&format!("; {} of dead writers removed", count(report.stale.len(), "temporary file")));
    }
    if removed > 0 {
        text.push_str("\nwhat was removed is computed again when it is needed");
    }
    print(&format!("{text}\n"))
}
