//! Measured curves as comma-separated values, which `tools/plot.py` draws.

use refrain_eval::csv_line;

/// A chart: curves over the same axes. An axis is named with its unit, such as `time (s)` or `held (bytes)`.
#[derive(Clone, Debug)]
pub(super) struct Chart {
    pub(super) title: &'static str,
    pub(super) x: &'static str,
    pub(super) y: &'static str,
    pub(super) curves: Vec<Curve>,
}

/// A named curve; points are in the order of x.
#[derive(Clone, Debug)]
pub(super) struct Curve {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

/// A line a point: `chart,series`, then a column for each x axis and one for each y axis, of which a line fills two.
pub(super) fn csv(charts: &[Chart]) -> String {
    let mut axes: Vec<&str> = Vec::new();
    for axis in charts.iter().map(|chart| chart.x).chain(charts.iter().map(|chart| chart.y)) {
        if !axes.contains(&axis) {
            axes.push(axis);
        }
    }
    let mut text = csv_line(["chart", "series"].iter().chain(&axes));
    for chart in charts {
        for curve in &chart.curves {
            for (x, y) in curve.points.iter().filter(|(x, y)| x.is_finite() && y.is_finite()) {
                let value = |axis: &&str| match *axis {
                    axis if axis == chart.x => x.to_string(),
                    axis if axis == chart.y => y.to_string(),
                    _ => String::new(),
                };
                let names = [chart.title.to_owned(), curve.name.clone()];
                text += &csv_line(names.into_iter().chain(axes.iter().map(value)));
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_fills_the_columns_of_its_own_axes() {
        let chart = |title, y, points: &[(f64, f64)]| Chart {
            title,
            x: "answer (tokens)",
            y,
            curves: vec![Curve { name: "a, \"b\"".to_owned(), points: points.to_vec() }],
        };
        let charts = [
            chart("Time", "time (s)", &[(1.0, 0.5), (2.0, f64::NAN)]),
            chart("Rate", "tokens (per second)", &[(10.0, 1e-9)]),
        ];
        assert_eq!(
            csv(&charts),
            "chart,series,answer (tokens),time (s),tokens (per second)\n\
             Time,\"a, \"\"b\"\"\",1,0.5,\nRate,\"a, \"\"b\"\"\",10,,0.000000001\n"
        );
    }
}
