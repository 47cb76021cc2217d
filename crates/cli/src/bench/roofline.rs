//! The picture of `refrain bench kernels`: kernels under the roofs of the machine (Williams, Waterman and Patterson,
//! "Roofline", 2009), as SVG.

use std::fmt::Write as _;

use super::About;
use super::kernels::{Peak, Row};
use super::work::Kind;
use crate::output::{count, number};

const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 650.0;
/// Where the diagram ends to the left, right, top and bottom.
const LEFT: f64 = 66.0;
const RIGHT: f64 = 664.0;
const TOP: f64 = 66.0;
const BOTTOM: f64 = 598.0;
/// Where the key begins.
const KEY: f64 = 686.0;
/// Height and width of the figures beside points.
const FIGURE: (f64, f64) = (9.0, 6.2);
/// Half the width of a marker.
const MARKER: f64 = 4.5;

/// A logarithmic axis: decades to pixels.
struct Axis {
    low: f64,
    high: f64,
    start: f64,
    end: f64,
}

impl Axis {
    /// Around these positive values, with some room.
    fn around(values: impl Iterator<Item = f64>, [below, above]: [f64; 2], start: f64, end: f64) -> Axis {
        let logs: Vec<f64> = values.map(f64::log10).filter(|value| value.is_finite()).collect();
        let low = logs.iter().copied().fold(f64::INFINITY, f64::min) - below;
        let high = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max) + above;
        Axis { low, high, start, end }
    }

    fn at(&self, value: f64) -> f64 {
        self.start + (value.log10() - self.low) / (self.high - self.low) * (self.end - self.start)
    }

    /// 1 to 9 times the powers of ten within, and whether each is such a power.
    fn ticks(&self) -> Vec<(f64, bool)> {
        let decades = self.low.floor() as i32..=self.high.ceil() as i32;
        let ticks =
            decades.flat_map(|decade| (1..10).map(move |i| (f64::from(i) * 10f64.powi(decade), i == 1)));
        ticks.filter(|(value, _)| (self.low..=self.high).contains(&value.log10())).collect()
    }
}

/// A rectangle that is taken: left, top, right, bottom.
type Area = [f64; 4];

fn overlap(a: Area, b: Area) -> bool {
    a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]
}

/// What is drawn, and where.
struct Picture {
    x: Axis,
    y: Axis,
    taken: Vec<Area>,
    out: String,
}

/// The kernels of `rows` under the roofs of all threads.
pub(super) fn svg(about: &About, peak: &Peak, rows: &[Row]) -> String {
    let ridge = peak.bf16_flops.max(peak.f32_flops) / peak.read_bytes;
    let intensities = rows.iter().map(|row| row.intensity).chain([1.0, 2.0 * ridge]);
    let speeds = rows.iter().map(|row| row.flops / 1e9).chain([peak.bf16_flops / 1e9, peak.f32_flops / 1e9]);
    let mut picture = Picture {
        x: Axis::around(intensities, [0.2, 0.15], LEFT, RIGHT),
        y: Axis::around(speeds, [0.25, 0.25], BOTTOM, TOP),
        taken: Vec::new(),
        out: String::new(),
    };
    picture.head(about);
    picture.grid();
    picture.roofs(peak);
    let groups = Kind::ALL.map(|kind| (kind, rows.iter().filter(|row| row.kind == kind).collect::<Vec<_>>()));
    let groups: Vec<(Kind, Vec<&Row>)> = groups.into_iter().filter(|(_, rows)| !rows.is_empty()).collect();
    picture.points(&groups);
    picture.key(&groups);
    picture.out.push_str("</svg>\n");
    picture.out
}

impl Picture {
    fn put(&mut self, element: std::fmt::Arguments) {
        // Writing to a string does not fail.
        let _ = self.out.write_fmt(element);
        self.out.push('\n');
    }

