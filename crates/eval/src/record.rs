//! The files of a run: a record a sample and variant, and the description of the run.

use std::collections::BTreeMap;

use refrain::engine::RequestStats;
use serde::{Deserialize, Serialize};

/// One answer with its scores: a line of `results.jsonl`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The model, as it was named.
    pub model: String,
    /// `longbench`, `needle`, `ruler`, `longgenbench`, `longwriter` or `rag`.
    pub benchmark: String,
    /// The task within it, such as `hotpotqa` or `niah_single_1`.
    pub task: String,
    /// Tokens of context that the sample was made for, where the benchmark is a grid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
    /// Where its needle lies, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<f64>,
    /// The sample's name within the task.
    pub sample: String,
    /// Specification of the fusion method, such as `a3:ratio=0.3`.
    pub method: String,
    /// Specification of the eviction policy; `full` keeps everything.
    pub policy: String,
    /// The answer.
    #[serde(default)]
    pub answer: String,
    /// Scores by name, `score` being the task's own. Each is 0..1, except `words` and counts of checks (`checks`,
    /// `_asked`, `_yes`). Empty if the sample failed.
    #[serde(default)]
    pub scores: BTreeMap<String, f64>,
    /// Fidelity to vanilla; none if the sample failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fidelity: Option<Fidelity>,
    /// Times and bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Cost>,
    /// Why there is no answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// When it was done, seconds since 1970.
    #[serde(default)]
    pub finished: u64,
}

/// Fidelity of a variant to vanilla with full attention, teacher-forced over the first tokens of vanilla's answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fidelity {
    /// Mean over positions of `KL(vanilla ‖ method)` of the next token, in nats.
    pub kl: f64,
    /// `KL(vanilla ‖ method)` of the answer's first token, in nats.
    #[serde(default)]
    pub kl_first: f64,
    /// Share of positions at which both have an equal likeliest token.
    pub top1: f64,
    /// Positions compared.
    pub positions: usize,
    /// By layer: L2 distance of the attention of the question's rows to the document tokens, mean over heads, to
    /// vanilla's (A3, figure 3). Empty if the run does not compare attention.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attention_l2: Vec<f64>,
    /// Share of vanilla's 40 most attended document tokens that the method recomputed at its deepest layer (A3, figure 2).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hit_rate_40: Option<f64>,
    /// Share of vanilla's most attended document tokens that the method recomputed, of as many as it recomputed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hit_rate: Option<f64>,
}

/// Times and bytes of an answer, from the engine's statistics. Times are in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of document chunks.
    pub document_tokens: usize,
    /// Tokens of the answer.
    pub answer_tokens: usize,
    /// Document rows computed over all layers / (layers × document tokens).
    pub recompute_ratio: f64,
    /// Rows computed over all layers and passes / (layers × document tokens).
    #[serde(default)]
    pub charged_ratio: f64,
    /// Tokens of the prompt that are kept / tokens of the prompt.
    pub sequence_ratio: f64,
    /// Operations of the prefill.
    pub operations: f64,
    /// Request to first token, loading included.
    pub ttft: f64,
    /// `ttft` without the time of waiting for loading.
    pub compute_ttft: f64,
    /// Time a token after the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot: Option<f64>,
    /// Bytes that the keys and values held at the end take, one cache a KV head.
    pub kv_bytes: usize,
    /// `kv_bytes` with a cache for each query head, as the papers count memory.
    pub kv_bytes_query_heads: usize,
    /// Most bytes that were allocated at a time, prefill included.
    pub kv_bytes_peak: usize,
    /// Bytes that full attention would hold at the end.
    pub kv_bytes_full: usize,
    /// Bytes beside keys and values: statistics, positions, representatives.
    pub side_bytes: usize,
    /// Bytes of keys and values brought in from the store.
    pub bytes_loaded: u64,
    /// Bytes of the document chunks' keys and values at rest.
    #[serde(default)]
    pub document_bytes: u64,
}

