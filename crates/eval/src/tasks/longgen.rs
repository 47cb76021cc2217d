//! LongGenBench (mozhu621/LongGenBench @62c0e86): long plans, written section by section.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;

use super::file::{DataFile, spread};
use super::{Protocol, TaskData};
use crate::metrics::longgen::Plan;
use crate::{Error, Gold, Result, Sample, Scoring};

/// The benchmark's settings: name, file and new tokens.
const SETTINGS: [(&str, &str, usize); 2] =
    [("short", "Dataset_short.json", 16_000), ("long", "Dataset_long.json", 32_000)];

/// Prompts of the benchmark in each setting.
const PROMPTS: usize = 400;
/// Prompts of each type that MorphKV takes.
const MORPHKV_PROMPTS: usize = 10;
const MORPHKV_TOKENS: usize = 8_000;

#[derive(Deserialize)]
struct Prompt {
    prompt: String,
    #[serde(flatten)]
    plan: Plan,
}

/// Samples of the setting `short` (16K) or `long` (32K), of a folder's `longgenbench` or its own. `limit` takes some of all over it.
///
/// MorphKV's protocol is greedy, without a text that ends the answer: the first ten prompts of each type, 8000 new tokens.
///
/// # Errors
/// If the setting or the file does not exist, or the file is malformed.
pub fn samples(setting: &str, folder: &Path, limit: Option<usize>, protocol: Protocol) -> Result<TaskData> {
    let known = SETTINGS.iter().find(|(name, ..)| *name == setting);
    let (_, name, own_tokens) = known.ok_or_else(|| {
        Error::Invalid(format!("longgenbench: no setting {setting:?}; there are short, long"))
    })?;
    let file = DataFile::find(folder, &[format!("longgenbench/{name}"), (*name).into()])?;
    let prompts: Vec<Prompt> = serde_json::from_str(&file.text).map_err(|error| file.wrong(error))?;
    let count = prompts.len();
    let mut samples: Vec<(usize, Prompt)> = prompts.into_iter().enumerate().collect();
    if protocol == Protocol::MorphKv {
        let mut of_type: HashMap<String, usize> = HashMap::new();
        samples.retain(|(_, prompt)| {
            let number = of_type.entry(prompt.plan.kind.clone()).or_default();
            *number += 1;
            *number <= MORPHKV_PROMPTS
        });
    }
    let (max_tokens, stop, sampling, note) = match protocol {
        Protocol::Own => (*own_tokens, Some("*** finished"), 0.95, None),
        Protocol::MorphKv => {
            let judged = "a judge is asked without MorphKV's three examples";
            (MORPHKV_TOKENS, None, 0.0, Some(format!("MorphKV's {} prompts; {judged}", samples.len())))
        }
    };
    let mut samples: Vec<Option<(usize, Prompt)>> = samples.into_iter().map(Some).collect();
    let chosen = spread(samples.len(), limit);
    let fewer = (count < PROMPTS).then(|| format!("{count} of {PROMPTS} records"));
    Ok(TaskData {
        samples: chosen
            .filter_map(|place| samples[place].take())
            .map(|(index, prompt)| sample(setting, index, prompt, max_tokens, stop))
            .collect(),
        scoring: Scoring::LongGen,
        first_line: false,
        temperature: sampling,
        top_p: if protocol == Protocol::Own { 0.95 } else { 1.0 },
        of: Some(PROMPTS),
        note: [note, fewer].into_iter().flatten().collect::<Vec<_>>().join(", "),
        hash: file.hash(),
    })
}

