//! `refrain tune`: how near each method comes to vanilla on the user's model and documents, at which time to the first token;
//! the cheapest that is near enough becomes the model's choice.

mod forget;
mod front;
mod rank;

use std::collections::HashSet;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use refrain::engine::{Document, Engine, GenerateRequest, Instructions, Parts, Sampling};
use refrain::eviction::Eviction;
use refrain::fusion::Vanilla;
use refrain::store::hex;
use refrain_eval::run::{Run, read};
use refrain_eval::tasks::LoadedTask;
use refrain_eval::{Gold, Matrix, Record, Sample, Scorer, Scoring, TaskInfo, Variant};
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest, Sha256};

use self::forget::forget;
use self::front::{choose, failed, front, nearest, table};
use self::rank::{rank, words_of};
use crate::args;
use crate::documents::{Documents, read_documents};
use crate::eval::{about, prefix_texts, show, variants, write_report};
use crate::output::{Fail, count, json_path, json_paths, print, print_json, warn};
use crate::settings::Context;
use refrain::folders::tilde;
use refrain::{TunedFile, tuned_path};

/// Most tokens of a question that the model makes.
const QUESTION_TOKENS: usize = 40;
/// Times that a chunk is asked about, at most.
const ROUNDS: usize = 4;
/// Room for what stands around documents, question and answer.
const AROUND: usize = 256;
/// Answers to a question that are decoded together.
const BATCH: usize = 8;
/// Fewer questions than this are told to decide little.
const FEW: usize = 8;

/// A question of the user's file.
#[derive(Debug, Deserialize)]
struct Question {
    question: String,
    #[serde(default)]
    answers: Vec<String>,
}

