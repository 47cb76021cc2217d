//! Plots, bars and heat maps as inline SVG. Colours are variables of the page's style sheet; each has a shape or dashes of
//! its own beside, and words.

use std::fmt::Write as _;

use super::html::escape;
use super::table::Unit;

/// An axis. A logarithmic one has only positive values.
#[derive(Clone)]
pub(super) struct Axis {
    pub label: &'static str,
    pub unit: Unit,
    pub log: bool,
}

/// The points of a name, joined by a line or not. Its style is equal in all plots.
pub(super) struct Series {
    pub style: usize,
    pub joined: bool,
    pub points: Vec<Point>,
}

pub(super) struct Point {
    pub x: f64,
    pub y: f64,
    /// 95 % interval of y.
    pub interval: Option<(f64, f64)>,
    pub label: String,
}

pub(super) struct Plot {
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    pub series: Vec<Series>,
    /// A reference level and its label.
    pub level: Option<(f64, &'static str)>,
}

/// Width and height of a plot.
pub(super) const PANEL: [f64; 2] = [440.0, 340.0];
const WIDTH: f64 = PANEL[0];
const HEIGHT: f64 = PANEL[1];
/// Margins of a plot: left, top, right, bottom.
const ROOM: [f64; 4] = [58.0, 34.0, 20.0, 44.0];
/// Width and height of a label's character.
const LETTER: [f64; 2] = [6.3, 13.0];
/// Characters of a label, at most; the description has all.
const LONGEST: usize = 28;
/// Number of styles; the style sheet has as many colours.
const STYLES: usize = 8;
const DASHES: [&str; 4] = ["none", "7 3", "2 3", "9 3 2 3"];

/// Something drawn, so big, with a title and its content in words.
fn picture(width: f64, height: f64, title: &str, desc: &str, body: &str) -> String {
    let (title, desc) = (escape(title), escape(desc));
    format!(
        "<svg role=\"img\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" aria-label=\"{title}\">\
        <title>{title}</title><desc>{desc}</desc>\n{body}</svg>"
    )
}

fn text(out: &mut String, [x, y]: [f64; 2], class: &str, text: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{}</text>", escape(text));
}

fn line(out: &mut String, [x1, y1, x2, y2]: [f64; 4], class: &str) {
    let _ = writeln!(
        out,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" class=\"{class}\"/>"
    );
}

/// Values to pixels.
struct Scale {
    log: bool,
    ends: [f64; 2],
    pixels: [f64; 2],
    ticks: Vec<f64>,
}

impl Scale {
    fn of(axis: &Axis, values: impl Iterator<Item = f64> + Clone, pixels: [f64; 2]) -> Scale {
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.fold(f64::NEG_INFINITY, f64::max);
        let ticks = if axis.log { rungs(low, high) } else { steps(low, high) };
        let ends = [ticks.first().copied().unwrap_or(low), ticks.last().copied().unwrap_or(high)];
        Scale { log: axis.log, ends, pixels, ticks }
    }

