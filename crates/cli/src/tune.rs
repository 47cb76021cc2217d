//! `refrain tune`: how near each method comes to vanilla on the user's model and documents, at which time to the first token;
//! the cheapest that is near enough becomes the model's choice.

mod forget;
mod front;
mod rank;
mod samples;

use std::collections::HashSet;
use std::time::Instant;

use anyhow::Result;
use refrain_eval::run::{Run, read};
use refrain_eval::tasks::LoadedTask;
use refrain_eval::{Matrix, Record, Sample, Scorer, Scoring, TaskInfo, Variant};
use serde_json::json;

use self::forget::forget;
use self::front::{choose, failed, front, nearest, table};
use self::samples::samples;
use crate::args;
use crate::documents::{Documents, read_documents};
use crate::eval::{about, prefix_texts, show, variants, write_report};
use crate::output::{Fail, count, json_path, json_paths, print, print_json, warn};
use crate::settings::Context;
use refrain::folders::tilde;
use refrain::{TunedFile, tuned_path};

/// Answers to a question that are decoded together.
const BATCH: usize = 8;
/// Fewer questions than this are told to decide little.
const FEW: usize = 8;

/// `refrain tune`
pub(crate) fn run(context: &Context, args: &args::Tune) -> Result<()> {
    if args.forget {
        return forget(context);
    }
    let until = args.time_budget.map(|budget| Instant::now() + budget);
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
    let samples = samples(context, &engine, &documents, args, until)?;
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

#[cfg(test)]
mod tests {
    use refrain::engine::Prefix;
    use refrain::eviction::Eviction;
    use refrain::fusion::Vanilla;
    use refrain::store::KvQuantization;

    use super::*;

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
}
