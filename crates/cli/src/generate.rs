//! `refrain generate`: a long text, with a line below it that says how it goes.

use std::io::{self, IsTerminal, Write};
use std::time::Instant;

use anyhow::{Context as _, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use refrain::engine::{Advance, GenerateRequest, Instructions, TokenEvent};
use serde_json::json;

use crate::args;
use crate::ask::{as_json, asked_text, stats_line, warn_of_cut_form};
use crate::documents::{Documents, read_documents};
use crate::ingest::ingest_to_answer;
use crate::limits::{check_biases, check_sampling, grammar, with_room};
use crate::methods;
use crate::output::{
    Exit, NotPrinted, STOPPED, bytes, number, paint, percent, plain, print_json, stream_text,
};
use crate::settings::Context;
use crate::signals::Interrupt;
use crate::table::columns;

/// `refrain generate`
pub(crate) fn run(context: &Context, args: &args::Generate) -> Result<()> {
    let text = asked_text(&args.prompt, "prompt")?;
    let mut sampling = args.sampling.sampling(context.console)?;
    check_sampling(&sampling)?;
    let structured = args.structured.output()?;
    let (method, policy) = (methods::asked(context, &args.method)?, methods::policy(&args.evict)?);
    let Documents { documents, failures, .. } = read_documents(context.console, &args.docs)?;
    let around = Instructions {
        system: args.system.clone(),
        // The text before the documents is that of all commands: it belongs to the identity of chunks.
        before_question: "Use the documents above for what follows.\n\n".to_owned(),
        thinking: args.thinking.thinking,
        ..Instructions::default()
    };
    let engine = context.open_engine(&around)?;
    check_biases(&engine, &sampling)?;
    let grammar = grammar(&engine, structured.as_ref())?;
    let prompt = engine.prompt(&documents, &text, &around)?;
    if !context.max_tokens_given && sampling.max_tokens.to_string() == args::LONG_ANSWER {
        // The default is cut to the room in the context.
        let room = engine.decoder().config().context.saturating_sub(prompt.len());
        sampling.max_tokens = sampling.max_tokens.min(room.max(1));
    }
    let shorter = if documents.is_empty() { "give a shorter prompt" } else { "give fewer documents" };
    engine
        .max_seq_len(&prompt, sampling.max_tokens, &policy.built)
        .map_err(|error| with_room(error.into(), "--max-tokens", shorter))?;
    let interrupt = Interrupt::listen_to_all().context("cannot wait for signals")?;
    let running = interrupt.running();
    let mut ingested = None;
    if method.built.reuses() {
        if !documents.is_empty() {
            ingested = Some(ingest_to_answer(context, &engine, &prompt.chunks, &method, &running)?);
        }
        engine.ingest_system(&prompt)?;
    }
    let request = GenerateRequest {
        eviction: policy.built.clone(),
        grammar,
        speculative_tokens: args.speculation.num_speculative_tokens,
        ignore_eos: args.ignore_eos,
        ..GenerateRequest::new(method.built.clone(), sampling.clone())
    };
    let mut page = Page::new(context, prompt.len());
    let mut prefill = engine.prefill(&prompt, request.clone())?;
    while prefill.advance()? != Advance::Done {
        running.check()?;
    }
    let answer = prefill.answer(|progress| page.show(progress) && !running.is_interrupted())?;
    page.finish()?;
    warn_of_cut_form(context, &request, &answer);
    if context.json {
        let mut value = as_json(&method, &policy, &answer);
        value["failures"] = json!(failures);
        print_json(&value)?;
    } else {
        let line = stats_line(&method, &policy, &answer, ingested.as_ref());
        context.say(&paint("2", &line, &io::stderr()));
    }
    // The text that there is was written, and the status tells that there is no more.
    if running.is_interrupted() { Err(Exit(STOPPED).into()) } else { Ok(()) }
}

/// Where the text goes, and the line below it.
struct Page {
    /// Whether text goes to standard output as it comes.
    writes: bool,
    /// Whether standard output is a terminal.
    to_terminal: bool,
    /// Width of the terminal that both text and status are shown on; none where the text goes elsewhere.
    width: Option<usize>,
    bar: ProgressBar,
    /// The beginning of the line that is not complete yet.
    line: String,
    started: Option<Instant>,
    prompt: usize,
    ends_line: bool,
    failed: Option<io::Error>,
}

impl Page {
    fn new(context: &Context, prompt: usize) -> Page {
        let shown = !context.console.quiet && !context.json && io::stderr().is_terminal();
        let to_terminal = io::stdout().is_terminal();
        let bar = if shown {
            let template = if to_terminal { "{prefix}\n{wide_msg:.dim}" } else { "{wide_msg:.dim}" };
            let style =
                ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10)).with_style(style)
        } else {
            ProgressBar::hidden()
        };
        let width = (shown && to_terminal).then(|| terminal_width().saturating_sub(1).clamp(20, 400));
        Page {
            writes: !context.json,
            to_terminal,
            width,
            bar,
            line: String::new(),
            started: None,
            prompt,
            ends_line: true,
            failed: None,
        }
    }

    /// Takes a token's text; whether to go on.
    fn show(&mut self, progress: TokenEvent<'_>) -> bool {
        // The first token's time is not that of those after it.
        let started = *self.started.get_or_insert_with(Instant::now);
        let rate = (progress.tokens - 1) as f64 / started.elapsed().as_secs_f64().max(1e-9);
        self.bar.set_message(status(&progress, rate, self.prompt + progress.tokens));
        if self.writes && !progress.text.is_empty() {
            match self.width {
                Some(width) => self.lines(progress.text, width),
                None => self.write(&stream_text(progress.text, self.to_terminal)),
            }
        }
        self.failed.is_none()
    }

    /// Writes the lines that are complete, broken at `width`, and leaves the rest above the status.
    fn lines(&mut self, text: &str, width: usize) {
        self.line.push_str(&plain(text));
        while let Some((line, rest)) = broken(&self.line, width) {
            let (line, rest) = (line.to_owned(), rest.to_owned());
            self.bar.suspend(|| self.failed = writeln!(io::stdout(), "{line}").err());
            self.line = rest;
        }
        self.bar.set_prefix(self.line.clone());
    }

    fn write(&mut self, text: &str) {
        let mut out = io::stdout().lock();
        self.ends_line = text.ends_with('\n');
        self.failed = out.write_all(text.as_bytes()).and_then(|()| out.flush()).err();
    }

    fn finish(mut self) -> Result<()> {
        self.bar.finish_and_clear();
        if self.width.is_some() && !self.line.is_empty() {
            self.write(&format!("{}\n", self.line.clone()));
        } else if self.width.is_none() && self.writes && !self.ends_line {
            self.write("\n");
        }
        self.failed.map_or(Ok(()), |error| Err(NotPrinted(error).into()))
    }
}

