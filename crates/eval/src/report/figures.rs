//! The papers' figures, of this run's records.

use refrain::registry::{join, split};

use super::data::Data;
use super::measures::{HIT_RATE, HIT_RATE_40, KL, KV_SHARE, Measure, RELATIVE, TPOT_SPEEDUP, TTFT_SPEEDUP};
use super::scores::SCORE;
use super::stats::mean;
use super::svg::{Axis, Plot, Point, Series, bars, heat, legend};
use super::table::{Block, Figure, Section, Unit, distinct};
use super::variant_name::{VariantName, base, default, label, option, without};

const VANILLA: Option<(f64, &str)> = Some((1.0, "Vanilla"));

/// All figures but the summary's; none without data for any.
pub(super) fn section(data: &Data<'_>) -> Option<Section> {
    let needles = (0..data.models.len()).map(|model| needle(data, model));
    let figures = needles.chain([sweep(data), attention(data), hit_rates(data), retained(data)]);
    let blocks: Vec<Block> = figures.flatten().map(Block::Figure).collect();
    (!blocks.is_empty()).then(|| Section { title: "Figures".to_owned(), blocks })
}

/// A figure of the panels that there are.
fn figure(title: &str, note: &str, panels: Vec<Option<String>>) -> Option<Figure> {
    let panels: Vec<String> = panels.into_iter().flatten().collect();
    (!panels.is_empty()).then(|| Figure { title: title.to_owned(), note: note.to_owned(), panels })
}

/// A variant's label without the options that all variants of its name have.
fn short(data: &Data<'_>, variant: usize) -> String {
    short_name(data, variant).split('+').map(label).collect::<Vec<_>>().join(" + ")
}

/// A variant's name without the options that all variants of its name have.
fn short_name(data: &Data<'_>, variant: usize) -> String {
    let name = data.variants[variant].name();
    if name.contains('+') {
        return name;
    }
    let names: Vec<String> =
        data.variants.iter().map(VariantName::name).filter(|other| base(other) == base(&name)).collect();
    let own = split(&name).1.filter(|own| !names.iter().all(|other| split(other).1.any(|has| has == *own)));
    join(&base(&name), own.map(|(key, value)| format!("{key}={value}")))
}

/// A panel for every model.
fn by_model(data: &Data<'_>, panels: impl Fn(usize) -> Vec<Option<String>>) -> Vec<Option<String>> {
    (0..data.models.len()).flat_map(panels).collect()
}

fn axis(measure: &Measure, label: &'static str) -> Axis {
    Axis { label, unit: measure.unit, log: false }
}

/// Two measures of a variant over a model's tasks as a point.
fn point(
    data: &Data<'_>,
    model: usize,
    variant: usize,
    [x, y]: [&Measure; 2],
    label: String,
) -> Option<Point> {
    let tasks = data.tasks_of(model);
    let x = data.measure(model, &tasks, variant, x)?.value;
    let y = data.measure(model, &tasks, variant, y)?;
    Some(Point { x, y: y.value, interval: Some((y.low, y.high)), label })
}