impl Cost {
    /// The short form of an stats; `group` is query heads a KV head.
    pub fn of(stats: &RequestStats, group: usize) -> Cost {
        let own = if stats.kv_accounting == "query_head" { group } else { 1 };
        Cost {
            prompt_tokens: stats.prompt_tokens,
            document_tokens: stats.document_tokens,
            answer_tokens: stats.answer_tokens,
            recompute_ratio: stats.recompute_ratio,
            charged_ratio: stats.charged_ratio,
            sequence_ratio: stats.sequence_ratio,
            operations: stats.operations,
            ttft: stats.ttft,
            compute_ttft: stats.compute_ttft,
            tpot: stats.tpot,
            kv_bytes: stats.kv_bytes_held / own,
            kv_bytes_query_heads: stats.kv_bytes_held / own * group,
            kv_bytes_peak: stats.kv_bytes_peak,
            kv_bytes_full: stats.kv_bytes_full,
            side_bytes: stats.side_bytes,
            bytes_loaded: stats.bytes_loaded,
            document_bytes: stats.document_bytes,
        }
    }
}

/// The description of a run: its file `about.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunInfo {
    /// The program's version.
    pub version: String,
    /// The command that made the run.
    pub command: String,
    /// The matrix as it was written, TOML.
    pub matrix: String,
    /// When it began, seconds since 1970.
    pub started: u64,
    /// Seconds spent on it, over all its sittings.
    pub seconds: f64,
    /// The machine.
    pub machine: MachineInfo,
    /// The models.
    pub models: Vec<ModelInfo>,
    /// The tasks, in order.
    pub tasks: Vec<TaskInfo>,
    /// Specifications of the fusion methods, in order.
    pub methods: Vec<String>,
    /// Specifications of the eviction policies, in order.
    pub policies: Vec<String>,
    /// Seed of everything drawn.
    pub seed: u64,
    /// Other settings that answers depend on, by name. A run continues only with equal settings.
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
}

impl RunInfo {
    /// Adds what the run had before, as `known` says.
    ///
    /// # Errors
    /// The difference, if answers of both cannot be compared.
    pub(crate) fn continue_from(&mut self, known: &RunInfo) -> Result<(), String> {
        let differs = |what: &str, was: &str, is: &str| {
            let advice = "give another folder, or the same settings";
            Err(format!("this run was made with {what} {was}, not {is}; {advice}"))
        };
        if known.seed != self.seed {
            return differs("seed", &known.seed.to_string(), &self.seed.to_string());
        }
        for (name, is) in &self.settings {
            if let Some(was) = known.settings.get(name).filter(|was| *was != is) {
                return differs(name, was, is);
            }
        }
        for model in &self.models {
            let same = |other: &&ModelInfo| other.name == model.name;
            if let Some(other) = known.models.iter().find(same).filter(|other| *other != model) {
                return differs(
                    &format!("another {} than", model.name),
                    &other.fingerprint,
                    &model.fingerprint,
                );
            }
        }
        for task in &self.tasks {
            let other = known.tasks.iter().find(|other| other.same_as(task));
            if let Some(other) = other.filter(|other| other.made_of() != task.made_of()) {
                return differs(&task.label(), &other.made_of(), &task.made_of());
            }
        }
        (self.started, self.seconds) = (known.started, known.seconds);
        // A run that went on was made by all of its commands.
        self.command = joined(&known.command, &self.command, "\n");
        self.matrix = joined(&known.matrix, &self.matrix, "\n# then\n");
        keep(&mut self.models, &known.models, |a, b| a.name == b.name);
        keep(&mut self.tasks, &known.tasks, TaskInfo::same_as);
        keep(&mut self.methods, &known.methods, PartialEq::eq);
        keep(&mut self.policies, &known.policies, PartialEq::eq);
        Ok(())
    }
}

/// Parts of a text, each once.
fn joined(known: &str, new: &str, between: &str) -> String {
    if known.is_empty() {
        return new.to_owned();
    }
    let is_known = known.split(between).any(|part| part.trim() == new.trim());
    if is_known { known.to_owned() } else { [known.trim_end(), new].join(between) }
}

