//! `refrain ask`: an answer, its stats, and methods side by side.

use std::io::{self, IsTerminal, Read, Write};
use std::sync::Once;

use anyhow::{Context as _, Result};
use refrain::corpus::{Found, Library, Source};
use refrain::engine::{
    Advance, Answer, Comparison, Document, Engine, FinishReason, GenerateRequest, IngestReport, Prompt,
    PromptChunk, RequestStats, TokenEvent,
};
use refrain::eviction::Eviction;
use serde_json::{Value, json};

use crate::args;
use crate::documents::{Documents, read_documents};
use crate::explain::explained;
use crate::ingest::ingest_to_answer;
use crate::kept::has_documents;
use crate::limits::{check_biases, check_sampling, grammar, with_room};
use crate::methods::{self, Method, Policy};
use crate::output::{
    Fail, NotPrinted, broken, bytes, count, number, one_line, paint, percent, print, print_json, seconds,
    stream_text, warn,
};
use crate::settings::Context;
use crate::signals::{Interrupt, Interruptible};
use crate::table::{Table, columns};
use refrain::AUTO;
use refrain::folders::tilde;
use refrain_server::shows_colours;

/// `refrain ask`
pub(crate) fn run(context: &Context, args: &args::Ask) -> Result<()> {
    let question = asked_text(&args.question, "question")?;
    let sampling = args.sampling.sampling(context.console)?;
    check_sampling(&sampling)?;
    let structured = args.structured.output()?;
    let (answering, compared, policy) = selected(context, args)?;
    if args.search.is_some() && args.prompt.docs.is_empty() && context.lacks_store() {
        return Err(context.no_store());
    }
    let Documents { documents, failures, .. } = read_documents(context.console, &args.prompt.docs)?;
    let engine = context.open_engine(&args.prompt.instructions())?;
    check_biases(&engine, &sampling)?;
    let grammar = grammar(&engine, structured.as_ref())?;
    let methods = || answering.iter().chain(&compared);
    let whole_documents = methods().any(|asked| !asked.built.statistics().is_empty());
    let Sourced { chunks, sources } = match args.search {
        Some(limit) => {
            let library = library(context, &engine, &documents)?;
            searched(context, &library, &question, limit as usize, whole_documents)?
        }
        None => Sourced { chunks: engine.chunks(&documents)?, sources: None },
    };
    let prompt = engine.prompt_of_chunks(chunks, &question, &args.prompt.instructions())?;
    let most = if compared.is_empty() { 0 } else { args.compare_tokens as usize };
    let shorter = match (args.search, args.prompt.docs.is_empty()) {
        (Some(_), _) => "search for fewer chunks with --search=N",
        (None, false) => {
            "give fewer documents, or answer from the chunks that match the question with --search"
        }
        (None, true) => "ask a shorter question",
    };
    let fits = |tokens, policy: &Eviction, option| {
        engine.max_seq_len(&prompt, tokens, policy).map_err(|error| with_room(error.into(), option, shorter))
    };
    fits(sampling.max_tokens, &policy.built, "--max-tokens")?;
    // Methods are compared over an answer of full attention.
    fits(most, Eviction::full(), "--compare-tokens")?;
    let reuses = methods().any(|asked| asked.built.reuses());
    let interrupt = Interrupt::default();
    let running = interrupt.running();
    let ingested = ingest_all(context, &engine, &prompt.chunks, methods(), &running)?;
    if reuses {
        engine.ingest_system(&prompt)?;
    }
    let mut answers = Vec::new();
    for asked in &answering {
        let titled = answering.len() > 1 && !context.json;
        if titled {
            print(&format!("{}\n", paint("1", &asked.spec, &io::stdout())))?;
        }
        let request = GenerateRequest {
            eviction: policy.built.clone(),
            explain: args.explain,
            grammar: grammar.clone(),
            speculative_tokens: args.speculation.num_speculative_tokens,
            ..GenerateRequest::new(asked.built.clone(), sampling.clone())
        };
        let waited_for = ingested.iter().find(|(kinds, _)| asked.built.reuses() && *kinds == kinds_of(asked));
        let waited_for = waited_for.map(|(_, report)| report);
        let answer = answer(context, &engine, &prompt, (asked, &policy), (&request, waited_for), &running)?;
        if titled {
            print("\n")?;
        }
        answers.push(as_json(asked, &policy, &answer));
    }
    let comparison = compare(context, &engine, &prompt, (&compared, &policy), args.compare_tokens as usize)?;
    if context.json {
        let ingested: Vec<&IngestReport> = ingested.iter().map(|(_, report)| report).collect();
        return print_json(&json!({
            "question": question,
            "model": context.global.model,
            "prefix": context.prefix()?.to_string(),
            "auto": context.choice().ok(),
            "ingest": ingested.iter().rfind(|report| report.computed > 0).or(ingested.last()),
            "failures": failures,
            "sources": sources,
            "evict": policy.spec,
            "answers": answers,
            "comparison": comparison,
        }));
    }
    let is_alone = args.search.is_none() && args.prompt.docs.is_empty();
    if is_alone && !context.console.quiet && has_documents(context, engine.store()) {
        context.say("answered without documents: --search draws on the stored ones");
    }
    if comparison.is_empty() {
        return Ok(());
    }
    let before = if answering.len() > 1 { "" } else { "\n" };
    print(&format!("{before}{}", comparison_table(&comparison, &policy)))
}