/// A plot of points, each a variant; KL has a logarithmic axis, without those that are at zero. Variants that differ in their charge
/// alone are joined by a line, which has one name.
fn points(
    data: &Data<'_>,
    model: usize,
    variants: &[usize],
    [x, y]: [(&Measure, &'static str); 2],
) -> Option<String> {
    let log = y.0.unit == Unit::Nats;
    let one = |variant: usize, label: String| -> Option<Point> {
        let mut point = point(data, model, variant, [x.0, y.0], label)?;
        // An interval that reaches zero does not fit on a logarithmic axis.
        point.interval = point.interval.filter(|(low, _)| !log || *low > 0.0);
        (!log || point.y > 0.0).then_some(point)
    };
    let series: Vec<Series> = by_charge(data, variants)
        .iter()
        .filter_map(|variants| {
            let (first, last) = (*variants.first()?, variants.len() - 1);
            let name = |at| match (at, last) {
                (0, 0) => short(data, first),
                (at, last) if at == last => label(&without(&short_name(data, first), "charge")),
                _ => String::new(),
            };
            let points: Vec<Point> =
                variants.iter().enumerate().filter_map(|(at, variant)| one(*variant, name(at))).collect();
            let drawn = !points.is_empty();
            drawn.then(|| Series { style: style(data, first), joined: points.len() > 1, points })
        })
        .collect();
    let others = series.iter().filter(|series| series.style != 0).count();
    let level = if log { None } else { Some((1.0, "")) };
    let x_axis = Axis { log: x.0.name == TTFT_SPEEDUP.name, ..axis(x.0, x.1) };
    let y = Axis { log, ..axis(y.0, y.1) };
    let plot = Plot { title: data.models[model].to_owned(), x: x_axis, y, series, level };
    if others == 0 { None } else { plot.svg() }
}

/// Variants that differ in their charge alone together, the highest first.
fn by_charge(data: &Data<'_>, variants: &[usize]) -> Vec<Vec<usize>> {
    let name = |variant: usize| data.variants[variant].name();
    let charge = |variant: usize| -> f64 {
        let name = name(variant);
        let given = option(&name, "charge").map(str::to_owned).or_else(|| default(&name, "charge"));
        given.and_then(|charge| charge.parse().ok()).unwrap_or(0.0)
    };
    let mut all: Vec<Vec<usize>> = Vec::new();
    for variant in variants.iter().copied() {
        let alike =
            |other: &&mut Vec<usize>| without(&name(other[0]), "charge") == without(&name(variant), "charge");
        match all.iter_mut().find(alike) {
            Some(others) => others.push(variant),
            None => all.push(vec![variant]),
        }
    }
    all.iter_mut().for_each(|alike| alike.sort_by(|a, b| charge(*b).total_cmp(&charge(*a))));
    all
}

fn evicts(variant: &VariantName) -> bool {
    variant.policy != "full" || variant.is_vanilla()
}

fn only(data: &Data<'_>, variants: &[usize], which: impl Fn(&VariantName) -> bool) -> Vec<usize> {
    variants.iter().copied().filter(|variant| which(&data.variants[*variant])).collect()
}

const SCORE_LABEL: &str = "score, share of Vanilla's";

/// Quality against time (A3, figure 5): the front that a method is chosen from.
pub(super) fn scatter(data: &Data<'_>) -> Option<Figure> {
    let panels = by_model(data, |model| {
        let variants = data.variants_of(model, &data.tasks_of(model));
        let score = |x, variants: &[usize]| points(data, model, variants, [x, (&RELATIVE, SCORE_LABEL)]);
        let kl =
            |x, variants: &[usize]| points(data, model, variants, [x, (&KL, "KL, nats (small is near)")]);
        let (fusing, evicting) =
            (only(data, &variants, |variant| variant.policy == "full"), only(data, &variants, evicts));
        let first = (&TTFT_SPEEDUP, "speed-up of the first token (TTFT)");
        let later = (&TPOT_SPEEDUP, "speed-up of later tokens (TPOT)");
        vec![
            score(first, &fusing),
            kl(first, &fusing),
            score(later, &evicting).or_else(|| kl(later, &evicting)),
        ]
    });
    let note = "To the right is faster; a high score and a low KL are near. A point a method or policy, a line a method at several charges; \
        bars are 95 % intervals. Speed-ups are medians over samples against Vanilla's time on the same sample.";
    figure("Quality against time (as A3, figure 5)", note, panels)
}

/// Length by depth, a map a variant.
fn needle(data: &Data<'_>, model: usize) -> Option<Figure> {
    const MOST: f64 = 10.0;
    let mut tasks = data.tasks_of(model);
    tasks.retain(|task| data.tasks[*task].benchmark == "needle" && data.tasks[*task].length.is_some());
    tasks.sort_by_key(|task| data.tasks[*task].length);
    let mut depths = distinct(tasks.iter().flat_map(|task| data.depths(*task)));
    depths.sort_by(f64::total_cmp);
    if depths.is_empty() {
        return None;
    }
    let lengths: Vec<String> =
        tasks.iter().filter_map(|task| Some(data.tasks[*task].length?.to_string())).collect();
    let map = |variant: usize| {
        let value = |task: &usize, depth: f64| {
            let stat = data.score([model, *task, variant], SCORE, |record| record.depth == Some(depth))?;
            Some(stat.value * MOST / data.tasks[*task].scale)
        };
        let row = |depth: &f64| {
            (format!("{depth:.0} %"), tasks.iter().map(|task| value(task, *depth)).collect::<Vec<_>>())
        };
        let rows: Vec<_> = depths.iter().map(row).collect();
        Some(heat(&short(data, variant), MOST, &lengths, &rows))
    };
    let maps = data.variants_of(model, &tasks).into_iter().map(map);
    let note =
        "Score from 0 (dark) to 10 (bright) by length of the context in tokens and depth of the needle.";
    let title = format!("Needle in a haystack: {}", data.models[model]);
    figure(&title, note, maps.chain([Some(legend(MOST))]).collect())
}

/// Quality by recompute ratio (A3, figure 6c): variants that differ in nothing else.
fn sweep(data: &Data<'_>) -> Option<Figure> {
    let panels = by_model(data, |model| {
        let variants = data.variants_of(model, &data.tasks_of(model));
        let panel = |measure: &Measure, what: &'static str, level| {
            let line = |name: &str| -> Option<Series> {
                let of = |variant: &usize| -> Option<(usize, f64)> {
                    let own = data.variants[*variant].name();
                    let entry = refrain::fusion::METHODS.entry(name).ok()?;
                    let options = entry.options();
                    let default = options.iter().find(|spec| spec.name == "ratio")?.default.as_f64();
                    let ratio = option(&own, "ratio").map_or(default, |ratio| ratio.parse().ok())?;
                    (without(&own, "ratio") == name).then_some((*variant, ratio))
                };
                let mut found: Vec<(usize, f64)> = variants.iter().filter_map(of).collect();
                found.sort_by(|a, b| a.1.total_cmp(&b.1));
                let last = found.len().checked_sub(1).filter(|last| *last > 0)?;
                let place = |(at, (variant, ratio)): (usize, &(usize, f64))| {
                    let label = if at == last { label(name) } else { String::new() };
                    let point = point(data, model, *variant, [measure, measure], label)?;
                    Some(Point { x: *ratio, ..point })
                };
                let points = found.iter().enumerate().filter_map(place).collect();
                Some(Series { style: style(data, found[0].0), joined: true, points })
            };
            let series: Vec<Series> = ["a3", "cache_blend"].into_iter().filter_map(line).collect();
            let x = Axis { label: "recompute ratio asked for", unit: Unit::Percent, log: false };
            let title = data.models[model].to_owned();
            if series.is_empty() {
                None
            } else {
                Plot { title, x, y: axis(measure, what), series, level }.svg()
            }
        };
        vec![panel(&RELATIVE, SCORE_LABEL, VANILLA), panel(&KL, "KL, nats (small is near)", None)]
    });
    figure("Recompute ratio (as A3, figure 6c)", "Bars are 95 % intervals.", panels)
}

/// The index of a variant's style: options do not change its colour. Vanilla's is 0.
fn style(data: &Data<'_>, variant: usize) -> usize {
    let name = |variant: &VariantName| base(&variant.name());
    let names = distinct(data.variants.iter().filter(|variant| !variant.is_vanilla()).map(name));
    names.iter().position(|other| *other == name(&data.variants[variant])).map_or(0, |at| at + 1)
}

/// Distance of attention by layer (A3, figure 3).
fn attention(data: &Data<'_>) -> Option<Figure> {
    let panels = by_model(data, |model| {
        let tasks = data.tasks_of(model);
        let line = |variant: &usize| {
            let records = tasks.iter().flat_map(|task| data.answered(model, *task, *variant));
            let layers: Vec<&Vec<f64>> =
                records.filter_map(|record| Some(&record.fidelity.as_ref()?.attention_l2)).collect();
            // A method that has maps only where its attention is full would look exact.
            if layers.iter().any(|layers| layers.is_empty()) {
                return None;
            }
            let deepest = layers.iter().map(|layers| layers.len()).max().unwrap_or(0);
            let value = |layer: usize| {
                mean(&layers.iter().filter_map(|layers| layers.get(layer).copied()).collect::<Vec<_>>())
            };
            let label = |layer| if layer + 1 == deepest { short(data, *variant) } else { String::new() };
            let point =
                |layer| Point { x: layer as f64, y: value(layer), interval: None, label: label(layer) };
            let points: Vec<Point> = (0..deepest).map(point).collect();
            (deepest > 0).then_some(Series { style: style(data, *variant), joined: true, points })
        };
        let variants = data.variants_of(model, &tasks);
        let series: Vec<Series> = variants
            .iter()
            .filter(|variant| data.variants[**variant].method != "vanilla")
            .filter_map(line)
            .collect();
        let x = Axis { label: "layer, from 0", unit: Unit::Count, log: false };
        let y = Axis { label: "L2 distance", unit: Unit::Nats, log: false };
        vec![Plot { title: data.models[model].to_owned(), x, y, series, level: None }.svg()]
    });
    let note = "Distance of the attention of the question's last rows, at most 64, to the document tokens to Vanilla's; means over \
        heads, rows and samples. Methods whose rows see other keys at every layer have none.";
    figure("Attention by layer (as A3, figure 3)", note, panels)
}

/// How many of the tokens that vanilla attends to most were recomputed (A3, figure 2).
fn hit_rates(data: &Data<'_>) -> Option<Figure> {
    let panels = by_model(data, |model| {
        let tasks = data.tasks_of(model);
        let row = |variant: usize| {
            let stats =
                [&HIT_RATE_40, &HIT_RATE].map(|measure| data.measure(model, &tasks, variant, measure));
            (short(data, variant), stats.map(|stat| stat.map(|stat| stat.value)).to_vec())
        };
        let rows = data
            .variants_of(model, &tasks)
            .into_iter()
            .filter(|variant| data.variants[*variant].method != "vanilla")
            .map(row);
        let rows: Vec<_> = rows.filter(|(_, values)| values.iter().any(Option::is_some)).collect();
        let kinds = ["of the 40 most attended", "of as many as were recomputed"];
        vec![(!rows.is_empty()).then(|| bars(data.models[model], &kinds, Unit::Percent, &rows))]
    });
    let note = "Share of the document tokens that the question's last rows, at most 64, attend to most with Vanilla which the method \
        recomputed at its deepest layer.";
    figure("Hit rate (as A3, figure 2)", note, panels)
}

/// Quality against retained keys and values (MorphKV, figure 10).
fn retained(data: &Data<'_>) -> Option<Figure> {
    let panels = by_model(data, |model| {
        let variants = data.variants_of(model, &data.tasks_of(model));
        let variants = only(data, &variants, evicts);
        let x = (&KV_SHARE, "KV kept, share of full attention's");
        vec![
            points(data, model, &variants, [x, (&RELATIVE, SCORE_LABEL)]),
            points(data, model, &variants, [x, (&KL, "KL, nats (small is near)")]),
        ]
    });
    figure(
        "Quality against retained KV (as MorphKV, figure 10)",
        "Bars are 95 % intervals; one cache a KV head.",
        panels,
    )
}
