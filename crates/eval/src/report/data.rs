//! The records of a run by model, task and variant, and statistics of them.

use std::collections::BTreeMap;

use refrain::eviction::POLICIES;
use refrain::fusion::METHODS;

use super::measures::{Aggregate, Measure};
use super::scores::{self, BUCKETS, Bucket, SCORE};
use super::stats::{Stat, bootstrap, mean_of_means, median, ratio_of_means};
use super::table::{Unit, counted, distinct};
use super::variant_name::{VariantName, canonical};
use crate::{Record, RunInfo, TaskInfo};

/// The score of a wholly right answer.
const RIGHT: f64 = 0.999;

/// The last record of each sample and depth.
type RecordsBySample<'a> = BTreeMap<(&'a str, u64), &'a Record>;

/// The records of a run by model, task and variant, which are indices into the lists here.
#[derive(Clone)]
pub(super) struct Data<'a> {
    pub about: &'a RunInfo,
    pub models: Vec<&'a str>,
    pub tasks: Vec<TaskInfo>,
    pub variants: Vec<VariantName>,
    piles: BTreeMap<[usize; 3], RecordsBySample<'a>>,
    /// Why a model's task says nothing about quality.
    uninformative: BTreeMap<[usize; 2], String>,
}

impl<'a> Data<'a> {
    /// Models, tasks and variants are in the order of `about`; those that only records have follow. Of several records of the
    /// same sample the last counts.
    pub(super) fn new(about: &'a RunInfo, records: &'a [Record]) -> Data<'a> {
        let asked =
            about.methods.iter().flat_map(|m| about.policies.iter().map(|p| (m.as_str(), p.as_str())));
        let met = records.iter().map(|record| (record.method.as_str(), record.policy.as_str()));
        let texts = distinct(asked.chain(met));
        let canonicals: Vec<VariantName> = texts
            .iter()
            .map(|(method, policy)| VariantName {
                method: canonical(&METHODS, method),
                policy: canonical(&POLICIES, policy),
            })
            .collect();
        let variants = distinct(canonicals.iter().cloned());
        let named = about.models.iter().map(|model| model.name.as_str());
        let models = distinct(named.chain(records.iter().map(|record| record.model.as_str())));
        let mut data = Data {
            about,
            models,
            tasks: tasks(about, records),
            variants,
            piles: BTreeMap::new(),
            uninformative: BTreeMap::new(),
        };
        for record in records {
            let text = (record.method.as_str(), record.policy.as_str());
            let variant = texts.iter().position(|other| *other == text).map(|at| &canonicals[at]);
            let place = (
                data.models.iter().position(|name| *name == record.model),
                data.tasks.iter().position(|task| task.is_of(record)),
                data.variants.iter().position(|other| Some(other) == variant),
            );
            if let (Some(model), Some(task), Some(variant)) = place {
                let sample = (record.sample.as_str(), record.depth.map_or(0, f64::to_bits));
                data.piles.entry([model, task, variant]).or_default().insert(sample, record);
            }
        }
        data.uninformative = data.find_uninformative();
        data
    }

    /// The variant that the others are measured against.
    pub(super) fn vanilla(&self) -> Option<usize> {
        self.variants.iter().position(VariantName::is_vanilla)
    }

    fn pile(
        &self,
        model: usize,
        task: usize,
        variant: usize,
    ) -> impl Iterator<Item = (&(&'a str, u64), &'a Record)> {
        self.piles
            .get(&[model, task, variant])
            .into_iter()
            .flatten()
            .map(|(sample, record)| (sample, *record))
    }

    /// Records with an answer.
    pub(super) fn answered(
        &self,
        model: usize,
        task: usize,
        variant: usize,
    ) -> impl Iterator<Item = &'a Record> {
        self.pile(model, task, variant).map(|(_, record)| record).filter(|record| record.error.is_none())
    }

    /// Records without one.
    pub(super) fn failed(
        &self,
        model: usize,
        task: usize,
        variant: usize,
    ) -> impl Iterator<Item = &'a Record> {
        self.pile(model, task, variant).map(|(_, record)| record).filter(|record| record.error.is_some())
    }

    /// The tasks among these that the variant has a record of.
    pub(super) fn met(&self, model: usize, tasks: &[usize], variant: usize) -> Vec<usize> {
        tasks.iter().copied().filter(|task| self.piles.contains_key(&[model, *task, variant])).collect()
    }

    /// The tasks that the model has a record of.
    pub(super) fn tasks_of(&self, model: usize) -> Vec<usize> {
        let has = |task: &usize| self.piles.keys().any(|key| key[0] == model && key[1] == *task);
        (0..self.tasks.len()).filter(has).collect()
    }

    /// Variants with a record of one of these tasks, vanilla first.
    pub(super) fn variants_of(&self, model: usize, tasks: &[usize]) -> Vec<usize> {
        let mut variants: Vec<usize> =
            (0..self.variants.len()).filter(|variant| !self.met(model, tasks, *variant).is_empty()).collect();
        variants.sort_by_key(|variant| !self.variants[*variant].is_vanilla());
        variants
    }

    /// A value of each pair of records of the samples that both variants answered.
    pub(super) fn paired<T>(
        &self,
        [model, task]: [usize; 2],
        [variant, other]: [usize; 2],
        of: impl Fn(&Record, &Record) -> Option<T>,
    ) -> Vec<T> {
        let both = |(sample, record): (&(&str, u64), &'a Record)| {
            let other = *self.piles.get(&[model, task, other])?.get(sample)?;
            if record.error.is_some() || other.error.is_some() { None } else { of(record, other) }
        };
        self.pile(model, task, variant).filter_map(both).collect()
    }

    /// These records for a model, with only those samples that all of the variants have answered.
    pub(super) fn answered_by_all(&self, model: usize, variants: &[usize]) -> Data<'a> {
        let has = |task: usize, sample: &(&str, u64), variant: &usize| {
            let record = self.piles.get(&[model, task, *variant]).and_then(|pile| pile.get(sample));
            record.is_some_and(|record| record.error.is_none())
        };
        let mut data = self.clone();
        for ([_, task, _], pile) in data.piles.iter_mut().filter(|(key, _)| key[0] == model) {
            pile.retain(|sample, _| variants.iter().all(|variant| has(*task, sample, variant)));
        }
        data.piles.retain(|_, pile| !pile.is_empty());
        data
    }

    /// A score of those records of one task that `part` accepts, on the task's scale.
    pub(super) fn score(
        &self,
        [model, task, variant]: [usize; 3],
        name: &str,
        part: impl Fn(&Record) -> bool,
    ) -> Option<Stat> {
        let records = self.answered(model, task, variant).filter(|record| part(record));
        let parts = records.filter_map(|record| scores::three(&record.scores, name)).collect();
        let stat = bootstrap(vec![parts], |groups| scores::pooled(groups.iter().flatten()))?;
        Some(stat.times(scores::scale(name, self.tasks[task].scale)))
    }

    /// The unweighted mean of the tasks' scores; none if the variant lacks one of them.
    pub(super) fn average(&self, model: usize, tasks: &[usize], variant: usize) -> Option<Stat> {
        let scaled = |task: &usize| -> Vec<f64> {
            let scores = self.answered(model, *task, variant).filter_map(|record| record.scores.get(SCORE));
            scores.map(|score| score * self.tasks[*task].scale).collect()
        };
        let groups: Vec<Vec<f64>> = tasks.iter().map(scaled).collect();
        if groups.iter().any(Vec::is_empty) { None } else { bootstrap(groups, mean_of_means) }
    }

    /// The sum of the tasks' mean scores over another variant's, on samples that both answered, of the tasks that say something.
    pub(super) fn relative(&self, model: usize, tasks: &[usize], variants: [usize; 2]) -> Option<Stat> {
        let pair = |a: &Record, b: &Record| a.scores.get(SCORE).copied().zip(b.scores.get(SCORE).copied());
        let informative = self.informative(model, tasks);
        let groups = informative.iter().map(|task| self.paired([model, *task], variants, pair)).collect();
        bootstrap(groups, ratio_of_means)
    }

    /// A measure over tasks: the mean of their means, or the median of all samples.
    pub(super) fn measure(
        &self,
        model: usize,
        tasks: &[usize],
        variant: usize,
        measure: &Measure,
    ) -> Option<Stat> {
        let own = |of: &dyn Fn(&Record) -> Option<f64>| -> Vec<Vec<f64>> {
            tasks.iter().map(|task| self.answered(model, *task, variant).filter_map(of).collect()).collect()
        };
        match measure.of {
            Aggregate::Mean(of) => bootstrap(own(&|record| of(record.fidelity.as_ref()?)), mean_of_means),
            Aggregate::MedianFidelity(of) => bootstrap(own(&|record| of(record.fidelity.as_ref()?)), median),
            Aggregate::Median(of) => bootstrap(own(&|record| of(record.cost.as_ref()?)), median),
            Aggregate::Against(of) => {
                let against = |record: &Record, vanilla: &Record| {
                    let cost = record.cost.as_ref()?;
                    of(cost, &cost.vanilla_or(vanilla.cost.as_ref())?).filter(|ratio| ratio.is_finite())
                };
                let vanilla = self.vanilla()?;
                let groups =
                    tasks.iter().map(|task| self.paired([model, *task], [variant, vanilla], against));
                bootstrap(groups.collect(), median)
            }
            Aggregate::Relative => self.relative(model, tasks, [variant, self.vanilla()?]),
            Aggregate::RightKept => {
                let is_right =
                    |record: &Record| record.scores.get(SCORE).is_some_and(|score| *score >= RIGHT);
                let kept = |record: &Record, vanilla: &Record| {
                    is_right(vanilla).then(|| if is_right(record) { 1.0 } else { 0.0 })
                };
                let vanilla = self.vanilla()?;
                let groups = tasks.iter().map(|task| self.paired([model, *task], [variant, vanilla], kept));
                bootstrap(vec![groups.flatten().collect()], mean_of_means)
            }
        }
    }

    /// The tasks of a model whose scores tell something about quality.
    pub(super) fn informative(&self, model: usize, tasks: &[usize]) -> Vec<usize> {
        tasks.iter().copied().filter(|task| self.uninformative(model, *task).is_none()).collect()
    }

    /// Why a task says nothing about quality, if it does not.
    pub(super) fn uninformative(&self, model: usize, task: usize) -> Option<&str> {
        self.uninformative.get(&[model, task]).map(String::as_str)
    }

    /// Tasks on which no variant scores 5 %, or more than chance. Vanilla's score alone must not decide: tasks on which it is unlucky would be
    /// left out and those on which it is lucky kept, which makes all others look worse than they are.
    fn find_uninformative(&self) -> BTreeMap<[usize; 2], String> {
        let places = (0..self.models.len()).flat_map(|m| (0..self.tasks.len()).map(move |t| [m, t]));
        let uninformative = |[model, task]: [usize; 2]| {
            let scale = self.tasks[task].scale;
            let variants = self.variants_of(model, &[task]);
            let stats =
                || variants.iter().filter_map(|variant| self.score([model, task, *variant], SCORE, |_| true));
            let says = |stat: Stat| stat.value >= 0.05 * scale && !(stat.enough && stat.low <= 0.0);
            if stats().any(says) {
                return None;
            }
            let best = stats().max_by(|a, b| a.value.total_cmp(&b.value))?;
            let why = format!(
                "no method scores more than {} ({}) of {scale}, on {}",
                Unit::Score.figure(best.value),
                Unit::Score.interval(best),
                counted(best.samples, "sample")
            );
            Some(([model, task], why))
        };
        places.filter_map(uninformative).collect()
    }

    /// The score of a task that papers compare.
    pub(super) fn compared(&self, task: usize) -> &'static str {
        scores::compared(&self.tasks[task].benchmark)
    }

    /// Names of the scores of a task's records, first the one that papers compare.
    pub(super) fn score_names(&self, model: usize, task: usize) -> Vec<String> {
        let piles = self.piles.iter().filter(|(key, _)| key[..2] == [model, task]);
        let mut names = scores::names(piles.flat_map(|(_, pile)| pile.values().map(|record| &record.scores)));
        names.sort_by_key(|name| name != self.compared(task));
        names
    }

    /// Depths at which a task's records are, shallow first.
    pub(super) fn depths(&self, task: usize) -> Vec<f64> {
        let piles = self.piles.iter().filter(|(key, _)| key[1] == task);
        let mut depths =
            distinct(piles.flat_map(|(_, pile)| pile.values().filter_map(|record| record.depth)));
        depths.sort_by(f64::total_cmp);
        depths
    }

    /// Ranges of context lengths that the benchmark has scores of: of sets of LongBench-E.
    pub(super) fn buckets(&self, task: usize) -> &'static [Bucket] {
        let about = &self.tasks[task];
        let is_counted = |record: &Record| about.is_of(record) && record.context_words.is_some();
        let is_bucketed = about.benchmark == "longbench" && about.task.ends_with("_e");
        if is_bucketed && self.counted().any(is_counted) { &BUCKETS } else { &[] }
    }

    /// Records that count.
    pub(super) fn counted(&self) -> impl Iterator<Item = &'a Record> {
        self.piles.values().flat_map(|pile| pile.values().copied())
    }
}

fn tasks(about: &RunInfo, records: &[Record]) -> Vec<TaskInfo> {
    let mut tasks = about.tasks.clone();
    for record in records {
        if !tasks.iter().any(|task| task.is_of(record)) {
            tasks.push(TaskInfo {
                benchmark: record.benchmark.clone(),
                task: record.task.clone(),
                length: record.length,
                scale: if record.benchmark == "needle" { 10.0 } else { 100.0 },
                note: "the run does not say what it is".to_owned(),
                ..TaskInfo::default()
            });
        }
    }
    tasks
}
