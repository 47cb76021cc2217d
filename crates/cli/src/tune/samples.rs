//! The questions that methods are measured with: those of the user's file, or of the model's making, each with the chunks that it is about.

use std::collections::HashSet;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use refrain::engine::{Document, Engine, GenerateRequest, Instructions, Parts, Sampling};
use refrain::eviction::Eviction;
use refrain::fusion::Vanilla;
use refrain::store::hex;
use refrain_eval::{Gold, Sample};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::rank::{rank, words_of};
use crate::args;
use crate::output::{Fail, count, warn};
use crate::settings::Context;

/// Most tokens of a question that the model makes.
const QUESTION_TOKENS: usize = 40;
/// Times that a chunk is asked about, at most.
const ROUNDS: usize = 4;
/// Room for what stands around documents, question and answer.
const AROUND: usize = 256;

/// A question of the user's file.
#[derive(Debug, Deserialize)]
struct Question {
    question: String,
    #[serde(default)]
    answers: Vec<String>,
}

/// The name of a sample: its question, and a digest of all else that it is made of, so that no answer over other documents, or that was held
/// against another one, is taken for it.
fn sample_id(question: &str, sample: &Sample) -> Result<String> {
    let digest = Sha256::digest(serde_json::to_vec(sample)?);
    Ok(format!("{question} ({})", hex::encode(&digest[..8])))
}

/// Questions, each with the chunks that its words point at, in the order of the documents, up to the tokens of a prompt.
///
/// # Errors
/// If there is no text or no question, the model fails, or it is `until` before all questions are made and answered.
pub(super) fn samples(
    context: &Context,
    engine: &Engine,
    documents: &[Document],
    args: &args::Tune,
    until: Option<Instant>,
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
        None => ask(context, engine, &texts, args.samples as usize, until)?,
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
            check_time(until)?;
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

/// # Errors
/// Once it is `until`: nothing could be measured in the time.
fn check_time(until: Option<Instant>) -> Result<()> {
    if until.is_none_or(|until| Instant::now() < until) {
        return Ok(());
    }
    Err(Fail::new("--time-budget was over before all questions were made, with vanilla's answers")
        .hint("give more time, fewer --samples, or --questions with answers")
        .into())
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
    until: Option<Instant>,
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
        check_time(until)?;
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
    fn a_question_ends_with_its_mark() {
        let found = |text| question_in(text);
        assert_eq!(found("Sure:\n1. \"How tight is it? Very.\"").as_deref(), Some("How tight is it?"));
        assert_eq!(found("**Question: Who?").as_deref(), Some("Who?"));
        assert_eq!((found("No question."), found(" ?")), (None, None));
    }
}
