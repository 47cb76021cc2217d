//! `refrain bench precision`: how near bf16 and q8 come to f32.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use refrain_engine::{Agreement, Document, Engine};
use refrain_kernels::Precision;
use refrain_store::Store;
use serde::Serialize;
use serde_json::json;

use super::ttft::BUILT_IN;
use crate::args;
use crate::output::{Fail, count, print, print_json};
use crate::settings::{Context, read_documents};
use crate::table::Table;

/// Asked of the built-in documents.
const QUESTIONS: &str = include_str!("../../../../examples/precision.txt");

/// One precision beside f32.
#[derive(Debug, Serialize)]
struct Row {
    precision: String,
    /// Mean over all positions of all prompts.
    kl: f64,
    /// The prompt with the largest mean.
    worst_kl: f64,
    top1: f64,
    positions: usize,
    weight_bytes: usize,
}

/// `refrain bench precision`
pub(crate) fn run(context: &Context, args: &args::Precisions) -> Result<()> {
    let (questions, documents) = (questions(args.questions.as_deref())?, documents(&args.docs)?);
    let open = |precision| {
        let mut context = context.clone();
        context.global.compute = args::Compute(Some(precision));
        context.engine_on(Store::in_memory(context.global.memory))
    };
    let exact = open(Precision::F32)?;
    let mut rows = Vec::new();
    for precision in [Precision::Bf16, Precision::Q8] {
        let engine = open(precision)?;
        let agreements = compare(context, &exact, &engine, &documents, &questions, args.tokens)?;
        rows.push(Row::new(&engine, &agreements));
    }
    if context.json {
        let model = &context.global.model;
        return print_json(&json!({ "model": model, "prompts": questions.len(), "results": rows }));
    }
    let about = format!(
        "{}, {} over {}, up to {} of each answer, against f32",
        context.global.model,
        count(questions.len(), "prompt"),
        count(documents.len(), "document"),
        count(args.tokens, "token")
    );
    print(&format!("{about}\n\n{}", table(&rows).text()))
}

/// Those of a file, one a line; without one, those about the built-in documents.
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

/// Those of files and folders; without any, the built-in ones.
pub(super) fn documents(paths: &[PathBuf]) -> Result<Vec<Document>> {
    if paths.is_empty() {
        return Ok(BUILT_IN.map(|text| Document { title: String::new(), text: text.to_owned() }).to_vec());
    }
    read_documents(paths)
}

fn compare(
    context: &Context,
    exact: &Engine,
    engine: &Engine,
    documents: &[Document],
    questions: &[String],
    tokens: usize,
) -> Result<Vec<Agreement>> {
    let bar = context.bar("comparing", "{pos}/{len} prompts");
    bar.set_length(questions.len() as u64);
    let mut agreements = Vec::new();
    for question in questions {
        let prompt = engine.prompt(documents, question, &Default::default())?;
        agreements.push(engine.agreement_with(exact, &prompt, tokens)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(agreements)
}

impl Row {
    fn new(engine: &Engine, agreements: &[Agreement]) -> Row {
        let positions: usize = agreements.iter().map(|a| a.positions).sum();
        let mean = |of: fn(&Agreement) -> f64| {
            agreements.iter().map(|a| of(a) * a.positions as f64).sum::<f64>() / positions as f64
        };
        Row {
            precision: engine.decoder().precision().to_string(),
            kl: mean(|a| a.kl),
            worst_kl: agreements.iter().map(|a| a.kl).fold(0.0, f64::max),
            top1: mean(|a| a.top1),
            positions,
            weight_bytes: engine.decoder().weight_bytes(),
        }
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table =
        Table::new(&["<weights", "bytes", "mean KL", "worst prompt", "same top token", "positions"]);
    for row in rows {
        table.push(vec![
            row.precision.clone(),
            crate::output::bytes(row.weight_bytes as u64),
            format!("{:.1e}", row.kl),
            format!("{:.1e}", row.worst_kl),
            format!("{:.1} %", 100.0 * row.top1),
            row.positions.to_string(),
        ]);
    }
    table
}
