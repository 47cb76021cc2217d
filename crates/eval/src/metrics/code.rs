//! Likeness of a line of code (LongBench `code_sim_score`: `fuzzywuzzy.fuzz.ratio`, 0.18.0), with either of the libraries that
//! fuzzywuzzy works by: Python's difflib, which LongBench's requirements lead to, or python-Levenshtein where it is installed.

use std::collections::HashMap;
use std::ops::Range;

use super::lcs::Pattern;

/// Likeness by difflib's `SequenceMatcher`.
pub(crate) fn by_difflib(prediction: &str, answer: &str) -> f64 {
    likeness(prediction, answer, |a, b| 2.0 * matching(a, b) as f64 / (a.len() + b.len()) as f64)
}

/// Likeness by python-Levenshtein's `ratio`: one less the share of insertions and deletions.
pub(crate) fn by_levenshtein(prediction: &str, answer: &str) -> f64 {
    likeness(prediction, answer, |a, b| {
        let all = a.len() + b.len();
        1.0 - (all - 2 * Pattern::new(b).length(a)) as f64 / all as f64
    })
}

/// Likeness of the prediction's first line of code to the answer, in hundredths, halves to even.
fn likeness(prediction: &str, answer: &str, similarity: impl Fn(&[char], &[char]) -> f64) -> f64 {
    let line = code_line(prediction);
    if line == answer {
        return 1.0;
    }
    if line.is_empty() || answer.is_empty() {
        return 0.0;
    }
    let [line, answer] = [line, answer].map(|text| text.chars().collect::<Vec<_>>());
    (100.0 * similarity(&line, &answer)).round_ties_even() / 100.0
}

/// The first line that is neither a comment nor a fence; empty if there is none.
fn code_line(prediction: &str) -> &str {
    let lines = prediction.trim_start_matches('\n').split('\n');
    lines.into_iter().find(|line| !line.contains(['`', '#']) && !line.contains("//")).unwrap_or("")
}

/// Total size of the matching blocks of `SequenceMatcher(None, a, b)`.
fn matching(a: &[char], b: &[char]) -> usize {
    let anchors = anchors(b);
    let mut todo = vec![(0..a.len(), 0..b.len())];
    let mut total = 0;
    while let Some((in_a, in_b)) = todo.pop() {
        let (i, j, size) = longest_match(a, b, &anchors, in_a.clone(), in_b.clone());
        if size > 0 {
            total += size;
            todo.push((in_a.start..i, in_b.start..j));
            todo.push((i + size..in_a.end, j + size..in_b.end));
        }
    }
    total
}

/// Where each character stands in `b`, without those that are so frequent in a long `b` that difflib takes them for junk.
fn anchors(b: &[char]) -> HashMap<char, Vec<usize>> {
    let mut places: HashMap<char, Vec<usize>> = HashMap::new();
    b.iter().enumerate().for_each(|(j, c)| places.entry(*c).or_default().push(j));
    if b.len() >= 200 {
        places.retain(|_, at| at.len() <= b.len() / 100 + 1);
    }
    places
}

/// `SequenceMatcher.find_longest_match`: the earliest of the longest blocks made of anchors, lengthened by whatever is equal at
/// its ends. Without one it is lengthened from where the ranges begin.
fn longest_match(
    a: &[char],
    b: &[char],
    anchors: &HashMap<char, Vec<usize>>,
    in_a: Range<usize>,
    in_b: Range<usize>,
) -> (usize, usize, usize) {
    let (mut i, mut j, mut size) = (in_a.start, in_b.start, 0);
    // Length of the block that ends at the last character of `a` and at a place of `b`.
    let mut ending = HashMap::new();
    for (end_a, c) in in_a.clone().zip(&a[in_a.clone()]) {
        let mut now = HashMap::new();
        for &end_b in anchors.get(c).into_iter().flatten().filter(|at| in_b.contains(at)) {
            let length = end_b.checked_sub(1).and_then(|before| ending.get(&before)).unwrap_or(&0) + 1;
            now.insert(end_b, length);
            if length > size {
                (i, j, size) = (end_a + 1 - length, end_b + 1 - length, length);
            }
        }
        ending = now;
    }
    let before =
        a[in_a.start..i].iter().rev().zip(b[in_b.start..j].iter().rev()).take_while(|(a, b)| a == b).count();
    (i, j, size) = (i - before, j - before, size + before);
    let after = a[i + size..in_a.end].iter().zip(&b[j + size..in_b.end]).take_while(|(a, b)| a == b).count();
    (i, j, size + after)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_libraries_values() {
        let pairs = "ab".repeat(110);
        let (z_first, z_last) =
            ("qqq".to_string() + &"z".repeat(150) + "abc", "abc".to_string() + &"z".repeat(250));
        let (one, fifteen) = ("a", "a".to_string() + &"b".repeat(14));
        // Values of fuzzywuzzy 0.18.0 without and with python-Levenshtein.
        for (prediction, answer, difflib, levenshtein) in [
            ("", "", 1.0, 1.0),
            ("", "x", 0.0, 0.0),
            ("# a\n// b\n`c`", "x", 0.0, 0.0),
            ("\n\n# c\n  int x = 1;\ny", "int x = 1;", 0.91, 0.91),
            ("private Thread currentThread;", "private volatile Thread currentThread;", 0.87, 0.87),
            ("qabxcd", "abycdf", 0.67, 0.67),
            ("ab", "ba", 0.5, 0.5),
            ("\u{e9}=1", "e=1", 0.67, 0.67),
            // 12.5 goes to the even 12.
            (one, &fifteen, 0.12, 0.12),
            // Every character is too frequent to be an anchor; blocks grow from where the lines begin.
            (&format!("{pairs}c"), &pairs, 1.0, 1.0),
            // Here only `abc` are anchors, and the text before them has none.
            (&z_first, &z_last, 0.01, 0.73),
        ] {
            assert_eq!(by_difflib(prediction, answer), difflib, "{prediction:?} {answer:?}");
            assert_eq!(by_levenshtein(prediction, answer), levenshtein, "{prediction:?} {answer:?}");
        }
    }

    #[test]
    fn the_longest_block_first_can_cost_others() {
        // `xyz` is the longest block, and neither side of it has another; the longest subsequence is `abcd`.
        assert_eq!(
            matching(&['x', 'y', 'z', 'a', 'b', 'q', 'c', 'd'], &['a', 'b', 'c', 'd', 'x', 'y', 'z']),
            3
        );
    }
}