/// The documents of an answer.
pub(crate) struct Sourced {
    pub(crate) chunks: Vec<PromptChunk>,
    /// The documents that a search found.
    pub(crate) sources: Option<Vec<Source>>,
}

/// The documents to search: these or, if there are none, those in the store.
pub(crate) fn library(context: &Context, engine: &Engine, documents: &[Document]) -> Result<Library> {
    let indexed = || -> Result<Library> {
        if documents.is_empty() {
            return Ok(Library::of(engine, context.documents(engine.store())?)?);
        }
        let library = Library::in_memory(engine)?;
        library.put(documents)?;
        Ok(library)
    };
    let spinner = context.spinner("indexing");
    let indexed = indexed();
    spinner.finish_and_clear();
    let library = indexed?;
    if documents.is_empty()
        && let Err(error) = library.pull()
    {
        warn(&format!("only the documents that this machine knows are searched: {error}"));
    }
    if library.is_empty()? {
        return Err(Fail::new(format!("{} has no documents to search", tilde(&context.store)))
            .hint("bring some with `refrain ingest FILES`, or give them here with --docs")
            .into());
    }
    Ok(library)
}

/// The chunks of a library that match a question best.
pub(crate) fn searched(
    context: &Context,
    library: &Library,
    question: &str,
    limit: usize,
    whole_documents: bool,
) -> Result<Sourced> {
    let Found { chunks, sources } = library.search(question, limit, whole_documents)?;
    if chunks.is_empty() {
        warn("no document has a word of the question: it is answered without any");
    } else {
        let found: Vec<String> = chunks.iter().map(PromptChunk::label).collect();
        context.say(&paint("2", &one_line(&format!("found {}", found.join(", "))), &io::stderr()));
    }
    Ok(Sourced { chunks, sources: Some(sources) })
}

/// Kinds of the statistics that a method keeps.
fn kinds_of(method: &Method) -> Vec<String> {
    method.built.statistics().iter().map(|of| of.kind()).collect()
}

/// Ingests the chunks for all methods that reuse them: once in chunks, and once for each that keeps something of its own. Gives the
/// reports, each with the kinds of statistics of its methods.
fn ingest_all<'a>(
    context: &Context,
    engine: &Engine,
    chunks: &[PromptChunk],
    methods: impl Iterator<Item = &'a Method>,
    running: &Interruptible<'_>,
) -> Result<Vec<(Vec<String>, IngestReport)>> {
    let mut reports: Vec<(Vec<String>, IngestReport)> = Vec::new();
    for method in methods.filter(|method| method.built.reuses() && !chunks.is_empty()) {
        let kinds = kinds_of(method);
        if reports.iter().all(|(known, _)| *known != kinds) {
            reports.push((kinds, ingest_to_answer(context, engine, chunks, method, running)?));
        }
    }
    Ok(reports)
}

/// The text of an argument; `-` is standard input.
pub(crate) fn asked_text(given: &str, what: &str) -> Result<String> {
    let mut text = given.to_owned();
    if given == "-" {
        text.clear();
        io::stdin()
            .read_to_string(&mut text)
            .with_context(|| format!("cannot read the {what} from standard input"))?;
    }
    if text.trim().is_empty() {
        let fail = Fail::usage(format!("the {what} is empty"));
        return Err(fail.hint(format!("give some text, or - to read the {what} from standard input")).into());
    }
    Ok(text.trim().to_owned())
}