    fn at(&self, value: f64) -> f64 {
        let place = |value: f64| if self.log { value.log10() } else { value };
        let [low, high] = self.ends.map(place);
        self.pixels[0] + (place(value) - low) / (high - low) * (self.pixels[1] - self.pixels[0])
    }
}

/// At most seven multiples of 1, 2 or 5 times a power of ten, about all values.
fn steps(low: f64, high: f64) -> Vec<f64> {
    let width = if high - low > 1e-9 * high.abs() { high - low } else { high.abs().max(1.0) / 10.0 };
    let power = 10f64.powf((width / 5.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|step| *step >= width / 5.0 * 0.999);
    let step = step.unwrap_or(10.0 * power);
    let (first, last) = ((low / step + 1e-9).floor() as i64, (high / step - 1e-9).ceil() as i64);
    (first..=last.max(first + 1)).map(|index| index as f64 * step).collect()
}

/// Powers of ten about all values, with their doubles and fives if they are few.
fn rungs(low: f64, high: f64) -> Vec<f64> {
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    if last - first > 2 {
        return (first..=last).map(|power| 10f64.powi(power)).collect();
    }
    let all = (first..=last.max(first + 1)).flat_map(|power| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(power)));
    let all: Vec<f64> = all.collect();
    let start = all.iter().rposition(|rung| *rung <= low * 1.0001).unwrap_or(0);
    let end = all.iter().position(|rung| *rung >= high * 0.9999).unwrap_or(all.len() - 1);
    all[start..=end.max(start + 1).min(all.len() - 1)].to_vec()
}

/// A tick's figure, as exact as the distance to the next.
fn tick(axis: &Axis, ticks: &[f64], value: f64) -> String {
    let (times, unit) = axis.unit.suffix();
    let step = if axis.log { value } else { ticks[1] - ticks[0] } * times;
    let even = |digits: &usize| {
        let scaled = step * 10f64.powi(*digits as i32);
        (scaled - scaled.round()).abs() < 1e-6 * scaled.abs() && scaled.abs() > 0.5
    };
    let digits = (0..7).find(even).unwrap_or(7);
    format!("{:.digits$}{unit}", value * times).replace('-', "−")
}

impl Plot {
    /// None without points.
    pub(super) fn svg(&self) -> Option<String> {
        let [left, top, right, bottom] = ROOM;
        // Names of lines stand beside their ends.
        let right = if self.series.iter().any(|series| series.joined) { 90.0 } else { right };
        let points = || self.series.iter().flat_map(|series| &series.points);
        points().next()?;
        let xs = points().map(|point| point.x);
        let ys = points()
            .flat_map(|point| {
                [point.y, point.interval.map_or(point.y, |i| i.0), point.interval.map_or(point.y, |i| i.1)]
            })
            .chain(self.level.map(|(level, _)| level));
        let x = Scale::of(&self.x, xs, [left, WIDTH - right]);
        let y = Scale::of(&self.y, ys, [HEIGHT - bottom, top]);
        let mut out = self.grid(&x, &y);
        let mut labels = Labels { taken: Vec::new() };
        if let Some((level, what)) = self.level {
            line(&mut out, [left, y.at(level), WIDTH - right, y.at(level)], "level");
            let width = LETTER[0] * what.len() as f64;
            text(&mut out, [WIDTH - right - width - 2.0, y.at(level) - 4.0], "small", what);
            labels.taken.push([WIDTH - right - width - 2.0, y.at(level) - 15.0, WIDTH, y.at(level) - 2.0]);
        }
        for point in points() {
            let [px, py] = [x.at(point.x), y.at(point.y)];
            labels.taken.push([px - 5.0, py - 5.0, px + 5.0, py + 5.0]);
        }
        for series in &self.series {
            series.draw(&mut out, &x, &y);
        }
        let labelled =
            self.series.iter().flat_map(|series| series.points.iter().map(|p| (series.colour(), p)));
        for (colour, point) in labelled.filter(|(_, point)| !point.label.is_empty()) {
            let place = [x.at(point.x), y.at(point.y)];
            let [left, top, right, bottom] = labels.place(place, &cut(&point.label, LONGEST));
            let near = place.map(|p| p.round());
            let ends = [near[0].clamp(left, right), near[1].clamp(top, bottom - 3.0)];
            if (ends[0] - place[0]).hypot(ends[1] - place[1]) > 12.0 {
                line(&mut out, [place[0], place[1], ends[0], ends[1]], "leader");
            }
            let class = format!("small f{colour}");
            text(&mut out, [left, bottom - 3.0], &class, &cut(&point.label, LONGEST));
        }
        Some(picture(WIDTH, HEIGHT, &self.title, &self.words(), &out))
    }

