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
/// A number in a large line is none that grows, unless it is all of the line: it counts the parts of a title. The first of equal lines
/// that are large or have several cells stays, since it may be a heading or the header of a table.
pub(super) fn remove(pages: &mut [Vec<Line>], is_large: impl Fn(&Line) -> bool) {
    let keys = |line: &Line, page: usize| {
        let text = line.text();
        let is_title = is_large(line) && roman(&text).is_none() && text.chars().any(char::is_alphabetic);
        let numbers = if is_title { Vec::new() } else { without_page(&text, page) };
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

/// The text once for each of its numbers, as if it were the page's: less the page, under a sign that no text has. A Roman number is
/// the first or the last word.
fn without_page(text: &str, page: usize) -> Vec<String> {
    let is_digit = |c: char| c.is_ascii_digit();
    let key = |start: usize, end: usize, number: i64| {
        format!("{}\0{}{}", &text[..start], number - page as i64, &text[end..])
    };
    let (mut keys, mut at) = (Vec::new(), 0);
    while let Some(start) = text[at..].find(is_digit).map(|start| at + start) {
        at = text[start..].find(|c| !is_digit(c)).map_or(text.len(), |end| start + end);
        let number = text[start..at].parse::<i32>().ok();
        keys.extend(number.map(|number| key(start, at, i64::from(number))));
        if keys.len() > MAX_NUMBERS {
            return Vec::new();
        }
    }
    let first = text.find(' ').unwrap_or(text.len());
    let last = text.rfind(' ').map_or(0, |space| space + 1);
    for (start, end) in [(0, first), (last, text.len())] {
        keys.extend(roman(&text[start..end]).map(|number| key(start, end, number)));
    }
    keys
}

/// The value of a number in small Roman letters, as pages before the first chapter have them.
fn roman(text: &str) -> Option<i64> {
    const PARTS: [(&str, i64); 9] =
        [("c", 100), ("xc", 90), ("l", 50), ("xl", 40), ("x", 10), ("ix", 9), ("v", 5), ("iv", 4), ("i", 1)];
    let (mut rest, mut number) = (text, 0);
    for (part, value) in PARTS {
        let most = if matches!(value, 100 | 10 | 1) { 3 } else { 1 };
        for _ in 0..most {
            let Some(behind) = rest.strip_prefix(part) else { break };
            (rest, number) = (behind, number + value);
        }
    }
    (number > 0 && rest.is_empty()).then_some(number)
}
