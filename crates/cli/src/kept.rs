//! `refrain documents`: lists and removes the documents that `refrain ask --search` finds.

use std::collections::BTreeSet;

use anyhow::Result;
use refrain::corpus::{
    Change, ChangeKind, Corpus, DocumentStore, Error as CorpusError, LocalDocuments, StoredDocument,
};
use refrain::engine::Instructions;
use refrain::folders::tilde;
use refrain::store::{DOCUMENTS, Store};
use serde_json::json;

use crate::args::Kept as Command;
use crate::machine::seconds_since;
use crate::output::{Fail, age, bytes, confirmed, count, one_line, print, print_json, warn};
use crate::settings::Context;
use crate::table::Table;

/// Ids that an error shows of those that a beginning could mean.
const MOST_SHOWN: usize = 10;

/// `refrain documents`
pub(crate) fn run(context: &Context, command: &Command) -> Result<()> {
    match command {
        Command::Ls => list(context),
        Command::Rm { ids, all, yes } => remove(context, ids, *all, *yes),
    }
}

/// The documents of the own namespace, with the stores of chunks and of documents; no model is needed for them.
struct Opened {
    store: Store,
    documents: Box<dyn DocumentStore>,
    kept: Vec<StoredDocument>,
    /// Ids of removed documents of which something is left, without those of documents that are kept again.
    unfinished: BTreeSet<String>,
}

fn open(context: &Context) -> Result<Opened> {
    let store = context.existing_store()?;
    let (documents, namespace) = (context.documents(&store)?, context.existing_namespace()?);
    // Chunks of what others have removed are removed by a program that has the model.
    let mut removed = BTreeSet::new();
    let mut applied = |changes: Vec<Change>| {
        let own = changes.into_iter().filter(|change| change.namespace == namespace);
        removed.extend(own.filter(|change| change.kind == ChangeKind::Removed).map(|change| change.id));
        Ok(())
    };
    if let Err(error) = documents.pull(None, &mut applied) {
        warn(&format!("these are the documents that this machine knows: {error}"));
    }
    let (mut kept, _) = documents.local().list(&namespace, "", usize::MAX)?;
    kept.retain(|document| !removed.contains(&document.id));
    let is_kept = |id: &String| kept.iter().any(|document| document.id == *id);
    let unfinished = documents.unfinished_removals()?.into_iter().filter(|(of, ..)| *of == namespace);
    let unfinished = unfinished.map(|(_, id, _)| id).filter(|id| !is_kept(id)).collect();
    Ok(Opened { store, documents, kept, unfinished })
}

/// Whether the own namespace has documents in the store's folder; no where they cannot be read at once, as while a server has them open.
pub(crate) fn has_documents(context: &Context, store: &Store) -> bool {
    let is_any = |folder| -> Result<bool> {
        let documents = LocalDocuments::open_at_once(folder)?;
        Ok(!documents.list(&context.namespace()?, "", 1)?.0.is_empty())
    };
    let folder = store.folder().filter(|folder| folder.join(DOCUMENTS).exists());
    folder.is_some_and(|folder| is_any(folder).unwrap_or(false))
}

fn list(context: &Context) -> Result<()> {
    let kept = open(context)?.kept;
    if context.json {
        return print_json(&json!({ "documents": kept }));
    }
    if kept.is_empty() {
        print(&format!("no documents in {}\n", tilde(&context.store)))?;
        context.say("bring some with `refrain ingest FILES`");
        return Ok(());
    }
    let mut table = Table::new(&["<id", "chunks", "tokens", "size", "age", "<title"]);
    for document in &kept {
        table.push(vec![
            document.id.clone(),
            document.chunks.to_string(),
            document.tokens.to_string(),
            bytes(document.bytes),
            age(seconds_since(document.created)),
            one_line(&document.title),
        ]);
    }
    print(&table.text())
}

fn remove(context: &Context, named: &[String], all: bool, yes: bool) -> Result<()> {
    let Opened { store, documents, kept, unfinished } = open(context)?;
    let (begun, named): (Vec<String>, Vec<String>) =
        named.iter().cloned().partition(|id| unfinished.contains(id));
    let begun = if all { unfinished } else { begun.into_iter().collect() };
    let chosen = if all { kept } else { named_ones(&kept, &named)? };
    let what = count(chosen.len() + begun.len(), "document");
    if !yes {
        confirmed(
            context.json,
            all,
            chosen.len() + begun.len(),
            &format!("remove {what} and their chunks?"),
        )?;
    }
    if !chosen.is_empty() || !begun.is_empty() {
        // The model says which chunks are of the documents; nothing is searched, so that nothing is indexed.
        let engine = context.engine_on(store, &Instructions::default())?;
        let corpus = Corpus::unindexed(&engine, documents)?;
        chosen.iter().try_for_each(|document| corpus.remove(&engine, &document.id))?;
        for id in &begun {
            match corpus.remove(&engine, id) {
                // The corpus has finished the removal when it was opened.
                Err(CorpusError::NotFound(_)) => {}
                removed => removed?,
            }
        }
    }
    if context.json {
        return print_json(&json!({ "removed": chosen, "finished": begun }));
    }
    print(&format!("removed {what}\n"))
}

/// The documents that ids, or their beginnings, name.
fn named_ones(kept: &[StoredDocument], named: &[String]) -> Result<Vec<StoredDocument>> {
    let mut chosen: Vec<StoredDocument> = Vec::new();
    for name in named {
        if name.strip_prefix("doc-").is_none_or(str::is_empty) {
            return Err(Fail::new(format!(
                "{name:?} names no document: give doc- and a digit of its id at least"
            ))
            .hint("`refrain documents ls` lists the ids")
            .into());
        }
        let found: Vec<_> = kept.iter().filter(|document| document.id.starts_with(name.as_str())).collect();
        let document = match found[..] {
            [document] => document,
            [_, _, ..] => {
                let mut ids: Vec<_> =
                    found.iter().take(MOST_SHOWN).map(|document| document.id.as_str()).collect();
                if found.len() > MOST_SHOWN {
                    ids.push("…");
                }
                let message = format!("{} begin with {name}: {}", count(found.len(), "id"), ids.join(", "));
                return Err(Fail::new(message).hint("give more digits of the one that is meant").into());
            }
            [] => {
                return Err(Fail::new(format!("there is no document {name}"))
                    .hint("`refrain documents ls` lists them")
                    .into());
            }
        };
        if !chosen.iter().any(|other| other.id == document.id) {
            chosen.push(document.clone());
        }
    }
    Ok(chosen)
}