    fn grid(&self, x: &Scale, y: &Scale) -> String {
        let mut out = String::new();
        let ([left, right], [bottom, top]) = (x.pixels, y.pixels);
        for value in &x.ticks {
            line(&mut out, [x.at(*value), top, x.at(*value), bottom], "grid");
            text(&mut out, [x.at(*value), bottom + 15.0], "small middle", &tick(&self.x, &x.ticks, *value));
        }
        for value in &y.ticks {
            line(&mut out, [left, y.at(*value), right, y.at(*value)], "grid");
            text(&mut out, [left - 6.0, y.at(*value) + 4.0], "small end", &tick(&self.y, &y.ticks, *value));
        }
        line(&mut out, [left, top, left, bottom], "axis");
        line(&mut out, [left, bottom, right, bottom], "axis");
        text(&mut out, [2.0, 13.0], "bold", &self.title);
        text(&mut out, [2.0, 28.0], "small", &format!("↑ {}", self.y.label));
        text(&mut out, [right, bottom + 33.0], "small end", &format!("{} →", self.x.label));
        out
    }

    /// The points in words.
    fn words(&self) -> String {
        let figure = |axis: &Axis, value: f64| axis.unit.figure(value);
        let point = |point: &Point| {
            format!("{} {}, {}", point.label, figure(&self.x, point.x), figure(&self.y, point.y))
                .trim()
                .to_owned()
        };
        let points: Vec<String> =
            self.series.iter().flat_map(|series| series.points.iter().map(point)).collect();
        format!("{} by {}: {}", self.y.label, self.x.label, points.join("; "))
    }
}

impl Series {
    /// Number of the colour of its line, points and label.
    fn colour(&self) -> usize {
        // 0 is one alone.
        if self.style == 0 { 0 } else { 1 + (self.style - 1) % (STYLES - 1) }
    }

