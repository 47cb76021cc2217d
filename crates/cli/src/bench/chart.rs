//! Small line charts in one SVG, and their numbers as comma-separated values.

use std::fmt::Write as _;

use crate::output::one_line;

/// What a number of an axis is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Unit {
    Count,
    Bytes,
    Seconds,
    /// Of what the label says.
    PerSecond,
}

/// An axis. A linear one of y includes zero.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    pub label: &'static str,
    pub unit: Unit,
    pub log: bool,
}

/// A line. "NAME (bound)" has the colour of "NAME" and is dashed, as are "full" and "full attention".
#[derive(Clone, Debug)]
pub(super) struct Series {
    pub name: String,
    /// In the order of x. Those that are not finite, or not positive on a logarithmic axis, are not drawn.
    pub points: Vec<(f64, f64)>,
}

/// A panel.
#[derive(Clone, Debug)]
pub(super) struct Chart {
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    pub series: Vec<Series>,
}

/// The charts, two a row, under a heading and a line on what was measured on, above a legend of all.
pub(super) fn svg(heading: &str, note: &str, charts: &[Chart]) -> String {
    let names = distinct(charts.iter().flat_map(|chart| &chart.series).map(|series| series.name.as_str()));
    let stems = distinct(names.iter().map(|name| stem(name)));
    let mut picture = Picture { names, stems, out: String::new() };
    let mut y = picture.head(heading, note);
    let columns = charts.len().clamp(1, 2);
    let (width, height) = (ROOM / columns as f64, if columns == 1 { 320.0 } else { 220.0 });
    for row in charts.chunks(columns) {
        for (column, chart) in row.iter().enumerate() {
            let left = EDGE + column as f64 * width;
            picture.panel(chart, [left + LEFT, y + ABOVE, left + width - RIGHT, y + ABOVE + height]);
        }
        y += ABOVE + height + BELOW;
    }
    let (width, height) = (ROOM + 2.0 * EDGE, picture.legend(y) + EDGE);
    let body = picture.out;
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="11" fill="{INK}">
<rect width="{width}" height="{height}" fill="#fff"/>
{body}</svg>
"##
    )
}

/// A line a point: chart, series, x and y in plain numbers. Axes of another label or unit have other columns.
pub(super) fn csv(charts: &[Chart]) -> String {
    let xs = distinct(charts.iter().map(|chart| chart.x.column()));
    let ys = distinct(charts.iter().map(|chart| chart.y.column()));
    let cells = |columns: &[String], axis: Axis, value: f64| -> Vec<String> {
        let cell = |own| if own { value.to_string() } else { String::new() };
        columns.iter().map(|name| cell(*name == axis.column())).collect()
    };
    let mut lines = vec![[vec!["chart".to_owned(), "series".to_owned()], xs.clone(), ys.clone()].concat()];
    for chart in charts {
        for series in &chart.series {
            for (x, y) in series.points.iter().filter(|(x, y)| x.is_finite() && y.is_finite()) {
                let names = vec![chart.title.clone(), series.name.clone()];
                lines.push([names, cells(&xs, chart.x, *x), cells(&ys, chart.y, *y)].concat());
            }
        }
    }
    let line =
        |cells: &Vec<String>| cells.iter().map(|cell| quoted(cell)).collect::<Vec<_>>().join(",") + "\n";
    lines.iter().map(line).collect()
}

/// Width of the panels and the legend, and what is free about them.
const ROOM: f64 = 868.0;
const EDGE: f64 = 16.0;
/// What a panel has about its plot, for words and figures.
const LEFT: f64 = 78.0;
const RIGHT: f64 = 18.0;
const ABOVE: f64 = 36.0;
const BELOW: f64 = 46.0;
/// Width of a sample in the legend, height of a line, and width of a character there.
const KEY: [f64; 3] = [30.0, 19.0, 7.2];
/// Points of a line with markers, at most.
const FEW: usize = 12;
/// No number is larger and none of a logarithmic axis smaller than its inverse, so that nothing overflows.
const HUGE: f64 = 1e15;
/// How the name of a bound ends.
const BOUND: &str = " (bound)";
const INK: &str = "#1f2933";
const GREY: &str = "#616e7c";
const GRID: &str = "#e4e7eb";
/// Colours that colour-blind people tell apart (Okabe and Ito).
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555"];