/// The prompt as it is, which ends with the beginning of the answer.
fn sample(
    setting: &str,
    index: usize,
    Prompt { prompt, plan }: Prompt,
    max_tokens: usize,
    stop: Option<&str>,
) -> Sample {
    Sample {
        id: format!("{setting}-{index}"),
        question: prompt,
        max_tokens,
        stop: stop.map(str::to_owned).into_iter().collect(),
        gold: Gold { plan: Some(plan), ..Gold::default() },
        ..Sample::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::testing::{data, folder_with};

    fn prompts() -> String {
        let prompt = |index: usize| {
            let kind = ["Week", "Floor"][index % 2];
            serde_json::json!({"prompt": format!("Write.\n#*# {kind} 1:"), "prefix": format!("#*# {kind} 1:"),
                "type": kind, "number": 3, "checks_once": {"2": "gym"}, "checks_range": {}, "checks_periodic": {}})
        };
        serde_json::Value::from((0..30).map(prompt).collect::<Vec<_>>()).to_string()
    }

    #[test]
    fn prompts_are_raw_and_end_at_the_stop_string() {
        let folder = folder_with("longgenbench/Dataset_short.json", &[prompts()]);
        let loaded = samples("short", folder.path(), Some(3), Protocol::Own).unwrap();
        assert_eq!((loaded.samples.len(), loaded.of, &*loaded.note), (3, Some(400), "30 of 400 records"));
        assert_eq!((loaded.temperature, loaded.top_p), (0.95, 0.95));
        let sample = &loaded.samples[1];
        assert_eq!((&*sample.id, &*sample.question), ("short-16", "Write.\n#*# Week 1:"));
        assert_eq!((sample.chat, sample.max_tokens, &*sample.stop[0]), (false, 16_000, "*** finished"));
        assert!(sample.documents.is_empty() && sample.before.is_empty() && sample.answer_prefix.is_empty());
        let plan = sample.gold.plan.as_ref().unwrap();
        assert_eq!((&*plan.kind, plan.number, &*plan.checks_once["2"]), ("Week", 3, "gym"));
    }

    #[test]
    fn morphkv_takes_ten_of_each_type() {
        let folder = folder_with("Dataset_long.json", &[prompts()]);
        let loaded = samples("long", folder.path(), None, Protocol::MorphKv).unwrap();
        assert_eq!((loaded.samples.len(), loaded.temperature, loaded.top_p), (20, 0.0, 1.0));
        assert_eq!(
            loaded.note,
            "MorphKV's 20 prompts; a judge is asked without MorphKV's three examples, 30 of 400 records"
        );
        assert!(loaded.samples.iter().all(|sample| sample.max_tokens == 8_000 && sample.stop.is_empty()));
        let last = loaded
            .samples
            .iter()
            .map(|sample| &*sample.id)
            .max_by_key(|id| id[5..].parse::<usize>().unwrap());
        assert_eq!(last, Some("long-19"));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let folder = folder_with("Dataset_short.json", &["[{\"prompt\": \"p\"}]".into()]);
        let error = |setting| samples(setting, folder.path(), None, Protocol::Own).unwrap_err().to_string();
        assert!(error("middle").contains("there are short, long"));
        assert!(
            error("short").contains("Dataset_short.json: missing field `type` at line 1"),
            "{}",
            error("short")
        );
        assert!(error("long").contains("no longgenbench/Dataset_long.json, nor Dataset_long.json"));
    }

    #[test]
    fn both_settings_load() {
        let Some(data) = data("longgenbench") else { return };
        for (setting, tokens) in [("short", 16_000), ("long", 32_000)] {
            let loaded = samples(setting, &data, None, Protocol::Own).unwrap();
            assert_eq!((loaded.samples.len(), &*loaded.note), (400, ""));
            for sample in &loaded.samples {
                let plan = sample.gold.plan.as_ref().unwrap();
                assert!(sample.question.ends_with(&plan.prefix) && plan.number > 0, "{}", sample.id);
                assert_eq!(sample.max_tokens, tokens);
            }
            let morphkv = samples(setting, &data, None, Protocol::MorphKv).unwrap();
            assert_eq!(morphkv.samples.len(), 40);
            assert!(morphkv.note.starts_with("MorphKV's 40 prompts; "), "{}", morphkv.note);
        }
    }
}
