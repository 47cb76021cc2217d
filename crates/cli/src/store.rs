//! `refrain store`: lists, shows, verifies, pins and removes stored chunks.

mod archive;
#[cfg(feature = "remote")]
mod prune;
mod selection;

use std::collections::BTreeMap;
use std::time::SystemTime;

use anyhow::Result;
use refrain::model::{ModelFiles, Tokenizer};
use refrain::store::{ChunkDetail, ChunkInfo, KvQuantization, Scope, Store, hex};
use serde_json::json;

use crate::args::{Keep, Store as Command};
use crate::machine::{now, seconds_since};
use crate::output;
use crate::output::{
    age, bytes, confirmed, count, json_path, one_line, percent, plain, print, print_json, show as move_bar,
    warn,
};
use crate::settings::Context;
use crate::table::Table;
use refrain::folders::tilde;

use self::selection::keys;

/// `refrain store`
pub(crate) fn run(context: &Context, command: &Command) -> Result<()> {
    // The object store alone is looked at.
    #[cfg(feature = "remote")]
    if let Command::Prune(args) = command {
        return prune::run(context, args);
    }
    let store = match command {
        Command::Import { .. } => context.open_store()?,
        // An archive of nothing is of no use.
        Command::Export { .. } if context.lacks_store() => return Err(context.no_store()),
        _ => context.existing_store()?,
    };
    let outcome = match command {
        #[cfg(feature = "remote")]
        Command::Prune(_) => Ok(()),
        Command::Stats => stats(context, &store),
        Command::Ls { all } => list(context, &store, *all),
        Command::Show { key } => show(context, &store, key),
        Command::Rm { keys, all, yes } => remove(context, &store, keys, *all, *yes),
        Command::Verify => verify(context, &store),
        Command::Gc => gc(context, &store),
        Command::Pin { keys, all, remove, keep } => pin(context, &store, (keys, *all), *remove, *keep),
        Command::Export { file, keys, all } => archive::export(context, &store, file, keys, *all),
        Command::Import { file, namespaces } => archive::import(context, &store, file, *namespaces),
    };
    if let Some(why) = store.take_set_aside() {
        warn(&format!(
            "the index of {} was broken and has been made anew from the chunks; pins and times to live are lost: {why}",
            tilde(&context.store)
        ));
    }
    outcome
}

fn stats(context: &Context, store: &Store) -> Result<()> {
    #[derive(Default, serde::Serialize)]
    struct Group {
        chunks: usize,
        tokens: usize,
        bytes: u64,
    }
    impl Group {
        fn add(&mut self, info: &ChunkInfo) {
            self.chunks += 1;
            self.tokens += info.tokens;
            self.bytes += info.bytes + info.aux_bytes;
        }
    }
    let (stats, chunks) = (store.stats(), store.list(Scope::All)?.chunks);
    let (mut namespaces, mut models) = (BTreeMap::<&str, Group>::new(), BTreeMap::<String, Group>::new());
    let (mut pinned, mut expiring, mut all) = (Group::default(), Group::default(), Group::default());
    for info in &chunks {
        all.add(info);
        namespaces.entry(&info.namespace).or_default().add(info);
        models.entry(info.model_hex()).or_default().add(info);
        if info.pinned {
            pinned.add(info);
        }
        if info.expires.is_some() {
            expiring.add(info);
        }
    }
    // An index that cannot be used knows no totals.
    let (held, size) = match stats.disk_chunks {
        0 => (all.chunks, all.bytes),
        held => (held as usize, stats.disk_bytes),
    };
    if stats.disk_chunks == 0 && held > 0 {
        warn(&format!(
            "the index of {} cannot be used or knows no chunk, so that the files are counted: `refrain store gc` tells why, or enters them",
            tilde(&context.store)
        ));
    }
    let limits = context.limits();
    let limit = limits.disk;
    let quota = |namespace: &str| Some(limits.quota_of(namespace)).filter(|quota| *quota != u64::MAX);
    if context.json {
        return print_json(&json!({
            "folder": json_path(&context.store),
            "disk": { "chunks": held, "bytes": size, "limit": limit },
            "pinned": pinned,
            "expiring": expiring,
            "namespaces": namespaces.iter().map(|(name, group)| {
                let quota = quota(name);
                (*name, json!({ "chunks": group.chunks, "tokens": group.tokens, "bytes": group.bytes, "quota": quota }))
            }).collect::<BTreeMap<_, _>>(),
            "models": models,
        }));
    }
    let mut text = format!(
        "{} holds {}, {} of {} ({})\n",
        tilde(&context.store),
        count(held, "chunk"),
        bytes(size),
        bytes(limit),
        percent(size as usize, limit as usize)
    );
    for (what, group) in [("pinned", &pinned), ("with a time to live", &expiring)] {
        if group.chunks > 0 {
            text.push_str(&format!("{what}: {}, {}\n", count(group.chunks, "chunk"), bytes(group.bytes)));
        }
    }
    let current =
        model(context).and_then(|files| context.identity(&files).ok()).map(|model| hex::encode(&model));
    let mut table = Table::new(&["<of", "chunks", "tokens", "size", "<"]);
    for (namespace, group) in &namespaces {
        let name = if namespace.is_empty() { "(no name)".to_owned() } else { one_line(namespace) };
        let quota = quota(namespace).map_or(String::new(), |quota| format!("of {}", bytes(quota)));
        table.push(row(&format!("namespace {name}"), group.chunks, group.tokens, group.bytes, &quota));
    }
    for (model, group) in &models {
        let note = if current.as_ref() == Some(model) { context.global.model.as_str() } else { "" };
        table.push(row(&format!("model {}", &model[..8]), group.chunks, group.tokens, group.bytes, note));
    }
    if !chunks.is_empty() {
        text.push_str(&table.text());
    }
    print(&text)
}