impl Unit {
    /// Its multiples, as figures have them, and what it is called in a heading.
    fn names(self) -> (&'static [(f64, &'static str)], &'static str) {
        const GIB: f64 = 1073741824.0;
        match self {
            Unit::Count => (&[(1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G")], ""),
            Unit::Bytes => (&[(1.0, " B"), (1024.0, " KiB"), (1048576.0, " MiB"), (GIB, " GiB")], " (bytes)"),
            Unit::Seconds => (&[(1e-9, " ns"), (1e-6, " µs"), (1e-3, " ms"), (1.0, " s")], " (s)"),
            Unit::PerSecond => (&[(1.0, "/s"), (1e3, "k/s"), (1e6, "M/s"), (1e9, "G/s")], " (per second)"),
        }
    }

    /// The round numbers, in order: powers of two for bytes, else those of ten, their doubles and fives.
    fn round(self, index: i32) -> f64 {
        match self {
            Unit::Bytes => f64::from(index).exp2(),
            _ => [1.0, 2.0, 5.0][index.rem_euclid(3) as usize] * 10f64.powi(index.div_euclid(3)),
        }
    }

    /// A figure as exact as its step. Those of one step have one unit, those without their own.
    fn figure(self, value: f64, step: Option<f64>) -> String {
        let (exact, least) = step.map_or((value, value), |step| (step, 4.0 * step));
        if value.abs() < exact / 2.0 {
            return "0".to_owned();
        }
        let multiples = self.names().0;
        let fits = multiples.iter().rfind(|(size, _)| *size <= least * (1.0 + 1e-9));
        let (size, name) = fits.unwrap_or(&multiples[0]);
        let left = |digits: i32| (exact / size * 10f64.powi(digits)).fract();
        match (0..=6).find(|digits| (left(*digits as i32) - 0.5).abs() > 0.5 - 1e-6) {
            Some(digits) if exact / size > 1e-6 => format!("{:.digits$}{name}", value / size),
            _ => format!("{:.0e}{name}", value / size),
        }
    }
}

/// An axis laid out: values to pixels.
struct Scale {
    axis: Axis,
    low: f64,
    high: f64,
    start: f64,
    end: f64,
    ticks: Vec<f64>,
    step: Option<f64>,
}

impl Scale {
    fn at(&self, value: f64) -> f64 {
        let place = |value: f64| if self.axis.log { value.log10() } else { value };
        let part = (place(value) - place(self.low)) / (place(self.high) - place(self.low));
        self.start + part * (self.end - self.start)
    }
}

impl Axis {
    fn column(&self) -> String {
        format!("{}{}", self.label, self.unit.names().1)
    }

    /// Whether a value can be drawn.
    fn has(&self, value: f64) -> bool {
        value.abs() <= HUGE && (!self.log || value >= 1.0 / HUGE)
    }

    /// About all values, with ticks about `each` pixels apart or more.
    fn scale(self, values: &[f64], is_x: bool, [start, end]: [f64; 2], each: f64) -> Scale {
        let low = values.iter().copied().reduce(f64::min).unwrap_or(1.0);
        let high = values.iter().copied().reduce(f64::max).unwrap_or(1.0);
        let far = is_x && (low < 0.0 || low > high / 2.0);
        let (low, high) = if self.log || far { (low, high) } else { (low.min(0.0), high.max(0.0)) };
        let most = ((end - start).abs() / each) as usize;
        let (ticks, step) = if self.log { self.rungs(low, high, most) } else { self.steps(low, high, most) };
        let scale = Scale { axis: self, low, high, start, end, ticks, step };
        // x ends with the data if ticks enough remain.
        let inside = |value: &f64| (start - 0.1..=end + 0.1).contains(&scale.at(*value));
        let inner: Vec<f64> = scale.ticks.iter().copied().filter(inside).collect();
        if is_x && inner.len() > 2 {
            return Scale { ticks: inner, ..scale };
        }
        Scale { low: scale.ticks[0], high: scale.ticks[scale.ticks.len() - 1], ..scale }
    }

    /// Two multiples of a round step or more, from `low` or below to `high` or above.
    fn steps(self, low: f64, high: f64, most: usize) -> (Vec<f64>, Option<f64>) {
        let size = low.abs().max(high.abs());
        let far = if size == 0.0 { 1.0 } else { size };
        let high = if high - low > 1e-9 * size { high } else { low + far };
        let least = (high - low) / most as f64 * (1.0 - 1e-9);
        let step = (-80..80).map(|index| self.unit.round(index)).find(|step| *step >= least).unwrap_or(HUGE);
        let step = if self.unit == Unit::Bytes { step.max(1.0) } else { step };
        let (first, last) = ((low / step + 1e-9).floor() as i64, (high / step - 1e-9).ceil() as i64);
        ((first..=last.max(first + 1)).map(|index| index as f64 * step).collect(), Some(step))
    }

    /// Two round numbers or more, from `low` or below to `high` or above: all, or powers only.
    fn rungs(self, low: f64, high: f64, most: usize) -> (Vec<f64>, Option<f64>) {
        let about = |stride: i32| {
            let all: Vec<f64> = (-72 / stride..=72 / stride).map(|i| self.unit.round(i * stride)).collect();
            let first = all.partition_point(|rung| *rung <= low * (1.0 + 1e-9)) - 1;
            let last = all.partition_point(|rung| *rung < high * (1.0 - 1e-9));
            let lone = usize::from(first == last);
            all[first - lone..=last + lone].to_vec()
        };
        let strides = if self.unit == Unit::Bytes { [1, 2, 5, 10] } else { [1, 3, 6, 12] };
        let found = strides.into_iter().map(about).find(|rungs| rungs.len() <= most + 1);
        (found.unwrap_or_else(|| about(18)), None)
    }
}

/// What is drawn, and the names of all series, as they are and without " (bound)".
struct Picture<'a> {
    names: Vec<&'a str>,
    stems: Vec<&'a str>,
    out: String,
}