/// `refrain tune`
pub(crate) fn run(context: &Context, args: &args::Tune) -> Result<()> {
    if args.forget {
        return forget(context);
    }
    let matrix = Matrix {
        methods: args.methods.clone(),
        prefix: args.prefixes.clone(),
        forced: args.max_tokens as usize,
        maps: false,
        batch: BATCH,
        ..Matrix::default()
    };
    // Wrong methods and prefixes are told before the model is opened.
    let variants = variants(context, &matrix)?;
    prefix_texts(&variants)?;
    let Documents { documents, failures, .. } = read_documents(context.console, &args.paths)?;
    let (questions, answering) = (count(args.samples as usize, "question"), count(variants.len(), "variant"));
    let hour = if args.is_of_all() { ", which takes about an hour with 24 questions" } else { "" };
    let earlier = match args.time_budget {
        None => "; --time-budget 10m ends it earlier, and the same command goes on",
        Some(_) => "",
    };
    context.say(&format!("up to {questions} are answered by {answering}{hour}{earlier}"));
    let engine = context.memory_engine()?.behind(&[])?;
    let samples = samples(context, &engine, &documents, args)?;
    let job = LoadedTask {
        about: task(&samples),
        scoring: Scoring::QaF1,
        first_line: false,
        temperature: 0.0,
        top_p: 1.0,
        samples,
    };
    let jobs = [job];
    let fingerprint = context.fingerprint()?;
    let folder = match &args.out {
        Some(folder) => folder.clone(),
        None => tuned_path(context.data_folder.as_deref(), &fingerprint)?.with_extension(""),
    };
    let (name, mut first) = (context.global.model.as_str(), None);
    let mut run = Run::open(&folder, about(context, name, &matrix, &variants, &engine, &jobs)?)?;
    let scorer = Scorer { judge: None, quality: None, encode: &|_| Vec::new() };
    let until = args.time_budget.map(|budget| Instant::now() + budget);
    let options = matrix.run_options(until);
    let (bar, started) = (context.console.message_bar(), Instant::now());
    let whole = run.answer((name, &engine), &jobs, &variants, &options, &scorer, |step| {
        show(&bar, name, step, *first.get_or_insert(step.done), started);
        true
    })?;
    bar.finish_and_clear();
    run.write_about()?;
    let (about, records) = read(&folder)?;
    let records = own(records, name, &jobs[0].samples, &variants);
    let (rows, answered) = front(&records.iter().collect::<Vec<_>>());
    let failed = failed(&records);
    let Some(chosen) = choose(&rows, args.bound) else {
        let why =
            failed.iter().map(|(name, error)| format!("{name}: {error}")).collect::<Vec<_>>().join("; ");
        let fail = match (why.as_str(), whole) {
            ("", true) => Fail::new("no question was answered by all methods"),
            ("", false) => Fail::new("no question was answered by all methods in time")
                .hint("give more --time-budget; the same command goes on"),
            (why, _) => Fail::new(format!("no question was answered by all methods: {why}")),
        };
        return Err(fail.into());
    };
    for (name, error) in &failed {
        warn(&format!("{name} is left out, for it has answered nothing: {error}"));
    }
    let path = match &args.output {
        Some(path) => path.clone(),
        None => tuned_path(context.data_folder.as_deref(), &fingerprint)?,
    };
    let file = TunedFile {
        model: name.to_owned(),
        fingerprint,
        method: chosen.method.clone(),
        prefix: chosen.prefix.clone(),
        bound: args.bound,
        samples: answered,
        top1: chosen.top1,
        kl: chosen.kl,
        score: chosen.score,
        charged: chosen.charged,
        speedup: chosen.speedup,
    };
    file.write(&path)?;
    if answered < FEW {
        let back = match args.output {
            Some(_) => "",
            None => ", and `refrain tune --forget` goes back to what is built in",
        };
        warn(&format!(
            "the choice rests on {} alone: --samples, or --questions with your own, gives more{back}",
            count(answered, "question")
        ));
    }
    let report = write_report(&folder, &about, &records)?;
    if context.json {
        let report = json_paths(&report);
        return print_json(
            &json!({ "file": json_path(&path), "choice": file, "front": rows, "report": report, "failures": failures }),
        );
    }
    print(&table(&rows, chosen))?;
    let used = match args.output {
        Some(_) => "",
        None => ", which commands without --method use from now on",
    };
    context.say(&format!(
        "{} is the cheapest of {} that keeps {:.0} % of vanilla's tokens and score over {}; kept in {}{used}",
        chosen.label(),
        count(rows.len(), "variant"),
        100.0 * args.bound,
        count(answered, "question"),
        tilde(&path)
    ));
    if chosen.is_vanilla()
        && let Some(near) = nearest(&rows)
    {
        context.say(&format!(
            "nearest to it: {} keeps {:.1} % at {:.1}x; a --bound below that takes it, or a quicker one",
            near.label(),
            100.0 * near.kept(),
            near.speedup
        ));
    }
    if let Some(page) = report.first() {
        let front = report.iter().find(|path| path.ends_with("front.svg"));
        let alone = front.map_or(String::new(), |front| format!("; the front alone: {}", tilde(front)));
        context.say(&format!("tables and pictures: {}{alone}", tilde(page)));
    }
    Ok(())
}

/// The task as the report names it.
fn task(samples: &[Sample]) -> TaskInfo {
    TaskInfo {
        benchmark: "tune".to_owned(),
        task: "tune".to_owned(),
        metric: Scoring::QaF1.name().to_owned(),
        scale: 100.0,
        samples: samples.len(),
        note: "questions over documents of the user's".to_owned(),
        ..TaskInfo::default()
    }
}

/// The records of a model's answers to these samples by these variants. The folder also has those of earlier commands, with other documents
/// or methods.
fn own(records: Vec<Record>, model: &str, samples: &[Sample], variants: &[Variant]) -> Vec<Record> {
    let ids: HashSet<&str> = samples.iter().map(|sample| sample.id.as_str()).collect();
    let names: HashSet<(&str, &str)> =
        variants.iter().map(|variant| (variant.method.as_str(), variant.policy.as_str())).collect();
    let is_own = |record: &Record| {
        record.model == model
            && ids.contains(record.sample.as_str())
            && names.contains(&(record.method.as_str(), record.policy.as_str()))
    };
    records.into_iter().filter(is_own).collect()
}

/// The name of a sample: its question, and a digest of all else that it is made of, so that no answer over other documents, or that was held
/// against another one, is taken for it.
fn sample_id(question: &str, sample: &Sample) -> Result<String> {
    let digest = Sha256::digest(serde_json::to_vec(sample)?);
    Ok(format!("{question} ({})", hex::encode(&digest[..8])))
}