fn row(name: &str, chunks: usize, tokens: usize, size: u64, note: &str) -> Vec<String> {
    vec![name.to_owned(), chunks.to_string(), tokens.to_string(), bytes(size), note.to_owned()]
}

fn gc(context: &Context, store: &Store) -> Result<()> {
    let report = store.gc()?;
    if context.json {
        return print_json(&report);
    }
    for path in &report.orphans {
        output::say(&format!("removed: {}: an aux tensors file without its chunk", path.display()));
    }
    for path in &report.stale {
        output::say(&format!("removed: {}: left by a program that died", path.display()));
    }
    let removed = report.expired + report.evicted;
    let mut text = format!("removed {}, {}", count(removed as usize, "chunk"), bytes(report.freed));
    if report.expired > 0 {
        text.push_str(&format!(" ({} over their time)", report.expired));
    }
    if report.entered + report.forgotten > 0 {
        text.push_str(&format!(
            "; the index learned of {} and forgot {}",
            count(report.entered as usize, "file"),
            report.forgotten
        ));
    }
    let left = count(report.chunks as usize, "chunk");
    print(&format!("{text}\n{left} left, {} of {}\n", bytes(report.bytes), bytes(context.global.disk)))
}

fn pin(
    context: &Context,
    store: &Store,
    (named, all): (&[String], bool),
    remove: bool,
    keep: Option<Keep>,
) -> Result<()> {
    let mut changed = 0;
    for key in keys(context, store, named, all)? {
        let mut there = store.pin(&[key], !remove)? == 1;
        if let Some(keep) = keep {
            let at = match keep {
                Keep::Never => None,
                Keep::For(time) => SystemTime::now().checked_add(time),
            };
            there |= store.expire(&key, at)?;
        }
        changed += usize::from(there);
    }
    if context.json {
        return print_json(&json!({ "changed": changed }));
    }
    let what = match (remove, keep) {
        (true, _) => "unpinned",
        (false, None) => "pinned",
        (false, Some(Keep::Never)) => "pinned without an end",
        (false, Some(Keep::For(_))) => "pinned until their time is over",
    };
    print(&format!("{} {what}\n", count(changed, "chunk")))
}

/// The model that the options name, if it can be opened. Its headers are read, no weights.
fn model(context: &Context) -> Option<ModelFiles> {
    refrain::resolve(&context.global.model, &context.models).ok().and_then(|path| ModelFiles::open(path).ok())
}

