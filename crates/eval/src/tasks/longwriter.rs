//! LongWriter (THUDM/LongWriter @3fcfdff): LongBench-Write and LongWrite-Ruler, which ask for texts of a length.

use std::path::Path;

use serde::Deserialize;

use super::file::{DataFile, spread};
use super::{Protocol, TaskData};
use crate::{Error, Gold, Result, Sample, Scoring};

/// The sets and how many prompts each has: LongBench-Write in English, all of LongBench-Write, and LongWrite-Ruler,
/// which scores only the length of responses.
pub const SETS: [(&str, usize); 3] =
    [("longbench_write_en", 60), ("longbench_write", 120), ("longwrite_ruler", 48)];

const MAX_TOKENS: usize = 32_768;

#[derive(Deserialize)]
struct Prompt {
    prompt: String,
    /// Demanded number of words.
    length: usize,
}

/// Samples of a set: `NAME.jsonl` of a folder's `longwriter` or its own. `limit` takes samples spread evenly over it.
/// The demanded number of words is the first answer of the gold. MorphKV's protocol has at most twice as many new
/// tokens.
///
/// # Errors
/// If the set or the file does not exist, or the file is malformed.
pub fn samples(name: &str, folder: &Path, limit: Option<usize>, protocol: Protocol) -> Result<TaskData> {
    let (_, of) = SETS.into_iter().find(|(known, _)| *known == name).ok_or_else(|| {
        Error::Invalid(format!(
            "longwriter: no set {name:?}; there are {}",
            SETS.map(|(name, _)| name).join(", ")
        ))
    })?;
    let file = DataFile::find(folder, &[format!("longwriter/{name}.jsonl"), format!("{name}.jsonl")])?;
    let prompts: Vec<Prompt> = file.lines()?;
    let fewer = (prompts.len() < of).then(|| format!("{} of {of} records", prompts.len()));
    let morphkv = (protocol == Protocol::MorphKv).then(|| "MorphKV's limit of new tokens".to_string());
    let taken = spread(prompts.len(), limit).map(|index| (index, &prompts[index]));
    Ok(TaskData {
        samples: taken.map(|(index, prompt)| sample(name, index, prompt, protocol)).collect(),
        scoring: Scoring::LongWriter,
        first_line: false,
        temperature: 0.5,
        top_p: 1.0,
        of: Some(of),
        note: [morphkv, fewer].into_iter().flatten().collect::<Vec<_>>().join(", "),
        hash: file.hash(),
    })
}

/// The prompt of the judge of quality, with the places `$INST$` and `$RESPONSE$`: `judge.txt` of the benchmark's folders.
///
/// # Errors
/// If the file does not exist.
pub fn judge_template(folder: &Path) -> Result<String> {
    Ok(DataFile::find(folder, &["longwriter/judge.txt".into(), "judge.txt".into()])?.text)
}

fn sample(name: &str, index: usize, Prompt { prompt, length }: &Prompt, protocol: Protocol) -> Sample {
    Sample {
        id: format!("{name}-{index}"),
        question: prompt.clone(),
        chat: true,
        max_tokens: match protocol {
            Protocol::Own => MAX_TOKENS,
            Protocol::MorphKv => MAX_TOKENS.min(length.saturating_mul(2)),
        },
        gold: Gold { answers: vec![length.to_string()], ..Gold::default() },
        ..Sample::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::testing::{data, folder_with};

    #[test]
    fn the_length_asked_for_is_the_answer() {
        let line = |length: usize| {
            serde_json::json!({"prompt": "Write", "type": "News", "length": length}).to_string()
        };
        let folder = folder_with("longwriter/longwrite_ruler.jsonl", &[line(100), line(30_000), line(5)]);
        let loaded = |protocol| samples("longwrite_ruler", folder.path(), Some(2), protocol).unwrap();
        let own = loaded(Protocol::Own);
        assert_eq!((own.temperature, own.of, &*own.note), (0.5, Some(48), "3 of 48 records"));
        let sample = &own.samples[0];
        assert_eq!((&*sample.id, &*sample.question, sample.chat), ("longwrite_ruler-0", "Write", true));
        assert_eq!(sample.gold.answers, ["100"]);
        let tokens =
            |loaded: &TaskData| -> Vec<usize> { loaded.samples.iter().map(|s| s.max_tokens).collect() };
        assert_eq!(tokens(&own), [32_768, 32_768]);
        let morphkv = loaded(Protocol::MorphKv);
        assert_eq!(tokens(&morphkv), [200, 10], "the first and the last");
        assert_eq!(morphkv.note, "MorphKV's limit of new tokens, 3 of 48 records");
    }

    #[test]
    fn what_is_wrong_is_said() {
        let folder = folder_with("longbench_write.jsonl", &["{\"prompt\": \"p\", \"length\": -1}".into()]);
        let error = |name| samples(name, folder.path(), None, Protocol::Own).unwrap_err().to_string();
        assert!(error("write").contains("there are longbench_write_en, longbench_write, longwrite_ruler"));
        assert!(error("longbench_write").contains("longbench_write.jsonl: line 1: invalid value"));
        assert!(
            error("longwrite_ruler")
                .contains("no longwriter/longwrite_ruler.jsonl, nor longwrite_ruler.jsonl")
        );
        assert!(judge_template(folder.path()).unwrap_err().to_string().contains("longwriter/judge.txt"));
    }

    #[test]
    fn every_set_loads() {
        let Some(data) = data("longwriter") else { return };
        for (name, count) in SETS {
            let loaded = samples(name, &data, None, Protocol::Own).unwrap();
            assert_eq!((loaded.samples.len(), &*loaded.note), (count, ""), "{name}");
            assert!(
                loaded.samples.iter().all(|sample| sample.gold.answers[0].parse::<usize>().unwrap() >= 100)
            );
        }
        let template = judge_template(&data).unwrap();
        assert!(template.contains("$INST$") && template.contains("$RESPONSE$"));
    }
}