/// Questions, each with the chunks that its words point at, in the order of the documents, up to the tokens of a prompt.
fn samples(
    context: &Context,
    engine: &Engine,
    documents: &[Document],
    args: &args::Tune,
) -> Result<Vec<Sample>> {
    let room = engine.decoder().config().context.saturating_sub(AROUND + args.max_tokens as usize);
    let most = (args.tokens as usize).min(room);
    let chunks = engine.chunks(documents)?;
    let texts: Vec<String> =
        chunks.iter().map(|chunk| engine.tokenizer().decode(&chunk.tokens, true)).collect();
    if chunks.is_empty() {
        return Err(Fail::new("there is no document to ask about")
            .hint("name files or folders with text")
            .into());
    }
    let asked = match &args.questions {
        Some(path) => {
            read_questions(path)?.into_iter().take(args.samples as usize).map(|q| (None, q)).collect()
        }
        None => ask(context, engine, &texts, args.samples as usize)?,
    };
    let words: Vec<HashSet<String>> = texts.iter().map(|text| words_of(text)).collect();
    let bar = context.bar("answering with vanilla", "{pos}/{len} questions{left}");
    bar.set_length(asked.len() as u64);
    let mut samples = Vec::new();
    for (source, Question { question, answers }) in asked {
        let ranked = rank(&words, &question, source);
        let (mut taken, mut tokens) = (Vec::new(), 0);
        for index in ranked {
            if tokens + chunks[index].tokens.len() <= most {
                tokens += chunks[index].tokens.len();
                taken.push(index);
            }
        }
        taken.sort_unstable();
        let around = Instructions::default();
        let mut sample = Sample {
            before: around.before_documents,
            documents: taken.iter().map(|index| texts[*index].clone()).collect(),
            question: format!("{}{question}", around.before_question),
            chat: true,
            max_tokens: args.max_tokens as usize,
            gold: Gold { answers, ..Gold::default() },
            ..Sample::default()
        };
        if sample.gold.answers.is_empty() {
            // Vanilla's own answer is the one to keep.
            let parts = Parts {
                before: &sample.before,
                documents: &sample.documents,
                apart: false,
                question: &sample.question,
                answer_prefix: "",
                chat: true,
            };
            sample.gold.answers = vec![vanilla(
                engine,
                &engine.compose(&parts)?,
                Sampling { max_tokens: sample.max_tokens, ..Sampling::default() },
            )?];
        }
        sample.id = sample_id(&question, &sample)?;
        samples.push(sample);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(samples)
}

fn vanilla(engine: &Engine, prompt: &refrain::engine::Prompt, sampling: Sampling) -> Result<String> {
    engine.max_seq_len(prompt, sampling.max_tokens, Eviction::full())?;
    let request = GenerateRequest::new(std::sync::Arc::new(Vanilla), sampling);
    Ok(engine.answer(prompt, &request, |_| true)?.text)
}

fn read_questions(path: &Path) -> Result<Vec<Question>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let one = |(index, line): (usize, &str)| {
        serde_json::from_str(line).with_context(|| {
            format!(
                "{}, line {}: each line must be {{\"question\": …, \"answers\": […]}}",
                path.display(),
                index + 1
            )
        })
    };
    let questions: Vec<Question> = lines.map(one).collect::<Result<_>>()?;
    if questions.is_empty() {
        return Err(Fail::new(format!("{} holds no question", path.display())).into());
    }
    Ok(questions)
}

