//! Time to compile grammars, and to find the tokens that they allow at every place of a text that follows them.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use refrain_engine::{Engine, Settings, StructuredOutput};
use refrain_model::Specials;
use refrain_store::Store;
use serde_json::Value;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// GGUF file or Hugging Face folder
    model: PathBuf,
    /// Walks of each text; the times of all of them count
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: usize,
}

/// A text that follows a grammar.
struct Case {
    name: &'static str,
    output: StructuredOutput,
    text: String,
}

fn cases() -> Result<Vec<Case>> {
    let schema: Value = serde_json::from_str(include_str!("masks/order.schema.json"))?;
    let order = include_str!("masks/order.json").trim();
    let compact = serde_json::from_str::<Value>(order)?.to_string();
    let list = "1. chain, 2. gears, 3. brakes.";
    Ok(vec![
        Case { name: "json_object", output: StructuredOutput::JsonObject, text: order.to_owned() },
        Case { name: "json_schema", output: StructuredOutput::JsonSchema(schema.clone()), text: order.to_owned() },
        Case { name: "json_schema, compact", output: StructuredOutput::JsonSchema(schema), text: compact },
        Case {
            name: "regex",
            output: StructuredOutput::Regex(r"([0-9]+\. [a-z ]{1,40}, )+[0-9]+\. [a-z ]+\.".to_owned()),
            text: list.to_owned(),
        },
        Case {
            name: "lark",
            output: StructuredOutput::Lark(
                "start: item (\", \" item)* \".\"\nitem: NUMBER \". \" WORD\nNUMBER: /[0-9]+/\nWORD: /[a-z]+/".to_owned(),
            ),
            text: list.to_owned(),
        },
    ])
}

/// Prints a Markdown table of a row a grammar.
pub(crate) fn run(options: &Options) -> Result<()> {
    let engine = Engine::open(&options.model, Store::in_memory(1 << 20), Settings::default(), |_, _| ())?;
    let vocab = engine.decoder().config().vocab;
    let started = Instant::now();
    engine.grammar(&StructuredOutput::Choice(vec!["a".to_owned()]))?;
    println!(
        "{}: {vocab} tokens, read for the first grammar in {:.0} ms; times of a token's mask in µs\n",
        options.model.display(),
        started.elapsed().as_secs_f64() * 1e3
    );
    println!("| grammar | tokens | compiled, ms | median | 99th of 100 | most |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    for Case { name, output, text } in cases()? {
        let tokens = engine.tokenizer().encode(&text, Specials::Plain)?;
        let (mut times, mut compiled) = (Vec::new(), f64::MAX);
        for _ in 0..options.rounds.max(1) {
            let started = Instant::now();
            let mut grammar = engine.grammar(&output)?;
            compiled = compiled.min(started.elapsed().as_secs_f64() * 1e3);
            for token in &tokens {
                let mut logits = vec![0.0; vocab];
                let started = Instant::now();
                grammar.mask(&mut logits)?;
                times.push(started.elapsed().as_secs_f64() * 1e6);
                anyhow::ensure!(
                    logits[*token as usize] == 0.0,
                    "{name}: the text does not follow its grammar"
                );
                grammar.push(*token)?;
            }
        }
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        let (median, late, most) = (at(0.5), at(0.99), at(1.0));
        println!("| {name} | {} | {compiled:.1} | {median:.0} | {late:.0} | {most:.0} |", tokens.len());
    }
    Ok(())
}
