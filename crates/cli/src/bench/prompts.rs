//! Engine, documents, questions and prompts that benchmarks measure with.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use refrain::engine::{Document, Engine, Instructions, Prompt, PromptChunk};
use refrain::store::Store;
use tempfile::TempDir;

use crate::documents::read_documents;
use crate::output::{Console, Fail};
use crate::settings::Context;
use crate::signals::remove_at_signal;

const DOCUMENTS: [&str; 3] = [
    include_str!("../../../../examples/docs/drive/chain.md"),
    include_str!("../../../../examples/docs/drive/gears.md"),
    include_str!("../../../../examples/docs/drive/brakes.md"),
];
/// Questions about [`DOCUMENTS`], one a line.
const QUESTIONS: &str = include_str!("../../../../examples/questions-drive.txt");

/// A temporary folder for the chunks of a benchmark, which Ctrl-C and SIGTERM remove as well.
pub(super) fn folder() -> Result<TempDir> {
    let folder = tempfile::Builder::new()
        .prefix("refrain-bench-")
        .tempdir()
        .context("cannot make a folder for the chunks of this benchmark")?;
    remove_at_signal(folder.path()).context("cannot wait for signals")?;
    Ok(folder)
}

/// The engine on a temporary store, which is removed with the folder.
pub(super) fn engine(context: &Context) -> Result<(Engine, TempDir)> {
    let folder = folder()?;
    Ok((
        context.engine_on(Store::open(folder.path(), context.global.memory)?, &Instructions::default())?,
        folder,
    ))
}

/// Documents of files and folders; the built-in ones if there are no paths.
pub(super) fn documents(paths: &[PathBuf]) -> Result<Vec<Document>> {
    if paths.is_empty() {
        return Ok(DOCUMENTS.map(|text| Document { title: String::new(), text: text.to_owned() }).to_vec());
    }
    // A bar would stand among the lines of the benchmark.
    Ok(read_documents(Console { quiet: true, logs: false }, paths)?.documents)
}

/// Questions of a file, one a line; the built-in ones if there is no file.
pub(super) fn questions(file: Option<&Path>) -> Result<Vec<String>> {
    let text = match file {
        None => QUESTIONS.to_owned(),
        Some(path) => std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the questions in {}", path.display()))?,
    };
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let questions: Vec<String> = lines.map(str::to_owned).collect();
    if questions.is_empty() {
        return Err(Fail::new("there is no question to compare with").into());
    }
    Ok(questions)
}

/// A prompt of each length: the documents' tokens, repeated as often as it takes, cut into documents of `document_tokens`
/// tokens (one chunk each if none), and these into chunks.
pub(super) fn prompts(
    engine: &Engine,
    docs: &[PathBuf],
    question: &str,
    lengths: &[usize],
    document_tokens: Option<usize>,
) -> Result<Vec<Prompt>> {
    let whole = engine.prompt(&documents(docs)?, question, &Default::default())?;
    let text: Vec<u32> = whole.chunks.iter().flat_map(|chunk| chunk.tokens.iter().copied()).collect();
    if text.is_empty() {
        return Err(Fail::new("the documents hold no text to cut prompts from").into());
    }
    let around = whole.len() - whole.document_tokens();
    let most = engine.decoder().config().context.saturating_sub(1);
    let prompt = |length: &usize| {
        if *length <= around || *length > most {
            let message = format!("no prompt of {length} tokens can be measured");
            let hint = format!(
                "choose --lengths from {} to {most}: system part and question take {around}",
                around + 1
            );
            return Err(Fail::usage(message).hint(hint).into());
        }
        let tokens: Vec<u32> = text.iter().copied().cycle().take(length - around).collect();
        let most = engine.settings().chunk_tokens;
        let document = |(document, tokens): (usize, &[u32])| -> Vec<PromptChunk> {
            let title = format!("benchmark {}", document + 1);
            let chunks = engine.whole_document(tokens.chunks(most).map(<[u32]>::to_vec).collect());
            chunks.into_iter().map(|chunk| PromptChunk { title: title.clone(), document, ..chunk }).collect()
        };
        let chunks = tokens.chunks(document_tokens.unwrap_or(most)).enumerate().flat_map(document).collect();
        Ok(Prompt { chunks, ..whole.clone() })
    };
    lengths.iter().map(prompt).collect()
}
