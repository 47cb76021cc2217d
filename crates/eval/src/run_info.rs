//! The description of a run, by which it goes on and is reported.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::record::Record;

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
    /// Adds what the run had before, as `known` says. Returns in words what makes times of both incomparable.
    ///
    /// # Errors
    /// The difference, if answers of both cannot be compared.
    pub(crate) fn continue_from(&mut self, known: &RunInfo) -> Result<Vec<String>, String> {
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
        // A setting that this sitting has no use for still binds the answers that depend on it.
        for (name, was) in &known.settings {
            self.settings.entry(name.clone()).or_insert_with(|| was.clone());
        }
        for model in &self.models {
            let other = known.models.iter().find(|other| other.name == model.name);
            if let Some((property, was, is)) = other.and_then(|other| other.difference(model)) {
                return differs(&format!("{} with {property}", model.name), &was, &is);
            }
        }
        for task in &mut self.tasks {
            let Some(other) = known.tasks.iter().find(|other| other.same_as(task)) else { continue };
            if other.made_of() != task.made_of() {
                return differs(&task.label(), &other.made_of(), &task.made_of());
            }
            // Answers that no judge has graded can be graded later.
            if let Some(judge) = other.judge.as_deref().filter(|_| other.judge != task.judge) {
                let is = task.judge.as_deref().unwrap_or("none");
                return differs(&format!("{} and the judge", task.label()), judge, is);
            }
            task.keep_samples_of(other);
        }
        let mut changes = Vec::new();
        let mut changed = |what: &str, was: &str, is: &str| {
            changes.push(format!(
                "this run was begun with the {what} {was} and goes on with {is}: its times are of both"
            ));
        };
        let machine = known.machine.beside(&self.machine);
        if machine != known.machine || known.machine.threads != self.machine.threads {
            changed("machine", &known.machine.label(), &self.machine.label());
        }
        self.machine = machine;
        let version = joined(&known.version, &self.version, ", ");
        if version != known.version {
            changed("version", &known.version, &self.version);
        }
        self.version = version;
        (self.started, self.seconds) = (known.started, known.seconds);
        // A run that went on was made by all of its commands.
        self.command = joined(&known.command, &self.command, "\n");
        self.matrix = joined(&known.matrix, &self.matrix, "\n# then\n");
        keep(&mut self.models, &known.models, |a, b| a.name == b.name);
        keep(&mut self.tasks, &known.tasks, TaskInfo::same_as);
        keep(&mut self.methods, &known.methods, PartialEq::eq);
        keep(&mut self.policies, &known.policies, PartialEq::eq);
        Ok(changes)
    }

    /// Leaves a task the judge that graded records of it, if any: one that was only asked for binds nobody.
    pub(crate) fn keep_judges_of(&mut self, records: &[Record]) {
        for task in &mut self.tasks {
            task.judge =
                records.iter().filter(|record| task.is_of(record)).find_map(|record| record.judge.clone());
        }
    }

    /// Whether the judge of a record's task, where it has one, took part in the record's scores.
    pub(crate) fn is_graded(&self, record: &Record) -> bool {
        let task = self.tasks.iter().find(|task| task.is_of(record));
        task.is_none_or(|task| task.judge.is_none() || task.judge == record.judge)
    }
}