fn list(context: &Context, store: &Store, all: bool) -> Result<()> {
    let namespace = context.existing_namespace()?;
    let listing = store.list(if all { Scope::All } else { Scope::Namespace(&namespace) })?;
    let current = model(context).and_then(|files| context.identity(&files).ok());
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
    let kept = listing.chunks.iter().any(|info| info.pinned || info.expires.is_some());
    let prefixes = listing.chunks.iter().any(|info| info.prefix.is_some());
    let mut header = vec!["<key", "tokens", "size", "<type", "<model"];
    header.extend(prefixes.then_some("<prefix"));
    header.extend(spaces.then_some("<namespace"));
    header.extend(kept.then_some("<kept"));
    header.extend(["age", "used", "<text"]);
    let mut table = Table::new(&header);
    for info in &listing.chunks {
        let other = current.is_some_and(|current| current != info.model);
        let mut row = vec![
            info.key.short().to_string(),
            info.tokens.to_string(),
            bytes(info.bytes),
            kind(info),
            format!("{}{}", &info.model_hex()[..8], if other { " *" } else { "" }),
        ];
        row.extend(
            prefixes
                .then(|| info.prefix.map_or_else(String::new, |prefix| hex::encode(&prefix)[..8].to_owned())),
        );
        row.extend(spaces.then(|| one_line(&info.namespace)));
        row.extend(kept.then(|| keeping(info)));
        let used = info.used.map_or_else(String::new, |used| age(seconds_since(used)));
        row.extend([age(since(info)), used, one_line(&info.label)]);
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

/// Type of the elements, and how they lie at rest.
fn kind(info: &ChunkInfo) -> String {
    match info.quantization {
        KvQuantization::Exact => info.dtype.to_string(),
        quantization => format!("{} as {quantization}", info.dtype),
    }
}

/// Seconds since the chunk was computed.
fn since(info: &ChunkInfo) -> u64 {
    seconds_since(info.created)
}

/// Whether it is pinned, and how long it stays.
fn keeping(info: &ChunkInfo) -> String {
    let left = info.expires.map(|at| format!("{} more", age(at.saturating_sub(now()))));
    let pinned = info.pinned.then(|| "pinned".to_owned());
    pinned.into_iter().chain(left).collect::<Vec<_>>().join(", ")
}

fn show(context: &Context, store: &Store, key: &str) -> Result<()> {
    let namespace = context.existing_namespace()?;
    let detail = store.show(&store.resolve(key, Scope::Namespace(&namespace))?)?;
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
        ("type", kind(info)),
        ("size", bytes(info.bytes)),
        (
            "aux tensors",
            match info.aux_kinds.as_slice() {
                [] => "(none)".to_owned(),
                kinds => format!("{}, {}", kinds.join(", "), bytes(info.aux_bytes)),
            },
        ),
        ("BOS", info.bos.to_string()),
        ("prefix", info.prefix.map_or_else(|| "(none)".to_owned(), |prefix| hex::encode(&prefix))),
        (
            "namespace",
            if info.namespace.is_empty() { "(none)".to_owned() } else { one_line(&info.namespace) },
        ),
        ("model", info.model_hex()),
        ("numerics", info.numerics.as_deref().map_or_else(|| "(not known)".to_owned(), one_line)),
        ("age", age(since(info))),
        ("kept", Some(keeping(info)).filter(|kept| !kept.is_empty()).unwrap_or("while there is room".into())),
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

/// A chunk's text, if its model can be opened.
fn text(context: &Context, detail: &ChunkDetail) -> Option<String> {
    let files = model(context).filter(|files| context.identity(files).ok() == Some(detail.info.model))?;
    Some(Tokenizer::open(&files).ok()?.decode(&detail.token_ids, false))
}

fn remove(context: &Context, store: &Store, named: &[String], all: bool, yes: bool) -> Result<()> {
    let namespace = context.existing_namespace()?;
    let listing = store.list(Scope::Namespace(&namespace))?.chunks;
    let keys = keys(context, store, named, all)?;
    let size = listing.iter().filter(|info| keys.contains(&info.key)).map(|info| info.bytes).sum();
    if !yes {
        let question = format!("remove {}, {}?", count(keys.len(), "chunk"), bytes(size));
        confirmed(context.json, all, keys.len(), &question)?;
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
    let bar = context.bar("verifying", "{bytes} of {total_bytes}{left}");
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
        output::say(&format!("removed: {}: an aux tensors file without its chunk", path.display()));
    }
    let removed = report.failed.iter().filter(|repair| repair.removed).count();
    let left = report.failed.len() - removed;
    let mut text = count(report.whole as usize, "chunk");
    if report.aux_files > 0 {
        text.push_str(&format!(" and {} aux tensors files", report.aux_files));
    }
    text.push_str(&format!(" whole, {}", bytes(report.bytes)));
    text.push_str(&format!("; {removed} broken and removed"));
    if left > 0 {
        text.push_str(&format!(", {left} left alone"));
    }
    if !report.stale.is_empty() {
        text.push_str(&format!("; {} of dead writers removed", count(report.stale.len(), "temporary file")));
    }
    if let Some(problem) = &report.index_problem {
        warn(problem);
    }
    if removed > 0 {
        text.push_str("\nwhat was removed is computed again when it is needed");
    }
    print(&format!("{text}\n"))
}