/// Methods whose answers are shown, methods that are compared, and the eviction policy. A comparison without a method
/// shows every compared method's answer.
fn selected(context: &Context, args: &args::Ask) -> Result<(Vec<Method>, Vec<Method>, Policy)> {
    let named = args.method.as_ref().filter(|_| args.compare.is_empty() || context.method_typed);
    let alone = named.or(args.method.as_ref()).cloned().unwrap_or_else(|| AUTO.to_owned());
    let mut specs = args.compare.clone();
    if args.compare.is_empty() || named.is_some() {
        specs.insert(0, alone);
    }
    let specs = specs.iter().map(|spec| context.method_text(spec)).collect::<Result<Vec<_>>>()?;
    let (mut answering, policy) = (methods::methods(&specs)?, methods::policy(&args.evict)?);
    let compared = match (args.compare.is_empty(), named) {
        (true, _) => Vec::new(),
        (false, Some(_)) => answering.split_off(1),
        (false, None) => answering.clone(),
    };
    Ok((answering, compared, policy))
}

/// Streams an answer to standard output, then its stats to standard error. Ctrl-C ends it where it is. `ingested` is the report of the
/// ingest that the answer waited for.
///
/// # Errors
/// [`Interrupted`](crate::signals::Interrupted) before the first token.
pub(crate) fn answer(
    context: &Context,
    engine: &Engine,
    prompt: &Prompt,
    (method, policy): (&Method, &Policy),
    (request, ingested): (&GenerateRequest, Option<&IngestReport>),
    running: &Interruptible<'_>,
) -> Result<Answer> {
    let mut out = io::stdout().lock();
    let terminal = out.is_terminal();
    let mut failed = None;
    let mut ends_line = true;
    let stream = |progress: TokenEvent<'_>| {
        if progress.text.is_empty() {
            return !running.is_interrupted();
        }
        ends_line = progress.text.ends_with('\n');
        let shown = stream_text(progress.text, terminal);
        let written =
            if context.json { Ok(()) } else { out.write_all(shown.as_bytes()).and_then(|()| out.flush()) };
        failed = written.err();
        failed.is_none() && !running.is_interrupted()
    };
    let mut prefill = engine.prefill(prompt, request.clone())?;
    while prefill.advance()? != Advance::Done {
        running.check()?;
    }
    let answer = prefill.answer(stream)?;
    if let Some(error) = failed {
        return Err(NotPrinted(error).into());
    }
    if context.json {
        warn_of_cut_form(context, request, &answer);
    } else {
        if !ends_line || answer.text.is_empty() {
            writeln!(out).map_err(NotPrinted)?;
        }
        out.flush().map_err(NotPrinted)?;
        warn_of_cut_form(context, request, &answer);
        warn_of_other_prefix(&answer.stats);
        let mut line = stats_line(method, policy, &answer, ingested);
        if let Some(why) = context.reason_of(&method.spec)? {
            line.push_str(&format!("\n{} behind prefix {}: {why}", method.spec, context.prefix()?));
        }
        context.say(&paint("2", &line, &io::stderr()));
        if let Some(explanation) = &answer.explanation {
            write!(out, "\n{}", explained(explanation, shows_colours(&io::stdout()), columns(&io::stdout())))
                .map_err(NotPrinted)?;
        }
    }
    Ok(answer)
}

/// Warns that an answer which is held to a form ended before the model ended it.
pub(crate) fn warn_of_cut_form(context: &Context, request: &GenerateRequest, answer: &Answer) {
    if request.grammar.is_some() && answer.finish == FinishReason::Length {
        let most = request.sampling.max_tokens;
        context.console.warn(&format!(
            "the answer was ended by --max-tokens {most} and may not have the whole form: give more tokens"
        ));
    }
}

/// Says once that chunks were prefilled behind another system part than the prompt's.
fn warn_of_other_prefix(stats: &RequestStats) {
    static ONCE: Once = Once::new();
    if stats.other_prefix_chunks > 0 {
        ONCE.call_once(|| {
            warn(&format!(
                "{} of this prompt were prefilled behind another system part than its own, so that the answer is less \
                 exact",
                count(stats.other_prefix_chunks, "chunk")
            ));
        });
    }
}