/// Known items come first; an item that is in both is taken from the new ones.
fn keep<T: Clone>(new: &mut Vec<T>, known: &[T], same: impl Fn(&T, &T) -> bool) {
    let mut all: Vec<T> =
        known.iter().map(|old| new.iter().find(|new| same(old, new)).unwrap_or(old).clone()).collect();
    all.extend(new.iter().filter(|new| !known.iter().any(|old| same(old, new))).cloned());
    *new = all;
}

/// A machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MachineInfo {
    /// Its processor.
    pub cpu: String,
    /// Instructions that the CPU's kernels use. Of runs on a GPU that older versions made, the GPU's name.
    pub isa: String,
    /// Processor that computed, where that is not the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Threads used.
    pub threads: usize,
    /// Bytes of memory.
    pub memory: u64,
    /// Operating system.
    pub os: String,
}

impl MachineInfo {
    /// The description of this machine and of another that took part: what they have in common once.
    pub(crate) fn beside(&self, other: &MachineInfo) -> MachineInfo {
        MachineInfo {
            cpu: joined(&self.cpu, &other.cpu, ", "),
            isa: joined(&self.isa, &other.isa, ", "),
            device: match (&self.device, &other.device) {
                (Some(device), Some(other)) => Some(joined(device, other, ", ")),
                (device, other) => device.clone().or_else(|| other.clone()),
            },
            os: joined(&self.os, &other.os, ", "),
            ..self.clone()
        }
    }
}

/// A model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelInfo {
    /// The name that records have.
    pub name: String,
    /// Its file or folder, without the path.
    pub file: String,
    /// Fingerprint of weights and configuration, hexadecimal.
    pub fingerprint: String,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Most tokens of a prompt with its answer.
    pub context: usize,
    /// How weights are kept and multiplied.
    pub precision: String,
    /// Type of cached keys and values.
    pub kv: String,
}

/// A task of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TaskInfo {
    /// As in its records.
    pub benchmark: String,
    /// As in its records.
    pub task: String,
    /// As in its records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
    /// Name of its score, such as `qa_f1`.
    pub metric: String,
    /// The number that a score of 1 is shown as: 100 for most tasks, 10 for the needle.
    pub scale: f64,
    /// Number of samples.
    pub samples: usize,
    /// Samples of the benchmark itself, if it is not generated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<usize>,
    /// Differences from the benchmark: a subset, a derived set, another judge.
    #[serde(default)]
    pub note: String,
    /// BLAKE3 of the data's file, hexadecimal, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
}

impl TaskInfo {
    /// For people: `ruler/vt at 4096`.
    pub fn label(&self) -> String {
        let name = if self.benchmark == self.task {
            self.task.clone()
        } else {
            format!("{}/{}", self.benchmark, self.task)
        };
        self.length.map_or(name.clone(), |length| format!("{name} at {length}"))
    }

    /// The things that its samples depend on beside their number.
    fn made_of(&self) -> String {
        let data = self.data.as_deref().and_then(|hash| hash.get(..12)).unwrap_or("no file");
        format!("({}, {data}, {})", self.metric, self.note)
    }

    pub(crate) fn same_as(&self, other: &TaskInfo) -> bool {
        (&self.benchmark, &self.task, self.length) == (&other.benchmark, &other.task, other.length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_of_older_reports_are_read_and_name_no_device() {
        let old = r#"{"cpu":"A","isa":"amx","threads":2,"memory":1,"os":"L"}"#;
        let old: MachineInfo = serde_json::from_str(old).unwrap();
        assert_eq!((old.isa.as_str(), &old.device), ("amx", &None));
        assert!(!serde_json::to_string(&old).unwrap().contains("device"));
        let gpu = |name: &str| MachineInfo { device: Some(name.to_owned()), ..old.clone() };
        assert_eq!(old.beside(&gpu("H100")).device, gpu("H100").device);
        assert_eq!(gpu("H100").beside(&gpu("A100")).device, Some("H100, A100".to_owned()));
        let again: MachineInfo = serde_json::from_str(&serde_json::to_string(&gpu("H100")).unwrap()).unwrap();
        assert_eq!(again, gpu("H100"));
    }
}