impl Picture<'_> {
    fn text(&mut self, x: f64, y: f64, attributes: &str, text: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.out, r#"<text x="{x:.1}" y="{y:.1}" {attributes}>{}</text>"#, escaped(text));
    }

    fn line(&mut self, [x1, y1, x2, y2]: [f64; 4], colour: &str) {
        let ends = format!(r#"x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}""#);
        let _ = writeln!(self.out, r#"<line {ends} stroke="{colour}"/>"#);
    }

    /// The colour and the dashes of a series, the same in all panels.
    fn look(&self, name: &str) -> (&'static str, &'static str) {
        let index = self.stems.iter().position(|other| *other == stem(name)).unwrap_or(0);
        let dash = match name {
            _ if name.ends_with(BOUND) => "4 3",
            "full" | "full attention" => "9 4",
            // Colours begin anew.
            _ if index >= COLOURS.len() => "1 3",
            _ => "none",
        };
        (COLOURS[index % COLOURS.len()], dash)
    }

    /// A line through pixels, with markers if told.
    fn series(&mut self, name: &str, points: &[(f64, f64)], marked: bool) {
        let (colour, dash) = self.look(name);
        let line =
            thinned(points).iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" ");
        let style = format!(r#"fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}""#);
        let title = escaped(name);
        let _ = write!(self.out, r#"<g><title>{title}</title><polyline points="{line}" {style}/>"#);
        // Hollow ones show what a bound covers.
        let (fill, edge) = if name.ends_with(BOUND) { ("#fff", colour) } else { (colour, "#fff") };
        for (x, y) in points.iter().filter(|_| marked) {
            let place = format!(r#"cx="{x:.1}" cy="{y:.1}" r="3.8""#);
            let _ = write!(self.out, r#"<circle {place} fill="{fill}" stroke="{edge}"/>"#);
        }
        self.out += "</g>\n";
    }

    /// The heading and the note. Returns where they end.
    fn head(&mut self, heading: &str, note: &str) -> f64 {
        let mut y = 10.0;
        for line in wrapped(heading, 82) {
            y += 21.0;
            self.text(EDGE, y, r#"font-size="17" font-weight="bold""#, &line);
        }
        for line in wrapped(note, 124) {
            y += 17.0;
            self.text(EDGE, y, &format!(r#"font-size="12" fill="{GREY}""#), &line);
        }
        y
    }

    fn panel(&mut self, chart: &Chart, [left, top, right, bottom]: [f64; 4]) {
        let has = |(x, y): &(f64, f64)| chart.x.has(*x) && chart.y.has(*y);
        let points = |series: &Series| series.points.iter().copied().filter(has).collect::<Vec<_>>();
        let mut lines: Vec<_> = chart.series.iter().map(|s| (s.name.as_str(), points(s))).collect();
        // Dashed ones come last: they let others through.
        lines.sort_by_key(|(name, _)| self.look(name).1 != "none");
        let (xs, ys): (Vec<f64>, Vec<f64>) = lines.iter().flat_map(|(_, points)| points).copied().unzip();
        let x = chart.x.scale(&xs, true, [left, right], 56.0);
        let y = chart.y.scale(&ys, false, [bottom, top], 36.0);
        self.grid(chart, &x, &y);
        if xs.is_empty() {
            self.text((left + right) / 2.0, (top + bottom) / 2.0, r#"text-anchor="middle""#, "no data");
        }
        for (name, points) in lines.iter().filter(|(_, points)| !points.is_empty()) {
            let points: Vec<(f64, f64)> = points.iter().map(|(a, b)| (x.at(*a), y.at(*b))).collect();
            self.series(name, &points, points.len() <= FEW);
        }
    }

    fn grid(&mut self, chart: &Chart, x: &Scale, y: &Scale) {
        let [left, top, right, bottom] = [x.start, y.end, x.end, y.start];
        let title = cut(&chart.title, ((right - left + RIGHT) / 8.2) as usize);
        self.text(left, top - 13.0, r#"font-size="13" font-weight="bold""#, &title);
        for value in &x.ticks {
            let at = x.at(*value);
            self.line([at, top, at, bottom], GRID);
            self.text(at, bottom + 16.0, r#"text-anchor="middle""#, &chart.x.unit.figure(*value, x.step));
        }
        for value in &y.ticks {
            let at = y.at(*value);
            self.line([left, at, right, at], GRID);
            self.text(left - 7.0, at + 4.0, r#"text-anchor="end""#, &chart.y.unit.figure(*value, y.step));
        }
        self.line([left, top, left, bottom], GREY);
        self.line([left, bottom, right, bottom], GREY);
        let style = format!(r#"font-size="12" fill="{GREY}" text-anchor="middle""#);
        self.text((left + right) / 2.0, bottom + 34.0, &style, chart.x.label);
        let turn = format!("translate({:.1} {:.1}) rotate(-90)", left - LEFT + 12.0, (top + bottom) / 2.0);
        self.text(0.0, 0.0, &format!(r#"{style} transform="{turn}""#), chart.y.label);
    }

    /// All names, in columns of one width. Returns where they end.
    fn legend(&mut self, top: f64) -> f64 {
        let [sample, height, each] = KEY;
        let names = self.names.clone();
        let longest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let width = (sample + 36.0 + each * longest as f64).min(ROOM);
        let columns = (ROOM / width) as usize;
        for (index, name) in names.iter().enumerate() {
            let x = EDGE + (index % columns) as f64 * width;
            let y = top + 12.0 + (index / columns) as f64 * height;
            self.series(name, &[(x, y), (x + sample, y)], false);
            let name = cut(name, ((width - sample - 28.0) / each) as usize);
            self.text(x + sample + 8.0, y + 4.0, r#"font-size="12""#, &name);
        }
        top + names.len().div_ceil(columns) as f64 * height
    }
}

/// The name of what a bound is of.
fn stem(name: &str) -> &str {
    name.strip_suffix(BOUND).unwrap_or(name)
}

/// What can be seen of many points: of a column of pixels the first, the lowest, the highest and the last.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let ends = |column: &[(f64, f64)]| {
        let mut all = column.to_vec();
        all.sort_by(|a, b| a.1.total_cmp(&b.1));
        let mut kept = [column[0], all[0], all[all.len() - 1], column[column.len() - 1]];
        kept.sort_by(|a, b| a.0.total_cmp(&b.0));
        kept
    };
    let mut kept: Vec<_> = points.chunk_by(|a, b| a.0.floor() == b.0.floor()).flat_map(ends).collect();
    kept.dedup();
    kept
}

/// Each value once, where it came first.
fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    values.fold(Vec::new(), |mut kept, value| {
        if !kept.contains(&value) {
            kept.push(value);
        }
        kept
    })
}

/// At most so many characters.
fn cut(text: &str, most: usize) -> String {
    let long = text.chars().count() > most;
    if long { text.chars().take(most - 1).chain(['…']).collect() } else { text.to_owned() }
}

/// Lines of at most so many characters.
fn wrapped(text: &str, most: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace().map(|word| cut(word, most)) {
        match lines.last_mut() {
            Some(line) if line.chars().count() + word.chars().count() < most => *line += &format!(" {word}"),
            _ => lines.push(word),
        }
    }
    lines
}

/// As text of XML.
fn escaped(text: &str) -> String {
    one_line(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// As a cell (RFC 4180).
fn quoted(text: &str) -> String {
    let plain = !text.contains([',', '"', '\r', '\n']);
    if plain { text.to_owned() } else { format!("\"{}\"", text.replace('"', "\"\"")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNITS: [Unit; 4] = [Unit::Count, Unit::Bytes, Unit::Seconds, Unit::PerSecond];

    fn chart(name: &str, unit: Unit, log: bool, points: &[(f64, f64)]) -> Chart {
        let axis = Axis { label: "length", unit, log };
        let series = vec![Series { name: name.to_owned(), points: points.to_vec() }];
        Chart { title: "a <b> & c".to_owned(), x: axis, y: Axis { label: "memory", ..axis }, series }
    }

    #[test]
    fn ticks_are_round_and_cover_the_range() {
        for (low, high) in [(0.0, 12000.0), (3.0, 3.0), (0.0, 0.0), (1e-9, 0.3), (-2.0, 7.0), (0.9e15, 1e15)]
        {
            for (unit, log) in UNITS.map(|unit| [(unit, false), (unit, low > 0.0)]).concat() {
                let axis = Axis { label: "", unit, log };
                let (ticks, step) = if log { axis.rungs(low, high, 6) } else { axis.steps(low, high, 6) };
                assert!((2..=8).contains(&ticks.len()), "{ticks:?}");
                assert!(ticks[0] <= low && *ticks.last().unwrap() >= high, "{low} {high} {ticks:?}");
                let round = |value: f64| (-80..80).any(|i| (unit.round(i) / value - 1.0).abs() < 1e-9);
                assert!(step.map_or(ticks.iter().all(|tick| round(*tick)), round), "{step:?} {ticks:?}");
            }
        }
    }

    #[test]
    fn figures_read_well() {
        for (unit, value, step, text) in [
            (Unit::Count, 12e3, Some(2e3), "12k"),
            (Unit::Count, 1000.0, Some(200.0), "1000"),
            (Unit::Seconds, 0.004, Some(5e-4), "4.0 ms"),
            (Unit::Bytes, 1342177280.0, Some(268435456.0), "1.25 GiB"),
            (Unit::Bytes, 12582912.0, None, "12 MiB"),
            (Unit::PerSecond, 2e3, None, "2k/s"),
            (Unit::Count, 1e-9, None, "1e-9"),
        ] {
            assert_eq!(unit.figure(value, step), text);
        }
    }

    #[test]
    fn values_are_quoted_under_their_units() {
        let mut charts = [
            chart("a, \"b\"", Unit::Bytes, false, &[(1.0, 0.5), (2.0, f64::NAN)]),
            chart("c", Unit::Bytes, true, &[(1e-7, 1e9)]),
        ];
        charts[1].y.unit = Unit::Seconds;
        let lines = "chart,series,length (bytes),memory (bytes),memory (s)\n\
            a <b> & c,\"a, \"\"b\"\"\",1,0.5,\na <b> & c,c,0.0000001,,1000000000\n";
        assert_eq!(csv(&charts), lines);
    }

    /// Asserts that elements are closed in order and that all numbers are finite.
    fn check(svg: &str) {
        let mut open = Vec::new();
        for tag in svg.split('<').skip(1) {
            let (tag, text) = tag.split_once('>').expect("every tag ends");
            assert!(!text.contains('>') && tag.matches('"').count() % 2 == 0, "{tag} {text}");
            let name = tag.trim_matches('/').split(' ').next();
            match (tag.starts_with('/'), tag.ends_with('/')) {
                (true, _) => assert_eq!(open.pop(), Some(name)),
                (false, closed) => open.extend((!closed).then_some(name)),
            }
        }
        assert!(open.is_empty() && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn degenerate_charts_are_well_formed() {
        check(&svg("", "", &[]));
        let odd =
            [0.0, -0.0, -1.0, 5.0, 5.0 + 1e-12, 1e-300, 5e-324, 1e15, f64::MAX, f64::NAN, f64::INFINITY];
        for (unit, log) in UNITS.map(|unit| [(unit, false), (unit, true)]).concat() {
            let mut charts = vec![
                chart("none", unit, log, &[]),
                chart(&"<&>\"\u{1b}".repeat(99), unit, log, &odd.map(|v| (v, v))),
            ];
            charts.extend(
                odd.iter().flat_map(|a| odd.map(|b| chart("pair", unit, log, &[(*a, 1.0), (b, *a)]))),
            );
            check(&svg(&"word ".repeat(50), &"w".repeat(200), &charts));
        }
    }

    #[test]
    fn a_name_has_one_colour() {
        let line = |name| chart(name, Unit::Count, false, &[(1.0, 1.0), (2.0, 2.0)]);
        let svg = svg("", "", &[line("a"), line("b"), line("b (bound)"), line("full"), line("a")]);
        for (name, colour, dash, times) in
            [("a", 0, "none", 3), ("b", 1, "none", 2), ("b (bound)", 1, "4 3", 2), ("full", 2, "9 4", 2)]
        {
            let groups: Vec<&str> = svg.split(&format!("<title>{name}</title>")).skip(1).collect();
            assert_eq!(groups.len(), times);
            let style = format!(r#"stroke="{}" stroke-width="2" stroke-dasharray="{dash}""#, COLOURS[colour]);
            assert!(groups.iter().all(|group| group.split("/>").next().unwrap().contains(&style)), "{name}");
        }
    }

    #[test]
    fn many_points_keep_their_outline() {
        let points: Vec<(f64, f64)> =
            (0..1000).map(|i| (f64::from(i) / 100.0, f64::from(i * 7 % 100))).collect();
        let kept = thinned(&points);
        assert!(kept.len() <= 40 && kept.is_sorted_by(|a, b| a.0 <= b.0));
        assert!(kept.iter().filter(|(_, y)| *y == 99.0).count() == 10 && kept[0] == points[0]);
        assert_eq!(thinned(&points[..1]), points[..1]);
    }
}