/// The line below the text. `seen` is the tokens of prompt and answer, all of which full attention retains.
fn status(progress: &TokenEvent<'_>, rate: f64, seen: usize) -> String {
    format!(
        "{} tokens  {} tokens/s  KV {} for {} of {seen} tokens ({})",
        progress.tokens,
        number(rate),
        bytes(progress.kv_bytes as u64),
        progress.retained,
        percent(progress.retained, seen),
    )
}

/// The first line of a text and the rest, if the line is complete: at a line end, or at the last space before it gets
/// wider than `width`.
fn broken(text: &str, width: usize) -> Option<(&str, &str)> {
    if let Some((line, rest)) = text.split_once('\n')
        && line.chars().count() <= width
    {
        return Some((line, rest));
    }
    let (end, _) = text.char_indices().nth(width)?;
    match text[..end].rfind(' ') {
        Some(space) => Some((&text[..space], &text[space + 1..])),
        None => Some(text.split_at(end)),
    }
}

/// Columns of the terminal.
fn terminal_width() -> usize {
    columns(&io::stderr()).unwrap_or(80)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_compares_tokens_with_tokens_and_fits_80_columns() {
        let event = TokenEvent {
            text: "",
            tokens: 76,
            token: None,
            logprobs: None,
            retained: 113,
            kv_bytes: 13_841_000,
            kv_bytes_held: 2_603_520,
        };
        assert_eq!(
            status(&event, 68.4, 114),
            "76 tokens  68 tokens/s  KV 13.2 MiB for 113 of 114 tokens (99 %)"
        );
        let long = TokenEvent { tokens: 50_000, retained: 2048, ..event };
        assert!(status(&long, 1234.5, 150_000).len() < 80);
    }

    #[test]
    fn lines_break_at_their_ends_at_spaces_and_where_there_is_none() {
        assert_eq!(broken("one\ntwo", 10), Some(("one", "two")));
        assert_eq!(broken("one two three", 8), Some(("one two", "three")));
        assert_eq!(broken("onetwothree", 4), Some(("onet", "wothree")));
        assert_eq!(broken("one two", 10), None);
        assert_eq!(broken("ä€ ä€ ä€\n", 4), Some(("ä€", "ä€ ä€\n")));
        assert_eq!(broken("\n\nx", 4), Some(("", "\nx")));
    }
}
