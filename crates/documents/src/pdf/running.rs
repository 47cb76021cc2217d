//! Lines that stand at the top or the foot of several pages: headers, footers, page numbers.

use std::collections::{HashMap, HashSet};

use super::line::Line;

/// Lines at the top and at the foot of a page that may be running ones.
const EDGE: usize = 2;

/// Numbers of a line, one of which may be the page's. A line with more of them holds data.
const MAX_NUMBERS: usize = 8;

/// Takes away the lines that stand at the top or the foot of several pages. Their texts differ in one number at most, which grows
/// with the page.
///
/// A number in a large line is none that grows: it counts the parts of a title. The first of equal lines that are large or have several
/// cells stays, since it may be a heading or the header of a table.
pub(super) fn remove(pages: &mut [Vec<Line>], is_large: impl Fn(&Line) -> bool) {
    let keys = |line: &Line, page: usize| {
        let text = line.text();
        let numbered = !(is_large(line) && text.chars().any(char::is_alphabetic));
        let numbers = if numbered { without_page(&text, page) } else { Vec::new() };
        [vec![text], numbers].concat()
    };
    let mut counts: HashMap<String, usize> = HashMap::new();
    for (number, page) in pages.iter().enumerate() {
        let keys: HashSet<String> =
            edges(page).into_iter().flat_map(|index| keys(&page[index], number)).collect();
        keys.into_iter().for_each(|key| *counts.entry(key).or_default() += 1);
    }
    // Two pages say little, unless all there are agree.
    let often = pages.len().clamp(2, 3);
    let is_often = |key: &String| counts.get(key).is_some_and(|&count| count >= often);
    let mut seen: HashSet<String> = HashSet::new();
    for (number, page) in pages.iter_mut().enumerate() {
        let edges = edges(page);
        let mut index = 0;
        page.retain(|line| {
            index += 1;
            if !edges.contains(&(index - 1)) {
                return true;
            }
            let mut keys = keys(line, number);
            let telling = line.cells.len() >= 2 || is_large(line);
            let is_running = keys.iter().any(is_often);
            !is_running || (telling && is_often(&keys[0]) && seen.insert(keys.swap_remove(0)))
        });
    }
}

/// The places of the lines at the top and the foot of a page.
fn edges(page: &[Line]) -> HashSet<usize> {
    let mut order: Vec<usize> = (0..page.len()).collect();
    order.sort_by(|&a, &b| page[a].y.total_cmp(&page[b].y));
    let foot = order.len().saturating_sub(EDGE);
    order.iter().take(EDGE).chain(&order[foot..]).copied().collect()
}

/// The text once for each of its numbers, as if it were the page's: less the page, under a sign that no text has.
fn without_page(text: &str, page: usize) -> Vec<String> {
    let is_digit = |c: char| c.is_ascii_digit();
    let (mut keys, mut at) = (Vec::new(), 0);
    while let Some(start) = text[at..].find(is_digit).map(|start| at + start) {
        at = text[start..].find(|c| !is_digit(c)).map_or(text.len(), |end| start + end);
        let number = text[start..at].parse::<i32>().ok();
        keys.extend(
            number.map(|number| {
                format!("{}\0{}{}", &text[..start], i64::from(number) - page as i64, &text[at..])
            }),
        );
        if keys.len() > MAX_NUMBERS {
            return Vec::new();
        }
    }
    keys
}