    fn text(&mut self, x: f64, y: f64, attributes: &str, text: &str) {
        let text = escaped(text);
        self.put(format_args!(r#"<text x="{x:.1}" y="{y:.1}" {attributes}>{text}</text>"#));
    }

    fn line(&mut self, [x1, y1, x2, y2]: Area, attributes: &str) {
        let line =
            format_args!(r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" {attributes}/>"#);
        self.put(line);
    }

    fn head(&mut self, about: &About) {
        self.put(format_args!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="11" fill="{INK}">"#
        ));
        self.put(format_args!(r##"<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>"##));
        let (width, height) = (RIGHT - LEFT, BOTTOM - TOP);
        self.put(format_args!(
            r#"<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{width}" height="{height}"/></clipPath>"#
        ));
        let threads = count(about.threads, "thread");
        let title = format!("Kernels under the roofs of {}, {threads}, {}", about.cpu, about.isa);
        self.text(LEFT, 28.0, r#"font-size="17" font-weight="bold""#, &title);
        let runs = count(about.runs as usize, "run");
        let how = format!("{}, refrain {}, the best of {runs} or more", about.date, about.version);
        self.text(LEFT, 47.0, &format!(r#"font-size="12" fill="{GREY}""#), &how);
    }

    fn grid(&mut self) {
        let shade = |whole| if whole { "#d0d4d9" } else { "#eef0f2" };
        for (value, whole) in self.x.ticks() {
            let x = self.x.at(value);
            self.line([x, TOP, x, BOTTOM], &format!(r#"stroke="{}""#, shade(whole)));
            if whole {
                self.text(x, BOTTOM + 16.0, r#"text-anchor="middle""#, &value.to_string());
            }
        }
        for (value, whole) in self.y.ticks() {
            let y = self.y.at(value);
            self.line([LEFT, y, RIGHT, y], &format!(r#"stroke="{}""#, shade(whole)));
            if whole {
                self.text(LEFT - 7.0, y + 4.0, r#"text-anchor="end""#, &value.to_string());
            }
        }
        let (width, height) = (RIGHT - LEFT, BOTTOM - TOP);
        self.put(format_args!(
            r#"<rect x="{LEFT}" y="{TOP}" width="{width}" height="{height}" fill="none" stroke="{GREY}"/>"#
        ));
        let (x, y) = ((LEFT + RIGHT) / 2.0, (TOP + BOTTOM) / 2.0);
        let middle = r#"font-size="12" text-anchor="middle""#;
        self.text(x, BOTTOM + 37.0, middle, "operations per byte moved (FLOP/byte)");
        self.text(0.0, 0.0, &format!(r#"{middle} transform="translate(20 {y}) rotate(-90)""#), "GFLOP/s");
    }

    fn roofs(&mut self, peak: &Peak) {
        let stroke = format!(r#"stroke="{INK}" stroke-width="2" clip-path="url(#plot)""#);
        let far = 10f64.powf(self.x.high);
        let giga = |value: f64| number(value / 1e9);
        let alike = (peak.bf16_flops / peak.f32_flops - 1.0).abs() < 0.05;
        let roofs = if alike {
            vec![("f32 and bf16", peak.bf16_flops.max(peak.f32_flops))]
        } else {
            vec![("bf16", peak.bf16_flops), ("f32", peak.f32_flops)]
        };
        let highest = peak.bf16_flops.max(peak.f32_flops);
        for (name, flops) in roofs {
            let (ridge, y) = (flops / peak.read_bytes, self.y.at(flops / 1e9));
            let x = self.x.at(ridge);
            self.line([x, y, self.x.at(far), y], &stroke);
            let label = format!("{name} {} GFLOP/s", giga(flops));
            // To the left the lower roof has fewer points about it.
            let (x, anchor) = if flops < highest { (x + 16.0, "start") } else { (RIGHT - 6.0, "end") };
            self.text(
                x,
                y - 6.0,
                &format!(r#"font-size="12" font-weight="bold" text-anchor="{anchor}""#),
                &label,
            );
            let width = 6.8 * label.chars().count() as f64;
            let left = if anchor == "start" { x } else { x - width };
            self.taken.push([left, y - 17.0, left + width, y + 2.0]);
            self.taken.push([self.x.at(ridge), y - 1.5, RIGHT, y + 1.5]);
        }
        let (near, ridge) = (10f64.powf(self.x.low), highest / peak.read_bytes);
        let flops = |intensity: f64| intensity * peak.read_bytes / 1e9;
        let ends = [self.x.at(near), self.y.at(flops(near)), self.x.at(ridge), self.y.at(flops(ridge))];
        self.line(ends, &stroke);
        // Figures keep clear of the slope.
        for step in 0..200 {
            let part = f64::from(step) / 200.0;
            let (x, y) = (ends[0] + part * (ends[2] - ends[0]), ends[1] + part * (ends[3] - ends[1]));
            self.taken.push([x - 1.5, y - 1.5, x + 1.5, y + 1.5]);
        }
        // Along the slope, where it leaves the lower roof behind.
        let at = (peak.f32_flops.min(peak.bf16_flops) / peak.read_bytes * ridge).sqrt();
        let angle = (ends[3] - ends[1]).atan2(ends[2] - ends[0]).to_degrees();
        let turn = format!("translate({:.1} {:.1}) rotate({angle:.1})", self.x.at(at), self.y.at(flops(at)));
        let label = format!("memory read {} GB/s", giga(peak.read_bytes));
        let style = r#"font-size="12" font-weight="bold" text-anchor="middle""#;
        self.text(0.0, -7.0, &format!(r#"{style} transform="{turn}""#), &label);
    }

    fn points(&mut self, groups: &[(Kind, Vec<&Row>)]) {
        let rows: Vec<(Kind, &Row)> =
            groups.iter().flat_map(|(kind, rows)| rows.iter().map(|row| (*kind, *row))).collect();
        let place = |row: &Row| (self.x.at(row.intensity), self.y.at(row.flops / 1e9));
        let places: Vec<(f64, f64)> = rows.iter().map(|(_, row)| place(row)).collect();
        let around = |(x, y): &(f64, f64)| [x - MARKER, y - MARKER, x + MARKER, y + MARKER];
        self.taken.extend(places.iter().map(around));
        let mut markers = String::new();
        for (index, ((kind, row), (x, y))) in rows.iter().zip(&places).enumerate() {
            let figure = (index + 1).to_string();
            let [left, top, right, bottom] = self.free(*x, *y, FIGURE.1 * figure.len() as f64 + 4.0);
            let (middle, height) = ((left + right) / 2.0, (top + bottom) / 2.0);
            if (middle - x).hypot(height - y) > 19.0 {
                self.line(
                    [*x, *y, middle, height],
                    &format!(r#"stroke="{}" stroke-width="0.7""#, colour(*kind)),
                );
                let back = format_args!(
                    r##"<rect x="{left:.1}" y="{top:.1}" width="{:.1}" height="{:.1}" fill="#fff"/>"##,
                    right - left,
                    bottom - top
                );
                self.put(back);
            }
            self.text(middle, bottom - 0.8, r#"font-size="10" text-anchor="middle""#, &figure);
            let told =
                format!("{} {}: {} GFLOP/s, {}", kind.text(), row.name, number(row.flops / 1e9), row.share());
            let _ = writeln!(markers, "<g><title>{}</title>{}</g>", escaped(&told), marker(*kind, *x, *y));
        }
        self.out.push_str(&markers);
    }

    /// A free place for a figure near a point, or the nearest place.
    fn free(&mut self, x: f64, y: f64, width: f64) -> Area {
        let area = |distance: f64, eighth: u32| {
            let (sin, cos) = (f64::from(eighth) * std::f64::consts::FRAC_PI_4).sin_cos();
            let (x, y) = (x + (distance + width / 2.0) * cos, y - (distance + FIGURE.0 / 2.0) * sin);
            [x - width / 2.0, y - FIGURE.0 / 2.0, x + width / 2.0, y + FIGURE.0 / 2.0]
        };
        let near = [6.0, 9.0, 13.0, 18.0, 24.0, 31.0, 40.0, 52.0];
        let mut all = near.iter().flat_map(|distance| (0..8).map(|eighth| area(*distance, eighth)));
        let inside = |a: &Area| a[0] > LEFT && a[1] > TOP && a[2] < RIGHT && a[3] < BOTTOM;
        let free = all.find(|a| inside(a) && !self.taken.iter().any(|taken| overlap(*a, *taken)));
        let found = free.unwrap_or_else(|| area(near[0], 0));
        self.taken.push(found);
        found
    }

    fn key(&mut self, groups: &[(Kind, Vec<&Row>)]) {
        let lines: usize = groups.iter().map(|(_, rows)| rows.len() + 1).sum();
        let step = ((HEIGHT - TOP - 42.0) / lines.max(1) as f64).min(16.0);
        let (mut y, mut figure) = (TOP + 4.0, 0);
        for (kind, rows) in groups {
            self.out.push_str(&marker(*kind, KEY + 6.0, y));
            self.text(KEY + 20.0, y + 4.0, r#"font-weight="bold""#, kind.text());
            y += step;
            for row in rows {
                figure += 1;
                let small = r#"font-size="10.5""#;
                self.text(KEY + 15.0, y + 3.5, &format!(r#"{small} text-anchor="end""#), &figure.to_string());
                self.text(KEY + 20.0, y + 3.5, small, &row.name);
                // Figures stand below one another, marks beside them.
                let share = format!("{:.0} %", 100.0 * row.share);
                self.text(WIDTH - 24.0, y + 3.5, &format!(r#"{small} text-anchor="end""#), &share);
                if row.starred() {
                    self.text(WIDTH - 21.0, y + 3.5, small, "*");
                }
                y += step;
            }
        }
        let grey = format!(r#"font-size="10.5" fill="{GREY}""#);
        self.text(KEY, HEIGHT - 25.0, &grey, "% of the bound: the peak of its precision, or memory");
        self.text(KEY, HEIGHT - 11.0, &grey, "* may lie in the caches, so that memory is no bound");
    }
}

const INK: &str = "#1f2933";
const GREY: &str = "#616e7c";

/// Colours that colour-blind people tell apart (Okabe and Ito).
fn colour(kind: Kind) -> &'static str {
    match kind {
        Kind::ProductBf16 => "#0072b2",
        Kind::ProductQ8 => "#009e73",
        Kind::ProductF32 => "#e69f00",
        Kind::VectorProduct => "#cc79a7",
        Kind::Attention => "#d55e00",
        Kind::ElementWise => "#555555",
    }
}

fn marker(kind: Kind, x: f64, y: f64) -> String {
    let r = MARKER;
    let style = format!(r##"fill="{}" stroke="#fff" stroke-width="0.8""##, colour(kind));
    let path = |points: &[(f64, f64)]| {
        let points: Vec<String> =
            points.iter().map(|(dx, dy)| format!("{:.1},{:.1}", x + dx, y + dy)).collect();
        format!(r#"<polygon points="{}" {style}/>"#, points.join(" "))
    };
    match kind {
        Kind::ProductBf16 => format!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="{r}" {style}/>"#),
        Kind::ProductQ8 => path(&[(-r, -r), (r, -r), (r, r), (-r, r)]),
        Kind::ProductF32 => path(&[(0.0, -1.3 * r), (1.3 * r, 0.0), (0.0, 1.3 * r), (-1.3 * r, 0.0)]),
        Kind::VectorProduct => path(&[(-1.1 * r, -r), (1.1 * r, -r), (0.0, 1.2 * r)]),
        Kind::Attention => path(&[(-1.1 * r, r), (1.1 * r, r), (0.0, -1.2 * r)]),
        Kind::ElementWise => {
            path(&[(-1.2 * r, -0.6 * r), (1.2 * r, -0.6 * r), (1.2 * r, 0.6 * r), (-1.2 * r, 0.6 * r)])
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::Spread;
    use super::*;

    const PEAK: Peak = Peak { f32_flops: 4e11, bf16_flops: 6e12, read_bytes: 3e10, copy_bytes: 1.5e10 };

    fn row(kind: Kind, name: &str, intensity: f64, flops: f64) -> Row {
        Row {
            kind,
            name: name.to_owned(),
            time: Spread { median: 1.0, min: 1.0, max: 1.0 },
            operations: flops,
            bytes: flops / intensity,
            intensity,
            flops,
            bytes_per_second: flops / intensity,
            bound: "memory",
            share: 0.5,
            cached: true,
            one_thread: false,
        }
    }

    fn about() -> About {
        About {
            date: "2026-01-01".to_owned(),
            cpu: "A CPU <of> C&A".to_owned(),
            threads: 2,
            isa: "avx2".to_owned(),
            runs: 1,
            command: "refrain".to_owned(),
            version: "0",
        }
    }

    /// Asserts that elements are closed in order and that text has no markup.
    fn check(svg: &str) {
        let mut open = Vec::new();
        for tag in svg.split('<').skip(1) {
            let (tag, text) = tag.split_once('>').expect("every tag ends");
            assert!(!text.contains('>'), "{text}");
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            let name = tag.trim_matches('/').split(' ').next().unwrap();
            if tag.starts_with('/') {
                assert_eq!(open.pop(), Some(name));
            } else if !tag.ends_with('/') {
                open.push(name);
            }
        }
        assert!(open.is_empty(), "{open:?}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn the_picture_is_well_formed_and_names_every_kernel() {
        let rows: Vec<Row> = Kind::ALL
            .iter()
            .flat_map(|kind| {
                (0..7).map(move |i| row(*kind, &format!("{kind:?} {i}<&>"), 1.0 + f64::from(i), 1e10))
            })
            .collect();
        let svg = svg(&about(), &PEAK, &rows);
        check(&svg);
        for row in &rows {
            assert!(svg.contains(&escaped(&row.name)), "{}", row.name);
        }
        assert!(svg.contains("bf16 6000 GFLOP/s") && svg.contains("f32 400 GFLOP/s"));
        assert!(svg.contains("memory read 30 GB/s") && svg.contains("C&amp;A, 2 threads"));
    }

    #[test]
    fn one_kernel_or_none_and_equal_roofs_are_a_picture() {
        check(&svg(&about(), &PEAK, &[]));
        let alike = Peak { bf16_flops: 4e11, ..PEAK };
        let svg = svg(&about(), &alike, &[row(Kind::Attention, "alone", 1e-3, 1.0)]);
        check(&svg);
        assert!(svg.contains("f32 and bf16 400 GFLOP/s"));
    }

    #[test]
    fn figures_keep_clear_of_points_and_of_one_another() {
        let axis = |start, end| Axis { low: 0.0, high: 3.0, start, end };
        let (x, y) = (axis(LEFT, RIGHT), axis(BOTTOM, TOP));
        let mut picture = Picture { x, y, taken: vec![[296.0, 296.0, 304.0, 304.0]], out: String::new() };
        for _ in 0..20 {
            picture.free(300.0, 300.0, 12.0);
        }
        for (i, a) in picture.taken.iter().enumerate() {
            assert!(picture.taken[..i].iter().all(|b| !overlap(*a, *b)), "{a:?}");
        }
    }
}