/// Questions that the model makes of chunks, spread evenly over the documents, each with the chunk that it was made of. Chunks of which
/// it makes none, or one that it has made before, are asked about again, with other words.
fn ask(
    context: &Context,
    engine: &Engine,
    texts: &[String],
    most: usize,
) -> Result<Vec<(Option<usize>, Question)>> {
    let around = Instructions { before_question: String::new(), ..Instructions::default() };
    let each = most.min(texts.len());
    let bar = context.bar("making questions", "{pos}/{len}{left}");
    bar.set_length(most as u64);
    let (mut asked, mut seen) = (Vec::new(), HashSet::new());
    for (round, i) in (0..ROUNDS).flat_map(|round| (0..each).map(move |i| (round, i))) {
        if asked.len() == most {
            break;
        }
        let index = (i * texts.len() / each + round) % texts.len();
        let document = Document { title: String::new(), text: texts[index].clone() };
        let wanted = "Write one short question that this text answers. Write the question alone.";
        let temperature = if round == 0 { 0.0 } else { 0.8 };
        let sampling =
            Sampling { temperature, seed: round as u64, max_tokens: QUESTION_TOKENS, ..Sampling::default() };
        let text = vanilla(engine, &engine.prompt(&[document], wanted, &around)?, sampling)?;
        let new = question_in(&text).filter(|question| seen.insert(question.clone()));
        if let Some(question) = new {
            asked.push((Some(index), Question { question, answers: Vec::new() }));
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    if asked.is_empty() {
        let fail = Fail::new("the model made no question of these documents");
        return Err(fail.hint("give some with --questions, a JSON object a line: {\"question\": …}").into());
    }
    if asked.len() < most {
        warn(&format!(
            "the model made {} in place of {most}: the choice is as sure as they are many; --questions gives your own",
            count(asked.len(), "question")
        ));
    }
    Ok(asked)
}

/// The first question of a text: of its line, what comes up to the question mark.
fn question_in(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.contains('?'))?;
    let (question, _) = line.split_once('?')?;
    let words = question.trim_start_matches(|c: char| !c.is_alphabetic());
    let words = words.strip_prefix("Question:").unwrap_or(words).trim();
    (!words.is_empty()).then(|| format!("{words}?"))
}

#[cfg(test)]
mod tests {
    use refrain::engine::Prefix;
    use refrain::store::KvQuantization;

    use super::*;

    #[test]
    fn a_sample_of_other_documents_another_answer_or_another_length_has_another_name() {
        let sample = Sample {
            documents: vec!["A bolt.".to_owned()],
            question: "What is it?".to_owned(),
            max_tokens: 6,
            gold: Gold { answers: vec!["a bolt".to_owned()], ..Gold::default() },
            ..Sample::default()
        };
        let name = |sample: &Sample| sample_id("What is it?", sample).unwrap();
        let others = [
            Sample { documents: vec!["A nut.".to_owned()], ..sample.clone() },
            Sample { gold: Gold { answers: vec!["a nut".to_owned()], ..Gold::default() }, ..sample.clone() },
            Sample { max_tokens: 7, ..sample.clone() },
        ];
        let names: HashSet<String> = others.iter().chain([&sample]).map(name).collect();
        assert_eq!(names.len(), 4);
        assert!(names.contains(&name(&sample)) && name(&sample).starts_with("What is it? ("));
    }

    #[test]
    fn answers_of_other_models_questions_and_methods_take_no_part() {
        let record = |model: &str, sample: &str, method: &str, policy: &str| Record {
            model: model.to_owned(),
            sample: sample.to_owned(),
            method: method.to_owned(),
            policy: policy.to_owned(),
            ..Record::default()
        };
        let variant = |method: &str| Variant {
            method: method.to_owned(),
            fusion: std::sync::Arc::new(Vanilla),
            store_dtype: KvQuantization::Exact,
            prefix: Prefix::None,
            oracle: None,
            policy: "full".to_owned(),
            eviction: Eviction::full().clone(),
        };
        let variants = ["vanilla", "pie"].map(variant);
        let samples = [Sample { id: "a".to_owned(), ..Sample::default() }];
        let (vanilla, pie) = (record("one", "a", "vanilla", "full"), record("one", "a", "pie", "full"));
        let records = vec![
            vanilla.clone(),
            record("two", "a", "pie", "full"),
            record("one", "b", "pie", "full"),
            record("one", "a", "a3", "full"),
            record("one", "a", "pie", "snap_kv"),
            pie.clone(),
        ];
        assert_eq!(own(records, "one", &samples, &variants), [vanilla, pie]);
    }

    #[test]
    fn a_question_ends_with_its_mark() {
        let found = |text| question_in(text);
        assert_eq!(found("Sure:\n1. \"How tight is it? Very.\"").as_deref(), Some("How tight is it?"));
        assert_eq!(found("**Question: Who?").as_deref(), Some("Who?"));
        assert_eq!((found("No question."), found(" ?")), (None, None));
    }
}