    fn draw(&self, out: &mut String, x: &Scale, y: &Scale) {
        let colour = self.colour();
        if self.joined {
            let points = self.points.iter().map(|point| format!("{:.1},{:.1}", x.at(point.x), y.at(point.y)));
            let points = points.collect::<Vec<_>>().join(" ");
            let dash = DASHES[self.style % DASHES.len()];
            let _ = writeln!(
                out,
                "<polyline points=\"{points}\" stroke-dasharray=\"{dash}\" class=\"line s{colour}\"/>"
            );
        }
        for point in &self.points {
            let [px, py] = [x.at(point.x), y.at(point.y)];
            if let Some((low, high)) = point.interval {
                line(out, [px, y.at(low), px, y.at(high)], &format!("whisker s{colour}"));
            }
            let shape = match self.style % 4 {
                0 => format!("M{:.1} {py:.1}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", px - 4.0),
                1 => format!("M{:.1} {:.1}h7v7h-7z", px - 3.5, py - 3.5),
                2 => format!("M{px:.1} {:.1}l4.6 8h-9.2z", py - 4.8),
                _ => format!("M{px:.1} {:.1}l4.8 4.8l-4.8 4.8l-4.8 -4.8z", py - 4.8),
            };
            let _ = writeln!(out, "<path d=\"{shape}\" class=\"f{colour}\"/>");
        }
    }
}

/// Where labels and points are: left, top, right, bottom.
struct Labels {
    taken: Vec<[f64; 4]>,
}

impl Labels {
    /// The nearest free place to a point, or the place right of it if none is free.
    fn place(&mut self, [x, y]: [f64; 2], label: &str) -> [f64; 4] {
        let [wide, high] = [LETTER[0] * label.chars().count() as f64, LETTER[1]];
        let area = |(dx, dy): (f64, f64)| {
            let left = if dx < 0.0 { x + dx - wide } else { x + dx };
            [left, y + dy - high / 2.0, left + wide, y + dy + high / 2.0]
        };
        let columns = [8.0, -8.0, 30.0, -30.0, 70.0, -70.0, 120.0, -120.0, 180.0, -180.0];
        let rows = (-18..=18).map(|row| f64::from(row) * 7.0);
        let mut places: Vec<(f64, f64)> = rows.flat_map(|dy| columns.map(|dx| (dx, dy))).collect();
        places.sort_by(|a, b| a.0.hypot(2.0 * a.1).total_cmp(&b.0.hypot(2.0 * b.1)));
        let inside = |a: &[f64; 4]| {
            a[0] >= ROOM[0] && a[2] <= WIDTH && a[1] >= ROOM[1] - 4.0 && a[3] <= HEIGHT - ROOM[3]
        };
        let free = |a: &[f64; 4]| {
            self.taken.iter().all(|b| a[2] <= b[0] || b[2] <= a[0] || a[3] <= b[1] || b[3] <= a[1])
        };
        let found = places.into_iter().map(area).find(|a| inside(a) && free(a));
        let found = found.unwrap_or_else(|| area((8.0, 0.0)));
        self.taken.push(found);
        found
    }
}

/// Horizontal bars with their figures; each name has a bar of each of the `kinds`.
pub(super) fn bars(title: &str, kinds: &[&str], unit: Unit, rows: &[(String, Vec<Option<f64>>)]) -> String {
    let (left, most) = (150.0, WIDTH - 150.0 - 58.0);
    let high =
        rows.iter().flat_map(|(_, values)| values).flatten().copied().fold(f64::MIN_POSITIVE, f64::max);
    let mut out = String::new();
    text(&mut out, [2.0, 13.0], "bold", title);
    let mut y = 22.0;
    let mut words = Vec::new();
    for (kind, name) in kinds.iter().enumerate() {
        let _ = writeln!(out, "<rect x=\"2\" y=\"{y:.1}\" width=\"12\" height=\"10\" class=\"b{kind}\"/>");
        text(&mut out, [20.0, y + 9.0], "small", name);
        y += 16.0;
    }
    for (name, values) in rows {
        y += 6.0;
        text(&mut out, [2.0, y + 8.0 * values.len() as f64], "small", &cut(name, 23));
        for (kind, value) in values.iter().enumerate() {
            let Some(value) = value else { continue };
            let width = value / high * most;
            let _ = writeln!(
                out,
                "<rect x=\"{left}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"13\" class=\"b{kind}\"/>"
            );
            text(&mut out, [left + width + 5.0, y + 10.5], "small", &unit.figure(*value));
            words.push(format!("{name}, {}: {}", kinds[kind], unit.figure(*value)));
            y += 15.0;
        }
    }
    picture(WIDTH, y + 6.0, title, &words.join("; "), &out)
}

fn cut(text: &str, most: usize) -> String {
    let long = text.chars().count() > most;
    if long { text.chars().take(most - 1).chain(['…']).collect() } else { text.to_owned() }
}

/// Cividis in three steps (Nuñez, Anderton and Renslow 2018): as even for colour-blind eyes as for others. `part` is 0..1.
fn colour(part: f64) -> [f64; 3] {
    let stops = [[0.0, 32.0, 77.0], [124.0, 123.0, 120.0], [255.0, 234.0, 70.0]];
    let place = part.clamp(0.0, 1.0) * 2.0;
    let index = (place as usize).min(1);
    std::array::from_fn(|c| {
        stops[index][c] + (place - index as f64) * (stops[index + 1][c] - stops[index][c])
    })
}

/// Black on bright colours and white on dark ones (relative luminance, WCAG 2.2): contrast is 4.5 or more.
fn ink(colour: [f64; 3]) -> &'static str {
    let linear = colour.map(|c| {
        let c = c / 255.0;
        if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
    });
    if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 { "#000" } else { "#fff" }
}

fn filled(out: &mut String, [x, y, width, height]: [f64; 4], part: f64) {
    let [r, g, b] = colour(part).map(|c| c.round() as u8);
    let size = format!("width=\"{width:.1}\" height=\"{height:.1}\"");
    let _ = writeln!(out, "<rect x=\"{x:.1}\" y=\"{y:.1}\" {size} fill=\"rgb({r},{g},{b})\"/>");
}