/// Parts of two texts, each once.
fn joined(known: &str, new: &str, between: &str) -> String {
    new.split(between).fold(known.to_owned(), |all, part| {
        let is_known = all.split(between).any(|other| other.trim() == part.trim());
        match all.is_empty() {
            true => part.to_owned(),
            false if is_known || part.trim().is_empty() => all,
            false => [all.trim_end(), part].join(between),
        }
    })
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

    /// For people.
    fn label(&self) -> String {
        let device = self.device.as_ref().map_or_else(String::new, |device| format!("{device}, "));
        format!("{device}{} ({}, {} threads, {})", self.cpu, self.isa, self.threads, self.os)
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

impl ModelInfo {
    /// The first property in which another description of the model differs, with both values. The file's name is none: the fingerprint
    /// tells weights.
    fn difference(&self, other: &ModelInfo) -> Option<(&'static str, String, String)> {
        let properties = |model: &ModelInfo| {
            let ModelInfo { fingerprint, precision, kv, context, .. } = model.clone();
            let shape = format!("{} × {} ({})", model.layers, model.heads, model.kv_heads);
            [
                ("the fingerprint", fingerprint),
                ("layers × heads", shape),
                ("the context", context.to_string()),
                ("weights of", precision),
                ("keys and values of", kv),
            ]
        };
        let mut pairs = properties(self).into_iter().zip(properties(other));
        pairs.find_map(|((name, was), (_, is))| (was != is).then_some((name, was, is)))
    }
}

/// A task of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TaskInfo {
    /// The benchmark, by the name that its records have.
    pub benchmark: String,
    /// The task, by the name that its records have.
    pub task: String,
    /// The length of its prompts in tokens, by which its records differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
    /// Name of its score, such as `qa_f1`.
    pub metric: String,
    /// The number that a score of 1 is shown as: 100 for most tasks, 10 for the needle.
    pub scale: f64,
    /// Number of samples: the largest of any model.
    pub samples: usize,
    /// Number of samples of each model, by its name. Runs of earlier versions have none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub model_samples: BTreeMap<String, usize>,
    /// Samples of the benchmark itself, where it has a number of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<usize>,
    /// Differences from the benchmark, with any model: a subset, a derived set.
    #[serde(default)]
    pub note: String,
    /// Differences from the benchmark with a model, by its name. Models of a run may have different ones.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub model_notes: BTreeMap<String, String>,
    /// The judge, where the benchmark asks one and the run has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judge: Option<String>,
    /// BLAKE3 of the data's file or files, hexadecimal, if there are any.
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

    /// Number of samples of a model.
    pub(crate) fn samples_of(&self, model: &str) -> usize {
        self.model_samples.get(model).copied().unwrap_or(self.samples)
    }

    /// Takes over the samples of models that a run had before. Answers stay where a smaller limit asks for fewer, and with them the
    /// note on the samples.
    fn keep_samples_of(&mut self, known: &TaskInfo) {
        self.samples = self.samples.max(known.samples);
        for (model, note) in &known.model_notes {
            if !self.model_notes.contains_key(model) || known.samples_of(model) > self.samples_of(model) {
                self.model_notes.insert(model.clone(), note.clone());
            }
        }
        for (model, samples) in &known.model_samples {
            let own = self.model_samples.entry(model.clone()).or_default();
            *own = (*own).max(*samples);
        }
    }

    /// Adds to the differences from the benchmark with a model.
    pub(crate) fn note_of_model(&mut self, model: &str, more: &str) {
        let note = self.model_notes.entry(model.to_owned()).or_default();
        *note = if note.is_empty() { more.to_owned() } else { format!("{note}; {more}") };
    }

    /// All differences from the benchmark with a model, or with every model by its name, and the judge.
    pub(crate) fn notes(&self, model: Option<&str>) -> String {
        let own: Vec<String> = match model {
            Some(model) => self.model_notes.get(model).cloned().into_iter().collect(),
            None => self.model_notes.iter().map(|(model, note)| format!("{model}: {note}")).collect(),
        };
        let all = [vec![self.note.trim_end_matches('.').to_owned()], own, vec![self.judge_note()]].concat();
        all.into_iter().filter(|note| !note.is_empty()).collect::<Vec<_>>().join("; ")
    }

    /// The judge in words; empty of benchmarks that ask none, and of runs of earlier versions, which have the judge in `note`.
    fn judge_note(&self) -> String {
        match (self.benchmark.as_str(), &self.judge) {
            _ if self.note.contains("judge: ") => String::new(),
            (_, Some(judge)) => format!("judge: {judge}"),
            ("longgenbench", None) => "no judge: scores named proxy are ours".to_owned(),
            ("longwriter", None) => "no judge: quality is not graded".to_owned(),
            _ => String::new(),
        }
    }

    /// The things that its samples depend on beside their number.
    fn made_of(&self) -> String {
        let data = self.data.as_deref().and_then(|hash| hash.get(..12)).unwrap_or("no file");
        format!("({}, {data}, {})", self.metric, self.note)
    }

    pub(crate) fn same_as(&self, other: &TaskInfo) -> bool {
        (&self.benchmark, &self.task, self.length) == (&other.benchmark, &other.task, other.length)
    }

    pub(crate) fn is_of(&self, record: &Record) -> bool {
        (&self.benchmark, &self.task, self.length) == (&record.benchmark, &record.task, record.length)
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
        let both = gpu("H100").beside(&gpu("A100"));
        assert_eq!(
            (gpu("A100").beside(&both).device, both.beside(&both)),
            (Some("A100, H100".to_owned()), both)
        );
    }

    fn run(model: ModelInfo, task: TaskInfo) -> RunInfo {
        let machine = MachineInfo { cpu: "A".to_owned(), threads: 2, ..MachineInfo::default() };
        RunInfo {
            version: "1".to_owned(),
            machine,
            models: vec![model],
            tasks: vec![task],
            ..RunInfo::default()
        }
    }

    #[test]
    fn a_model_that_differs_is_told_by_the_property() {
        let f32 = ModelInfo {
            name: "m".to_owned(),
            fingerprint: "ab".to_owned(),
            kv: "f32".to_owned(),
            ..ModelInfo::default()
        };
        let q8 = ModelInfo { kv: "q8".to_owned(), ..f32.clone() };
        let error = run(q8, TaskInfo::default()).continue_from(&run(f32, TaskInfo::default())).unwrap_err();
        assert!(
            error.starts_with("this run was made with m with keys and values of f32, not q8; "),
            "{error}"
        );
    }

    #[test]
    fn another_machine_or_version_goes_on_with_a_warning() {
        let known = run(ModelInfo::default(), TaskInfo::default());
        assert_eq!(known.clone().continue_from(&known), Ok(vec![]));
        let mut other = known.clone();
        (other.machine.cpu, other.version) = ("B".to_owned(), "2".to_owned());
        let changes = other.continue_from(&known).unwrap();
        assert_eq!(changes.len(), 2);
        assert!(
            changes[0].contains("the machine A (") && changes[1].contains("the version 1 "),
            "{changes:?}"
        );
        assert_eq!((other.machine.cpu.as_str(), other.version.as_str()), ("A, B", "1, 2"));
        let mut threads = known.clone();
        threads.machine.threads = 4;
        assert_eq!(threads.continue_from(&known).unwrap().len(), 1);
    }

    #[test]
    fn notes_of_models_do_not_keep_a_run_from_going_on() {
        let task = |model: &str, note: &str| TaskInfo {
            task: "t".to_owned(),
            note: "built-in".to_owned(),
            samples: note.len(),
            model_notes: [(model.to_owned(), note.to_owned())].into(),
            ..TaskInfo::default()
        };
        let model = |name: &str| ModelInfo { name: name.to_owned(), ..ModelInfo::default() };
        let mut second = run(model("large"), task("large", "cut"));
        second.continue_from(&run(model("small"), task("small", "fitted"))).unwrap();
        assert_eq!((second.models.len(), second.tasks.len()), (2, 1));
        assert_eq!(second.tasks[0].samples, "fitted".len(), "the larger number");
        assert_eq!(second.tasks[0].notes(Some("small")), "built-in; fitted");
        assert_eq!(second.tasks[0].notes(None), "built-in; large: cut; small: fitted");
    }

    #[test]
    fn a_setting_binds_later_sittings_though_one_between_has_none() {
        let with = |settings: &[(&str, &str)]| RunInfo {
            settings: settings.iter().map(|(name, is)| ((*name).to_owned(), (*is).to_owned())).collect(),
            ..RunInfo::default()
        };
        let (first, mut second, mut third) = (with(&[("text:a", "1")]), with(&[]), with(&[("text:a", "2")]));
        second.continue_from(&first).unwrap();
        assert_eq!(second.settings, first.settings);
        let error = third.continue_from(&second).unwrap_err();
        assert!(error.contains("text:a 1, not 2"), "{error}");
    }

    #[test]
    fn a_smaller_limit_keeps_the_samples_and_their_note() {
        let task = |samples: usize| TaskInfo {
            samples,
            model_samples: [("m".to_owned(), samples)].into(),
            model_notes: [("m".to_owned(), format!("1 of {samples} samples"))].into(),
            ..TaskInfo::default()
        };
        for (was, is) in [(20, 10), (10, 20)] {
            let mut now = task(is);
            now.keep_samples_of(&task(was));
            assert_eq!(now, task(20), "{was}, then {is}");
        }
    }

    #[test]
    fn a_judge_may_come_later_and_not_change() {
        let task = |judge: Option<&str>| TaskInfo {
            benchmark: "longwriter".to_owned(),
            judge: judge.map(str::to_owned),
            ..TaskInfo::default()
        };
        let go_on = |was, is| {
            run(ModelInfo::default(), task(is)).continue_from(&run(ModelInfo::default(), task(was)))
        };
        assert!(go_on(None, Some("a")).is_ok() && go_on(Some("a"), Some("a")).is_ok());
        assert!(go_on(Some("a"), Some("b")).unwrap_err().contains("the judge a, not b"));
        assert!(go_on(Some("a"), None).unwrap_err().contains("the judge a, not none"));
        let notes = [None, Some("a")].map(|judge| task(judge).notes(None));
        assert_eq!(notes, ["no judge: quality is not graded", "judge: a"]);
        let about = run(ModelInfo::default(), task(Some("a")));
        let record = |judge: Option<&str>| Record {
            benchmark: "longwriter".to_owned(),
            judge: judge.map(str::to_owned),
            ..Record::default()
        };
        assert!(about.is_graded(&record(Some("a"))) && !about.is_graded(&record(None)));
    }
}
