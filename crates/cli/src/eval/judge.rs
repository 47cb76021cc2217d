//! The judge of long outputs.

use anyhow::Result;
use refrain_eval::tasks::{LoadedTask, longwriter};
use refrain_eval::{Judge, Matrix, Scoring};

use crate::http::config_for;

/// The judge at a URL, with the key of the environment.
pub(crate) fn judge(url: &str, model: &str) -> Judge {
    let key = std::env::var("OPENAI_API_KEY").ok().filter(|key| !key.is_empty());
    Judge::new(url, model, key, config_for(url))
}

/// Whether a matrix has tasks whose benchmark asks a judge.
pub(crate) fn is_graded(matrix: &Matrix) -> bool {
    let benchmarks = ["longgenbench/", "longwriter/"];
    matrix.tasks.iter().any(|task| benchmarks.iter().any(|benchmark| task.name.starts_with(benchmark)))
}

/// Names the judge of a task whose benchmark asks one.
pub(super) fn name_judge(job: &mut LoadedTask, judge: Option<&Judge>) {
    if matches!(job.scoring, Scoring::LongGen | Scoring::LongWriter) {
        job.about.judge = judge.map(|judge| judge.model().to_owned());
    }
}

/// The prompt of LongWriter's judge, if there is a judge and a task of LongWriter.
pub(crate) fn judge_template(
    judge: Option<&Judge>,
    matrix: &Matrix,
    jobs: &[LoadedTask],
) -> Result<Option<String>> {
    let writing = jobs.iter().any(|job| job.scoring == Scoring::LongWriter);
    let folder = matrix.data.as_deref().filter(|_| judge.is_some() && writing);
    Ok(folder.map(longwriter::judge_template).transpose()?)
}