/// A grid of values from 0 to `most`, with figures in cells that are wide enough.
pub(super) fn heat(
    title: &str,
    most: f64,
    columns: &[String],
    rows: &[(String, Vec<Option<f64>>)],
) -> String {
    let wide = (300.0 / columns.len() as f64).clamp(7.0, 44.0);
    let (left, top, high) = (46.0, 36.0, 20.0);
    let width = (left + wide * columns.len() as f64 + 12.0).max(300.0);
    let mut out = String::new();
    text(&mut out, [2.0, 13.0], "bold", &cut(title, (width / 7.9) as usize));
    text(&mut out, [2.0, 29.0], "small", "depth ↓ length →");
    let mut words = Vec::new();
    for (at, (depth, values)) in rows.iter().enumerate() {
        let y = top + at as f64 * high;
        text(&mut out, [left - 5.0, y + 14.0], "small end", depth);
        for (column, value) in values.iter().enumerate() {
            let x = left + column as f64 * wide;
            let Some(value) = value else {
                text(&mut out, [x + wide / 2.0, y + 14.0], "small middle", "–");
                continue;
            };
            filled(&mut out, [x, y, wide - 1.0, high - 1.0], value / most);
            if wide >= 25.0 {
                let (fill, value) = (ink(colour(value / most)), format!("{value:.1}"));
                let place = format!("x=\"{:.1}\" y=\"{:.1}\"", x + (wide - 1.0) / 2.0, y + 13.5);
                let _ = writeln!(out, "<text {place} class=\"cell\" style=\"fill:{fill}\">{value}</text>");
            }
            words.push(format!("{} at {depth}: {value:.1}", columns[column]));
        }
    }
    let bottom = top + rows.len() as f64 * high;
    let each = (34.0 / wide).ceil() as usize;
    for (column, name) in columns.iter().enumerate().step_by(each) {
        text(&mut out, [left + (column as f64 + 0.5) * wide, bottom + 13.0], "small middle", name);
    }
    picture(width, bottom + 20.0, title, &words.join("; "), &out)
}

/// The key to the colours of heat maps.
pub(super) fn legend(most: f64) -> String {
    let mut out = String::new();
    for step in 0..=10 {
        let part = f64::from(step) / 10.0;
        filled(&mut out, [2.0 + 26.0 * f64::from(step), 2.0, 26.0, 14.0], part);
        text(&mut out, [15.0 + 26.0 * f64::from(step), 30.0], "small middle", &format!("{}", part * most));
    }
    picture(292.0, 36.0, "Colour scale", &format!("dark is 0, bright is {most}"), &out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_few_round_and_cover_the_range() {
        for (low, high) in [(0.0, 1.0), (0.93, 1.02), (-3.0, 14.0), (5.0, 5.0), (0.0, 0.0), (1e-4, 2e4)] {
            let ticks = steps(low, high);
            assert!((2..=8).contains(&ticks.len()), "{ticks:?}");
            assert!(ticks[0] <= low && ticks[ticks.len() - 1] >= high, "{low} {high} {ticks:?}");
        }
        for (low, high) in [(0.01, 0.02), (0.5, 0.5), (1e-4, 3.0), (0.03, 9.0), (1.0, 1.0)] {
            let ticks = rungs(low, high);
            assert!((2..=8).contains(&ticks.len()), "{ticks:?}");
            assert!(
                ticks[0] <= low * 1.001 && ticks[ticks.len() - 1] >= high * 0.999,
                "{low} {high} {ticks:?}"
            );
        }
    }

    #[test]
    fn figures_of_cells_can_be_read() {
        let luminance = |colour: [f64; 3]| {
            let linear = colour.map(|c| ((c / 255.0 + 0.055) / 1.055).powf(2.4));
            0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        };
        for step in 0..=100 {
            let colour = colour(f64::from(step) / 100.0);
            let bright = luminance(colour);
            let contrast =
                if ink(colour) == "#000" { (bright + 0.05) / 0.05 } else { 1.05 / (bright + 0.05) };
            assert!(contrast >= 4.4, "{step}: {contrast}");
        }
    }

    #[test]
    fn labels_do_not_lie_on_each_other() {
        let mut labels = Labels { taken: Vec::new() };
        for _ in 0..8 {
            labels.place([200.0, 150.0], "CacheBlend");
        }
        let overlap = |a: &[f64; 4], b: &[f64; 4]| a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
        let taken = &labels.taken;
        assert!((0..8).all(|i| (0..i).all(|j| !overlap(&taken[i], &taken[j]))), "{taken:?}");
    }
}
