//! Everything measured as comma-separated values, a line a quantity.

use crate::csv::csv_line;

use super::data::Data;
use super::measures::ALL;
use super::scores::{self, SCORE};
use super::stats::Stat;

/// Every score and measure of every model, task, depth and variant, with its 95 % interval. Scores are on the task's scale.
pub(super) fn render(data: &Data<'_>) -> String {
    let mut out =
        "model,benchmark,task,length,depth,method,policy,name,value,low,high,samples,scale\n".to_owned();
    for model in 0..data.models.len() {
        for task in data.tasks_of(model) {
            // Other benchmarks have depths too, but a sample or two at each.
            let by_depth = data.tasks[task].benchmark == "needle";
            let depths = data.depths(task).into_iter().filter(|_| by_depth).map(Some);
            for variant in data.variants_of(model, &[task]) {
                let mut push = |depth: Option<f64>, name: &str, stat: Option<Stat>, scale: f64| {
                    out += &stat.map_or(String::new(), |stat| {
                        line(data, [model, task, variant], depth, name, stat, scale)
                    });
                };
                for name in data.score_names(model, task) {
                    for depth in std::iter::once(None).chain(depths.clone()) {
                        push(
                            depth,
                            &name,
                            data.score([model, task, variant], &name, |record| {
                                depth.is_none() || record.depth == depth
                            }),
                            scores::scale(&name, data.tasks[task].scale),
                        );
                    }
                }
                for bucket in data.buckets(task) {
                    let stat = data.score([model, task, variant], SCORE, |record| bucket.has(record));
                    push(None, &format!("{SCORE} {}", bucket.name), stat, data.tasks[task].scale);
                }
                for measure in ALL {
                    push(None, measure.name, data.measure(model, &[task], variant, measure), 1.0);
                }
                let failed = data.failed(model, task, variant).count();
                let (value, samples) = (failed as f64, failed);
                let count = Stat { value, low: value, high: value, samples, enough: true };
                push(None, "failed", (failed > 0).then_some(count), 1.0);
            }
        }
    }
    out
}

fn line(
    data: &Data<'_>,
    [model, task, variant]: [usize; 3],
    depth: Option<f64>,
    name: &str,
    stat: Stat,
    scale: f64,
) -> String {
    let (task, variant) = (&data.tasks[task], &data.variants[variant]);
    let number = |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
    let cells = [
        data.models[model].to_owned(),
        task.benchmark.clone(),
        task.task.clone(),
        task.length.map_or(String::new(), |length| length.to_string()),
        number(depth),
        variant.method.clone(),
        variant.policy.clone(),
        name.to_owned(),
        stat.value.to_string(),
        stat.low.to_string(),
        stat.high.to_string(),
        stat.samples.to_string(),
        scale.to_string(),
    ];
    csv_line(cells)
}