/// One line of stats. TTFT begins after the ingest that the answer waited for, whose time stands behind it.
pub(crate) fn stats_line(
    asked: &Method,
    policy: &Policy,
    answer: &Answer,
    ingested: Option<&IngestReport>,
) -> String {
    let stats = &answer.stats;
    let mut line = format!("{}: {} prompt tokens", asked.spec, stats.prompt_tokens);
    if stats.document_tokens > 0 {
        line.push_str(&format!(
            ", {} cached, {} recomputed (charged {:.1} %, {})",
            stats.cached_tokens,
            stats.recomputed_tokens,
            100.0 * stats.charged_ratio,
            count(stats.full_layers, "full layer"),
        ));
    }
    if stats.kept_tokens < stats.prompt_tokens {
        line.push_str(&format!(
            ", {} kept (sequence ratio {:.3}), {} read (the documents have {})",
            stats.kept_tokens,
            stats.sequence_ratio,
            bytes(stats.bytes_read),
            bytes(stats.document_bytes),
        ));
    }
    if stats.prefilled_chunks > 0 {
        line.push_str(&format!(", {} prefilled first", count(stats.prefilled_chunks, "chunk")));
        if stats.unfetched_chunks > 0 {
            line.push_str(&format!(" ({} in less time than a fetch)", stats.unfetched_chunks));
        }
    }
    if stats.device_bytes_copied + stats.device_bytes_reused > 0 {
        line.push_str(&format!(
            ", {} copied to {}, which had {}",
            bytes(stats.device_bytes_copied),
            stats.device,
            bytes(stats.device_bytes_reused),
        ));
    }
    line.push_str(&format!("; TTFT {} ({} compute)", seconds(stats.ttft), seconds(stats.compute_ttft)));
    if let Some(report) = ingested.filter(|report| report.computed > 0) {
        line.push_str(&format!(", after {} of prefill", seconds(report.seconds)));
    }
    if let Some(tpot) = stats.tpot {
        line.push_str(&format!(", TPOT {} ({} tokens/s)", seconds(tpot), number(1.0 / tpot)));
    }
    if answer.finish == FinishReason::Length {
        line.push_str(&format!("; ended after {} by --max-tokens", count(answer.tokens.len(), "token")));
    }
    if policy.built.is_full() {
        return line;
    }
    let heads = if policy.built.per_query_head { "query head" } else { "KV head" };
    line.push_str(&format!("\n{}: {} tokens retained for each {heads}", policy.spec, stats.retained_tokens));
    line.push_str(&format!(
        ", KV {} ({} of full attention's {}), {} allocated, at peak {}, {} beside",
        bytes(stats.kv_bytes_held as u64),
        percent(stats.kv_bytes_held, stats.kv_bytes_full),
        bytes(stats.kv_bytes_full as u64),
        bytes(stats.kv_bytes as u64),
        bytes(stats.kv_bytes_peak as u64),
        bytes(stats.side_bytes as u64),
    ));
    line
}

/// An answer with its method, policy and explanation.
pub(crate) fn as_json(asked: &Method, policy: &Policy, answer: &Answer) -> Value {
    let mut value = json!(answer);
    value["method"] = json!(asked.spec);
    value["evict"] = json!(policy.spec);
    if let Some(explanation) = &answer.explanation {
        value["explanation"] = json!(explanation);
    }
    value
}

fn compare(
    context: &Context,
    engine: &Engine,
    prompt: &Prompt,
    (compared, policy): (&[Method], &Policy),
    tokens: usize,
) -> Result<Vec<Comparison>> {
    if compared.is_empty() {
        return Ok(Vec::new());
    }
    let methods: Vec<_> = compared.iter().map(|asked| (asked.spec.clone(), asked.built.clone())).collect();
    let spinner = context.spinner("comparing");
    let comparison = engine.compare(prompt, &methods, &policy.built, tokens)?;
    spinner.finish_and_clear();
    Ok(comparison)
}

fn comparison_table(comparison: &[Comparison], policy: &Policy) -> String {
    let mut table =
        Table::new(&["<method", "TTFT", "compute", "speed-up", "charged", "KL to vanilla", "same token"]);
    for row in comparison {
        table.push(vec![
            row.method.clone(),
            seconds(row.stats.ttft),
            seconds(row.stats.compute_ttft),
            format!("{:.2}x", row.speedup),
            format!("{:.1} %", 100.0 * row.stats.charged_ratio),
            format!("{:.4}", row.kl),
            format!("{:.0} %", 100.0 * row.top1),
        ]);
    }
    let evict = match policy.built.is_full() {
        true => String::new(),
        false => {
            format!("\nEach decodes with {}; vanilla's own answer is that of full attention.", policy.spec)
        }
    };
    let positions = comparison.first().map_or(0, |row| row.positions);
    let note = format!(
        "The table is measured anew, after the answers above. Speed-up is of TTFT, loading included. Charged are the documents' rows \
         (tokens x layers) that were computed, a first pass of the question included. KL divergence (nats, mean) and share of equal \
         likeliest tokens are over vanilla's own first {}, fed to every method.{evict}\n",
        count(positions, "answer token")
    );
    format!("{}{}", table.text(), paint("2", &broken(&note, &io::stdout()), &io::stdout()))
}
