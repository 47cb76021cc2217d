//! Merges for a SentencePiece vocabulary, which has scores instead.

use std::cmp::Reverse;
use std::collections::HashMap;

/// Longest piece that is considered, in bytes; real ones have some 50.
pub(super) const MAX_PIECE: usize = 1024;
/// Most merges. Gemma's 262,144 pieces have some 600,000.
const MAX_MERGES: usize = 2 << 20;
/// Most bytes of the texts of merges. Gemma's have some 5 MB.
const MAX_BYTES: usize = 64 << 20;

/// The merges that give each piece of `pieces` from two others, best score first.
///
/// SentencePiece merges the neighbours whose union has the best score. Byte-pair encoding gives that merge when every way
/// to make a piece of two has the piece's rank; the order among the ways is that of Hugging Face's converter
/// (`generate_merges` in transformers): longer left half first.
///
/// # Errors
/// If there are too many: long pieces that are made of one another have a merge for each of their characters.
pub(super) fn merges(pieces: &[(&str, f32)]) -> Result<Vec<(String, String)>, String> {
    let known: HashMap<&str, usize> = pieces.iter().enumerate().map(|(i, (piece, _))| (*piece, i)).collect();
    let (mut merges, mut bytes) = (Vec::new(), 0);
    for (index, (piece, score)) in pieces.iter().enumerate() {
        if known.get(piece) != Some(&index) || piece.len() > MAX_PIECE {
            continue;
        }
        for (cut, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(cut);
            if known.contains_key(left) && known.contains_key(right) {
                merges.push((*score, cut, index, left, right));
                bytes += piece.len();
                if merges.len() > MAX_MERGES || bytes > MAX_BYTES {
                    return Err(format!(
                        "the tokens can be made of each other in more than {MAX_MERGES} ways, or of {MAX_BYTES} bytes; \
                         the vocabulary is damaged or not one of SentencePiece"
                    ));
                }
            }
        }
    }
    merges.sort_by(|a, b| {
        let rest = |m: &(f32, usize, usize, &str, &str)| {
            (Reverse(m.3.chars().count()), Reverse(m.4.chars().count()), m.2)
        };
        b.0.total_cmp(&a.0).then_with(|| rest(a).cmp(&rest(b)))
    });
    Ok(merges.into_iter().map(|(_, _, _, left, right)| (left.to_owned(), right.to_owned())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_come_in_the_order_of_scores() {
        let pieces =
            [("ab", -2.0), ("abc", -3.0), ("bc", -1.0), ("a", -9.0), ("b", -9.0), ("c", -9.0), ("é", -9.0)];
        let merges = merges(&pieces).unwrap();
        let merges: Vec<(&str, &str)> = merges.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(merges, [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]);
    }

    #[test]
    fn merges_are_bounded() {
        let runs = |letters: &str, longest: usize| -> Vec<String> {
            let of = |letter: char| (1..=longest).map(move |count| letter.to_string().repeat(count));
            letters.chars().flat_map(of).collect()
        };
        let count = |runs: Vec<String>| {
            let pieces: Vec<(&str, f32)> = runs.iter().map(|run| (run.as_str(), 0.0)).collect();
            merges(&pieces).map(|merges| merges.len())
        };
        assert_eq!(count(runs("a", 500)), Ok(500 * 499 / 2));
        assert!(count(runs("a", 1000)).unwrap_err().contains("67108864 bytes"));
        // Short pieces have few bytes and many merges.
        let alphabet: String = ('\u{4e00}'..).take(1800).collect();
        assert!(count(runs(&alphabet, 50)).is_err());
    }
}
