//! How near bf16 and q8 weights come to f32, over f32's own answers to real prompts.

use std::path::{Path, PathBuf};

use anyhow::Result;
use refrain_engine::{Agreement, Document, Engine, Settings};
use refrain_kernels::Precision;
use refrain_store::Store;

const DOCUMENTS: [&str; 3] = [
    include_str!("../../../examples/docs/drive/chain.md"),
    include_str!("../../../examples/docs/drive/gears.md"),
    include_str!("../../../examples/docs/drive/brakes.md"),
];
const QUESTIONS: &str = include_str!("../../../examples/questions-drive.txt");

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// GGUF file or Hugging Face folder
    model: PathBuf,
    /// File or folder that the questions are asked of; may be given several times [default: a built-in text]
    #[arg(long, value_name = "PATH")]
    docs: Vec<PathBuf>,
    /// File of questions, one a line [default: 20 about the built-in text]
    #[arg(long, value_name = "FILE")]
    questions: Option<PathBuf>,
    /// Most tokens of each answer that are compared
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Threads; 0 for one a core
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
}

/// Prints a Markdown table of a row a precision.
pub(crate) fn run(options: &Options) -> Result<()> {
    let documents = documents(&options.docs)?;
    let text =
        options.questions.as_ref().map_or_else(|| Ok(QUESTIONS.to_owned()), std::fs::read_to_string)?;
    let questions: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if let Some(file) = options.questions.as_ref().filter(|_| questions.is_empty()) {
        let file = file.display();
        anyhow::bail!("{file} has no question: give a file with one a line, or leave --questions out");
    }
    let (model, tokens) = (options.model.display(), options.tokens as usize);
    println!("{model}, {} prompts, up to {tokens} tokens of each answer, against f32\n", questions.len());
    println!("| weights | MiB | mean KL | worst prompt | same top token | positions |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    let exact = open(options, Precision::F32)?;
    for precision in [Precision::Bf16, Precision::Q8] {
        let engine = open(options, precision)?;
        let compare = |question: &&str| -> Result<Agreement> {
            let prompt = engine.prompt(&documents, question, &Default::default())?;
            Ok(engine.agreement_with(&exact, &prompt, tokens)?)
        };
        let found = questions.iter().map(compare).collect::<Result<Vec<_>>>()?;
        println!("{}", row(&engine, &found));
    }
    Ok(())
}

/// Documents of files and folders; the built-in ones if there are no paths.
pub(crate) fn documents(paths: &[PathBuf]) -> Result<Vec<Document>> {
    let mut documents = Vec::new();
    for path in paths {
        let read = refrain_documents::read_path(path);
        if let Some(failure) = read.failures.first() {
            anyhow::bail!("{failure}");
        }
        documents.extend(read.documents);
    }
    if paths.is_empty() {
        documents = DOCUMENTS.map(|text| Document { title: String::new(), text: text.to_owned() }).to_vec();
    }
    if documents.is_empty() {
        anyhow::bail!("{paths:?} hold no document: give files or folders that do, or leave --docs out");
    }
    Ok(documents)
}

fn open(options: &Options, precision: Precision) -> Result<Engine> {
    let settings = Settings { precision: Some(precision), threads: options.threads, ..Settings::default() };
    Ok(Engine::open(Path::new(&options.model), Store::in_memory(1 << 30), settings, |_, _| ())?)
}

/// Means are over all positions of all prompts.
fn row(engine: &Engine, found: &[Agreement]) -> String {
    let positions: usize = found.iter().map(|agreement| agreement.positions).sum();
    let mean = |of: fn(&Agreement) -> f64| {
        let sum: f64 = found.iter().map(|agreement| of(agreement) * agreement.positions as f64).sum();
        sum / positions as f64
    };
    format!(
        "| {} | {} | {:.1e} | {:.1e} | {:.1} % | {positions} |",
        engine.decoder().precision(),
        engine.decoder().weight_bytes() >> 20,
        mean(|agreement| agreement.kl),
        found.iter().map(|agreement| agreement.kl).fold(0.0, f64::max),
        100.0 * mean(|agreement| agreement.top1),
    )
}
