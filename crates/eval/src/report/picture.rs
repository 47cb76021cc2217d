//! A figure as a file of its own.

use super::html::{STYLE, escape};
use super::svg::PANEL;
use super::table::Figure;

/// A figure as one SVG file, two panels a row.
pub(super) fn picture(figure: &Figure) -> String {
    const ACROSS: usize = 2;
    let [width, height] = PANEL;
    let panel = |(at, panel): (usize, &String)| {
        let place = [(at % ACROSS) as f64 * width, (at / ACROSS) as f64 * height];
        panel.replacen("<svg ", &format!("<svg x=\"{}\" y=\"{}\" ", place[0], place[1]), 1)
    };
    let panels: String = figure.panels.iter().enumerate().map(panel).collect();
    let size = [width * ACROSS as f64, height * figure.panels.len().div_ceil(ACROSS) as f64];
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\">\n<title>{2}</title>\n\
        <style>\n{STYLE}</style>\n{panels}</svg>\n",
        size[0],
        size[1],
        escape(&figure.title)
    )
}
