//! Merges for a SentencePiece vocabulary, which has scores instead.

use std::cmp::Reverse;
use std::collections::HashMap;

/// Longest piece that is considered, in bytes; real ones have some 50.
pub(super) const MAX_PIECE: usize = 1024;

/// The merges that give each piece of `pieces` from two others, best score first.
///
/// SentencePiece merges the neighbours whose union has the best score. Byte-pair encoding gives that merge when every way
/// to make a piece of two has the piece's rank; the order among the ways is that of Hugging Face's converter
/// (`generate_merges` in transformers): longer left half first.
pub(super) fn merges(pieces: &[(&str, f32)]) -> Vec<(String, String)> {
    let known: HashMap<&str, usize> = pieces.iter().enumerate().map(|(i, (piece, _))| (*piece, i)).collect();
    let mut merges = Vec::new();
    for (index, (piece, score)) in pieces.iter().enumerate() {
        if known.get(piece) != Some(&index) || piece.len() > MAX_PIECE {
            continue;
        }
        for (cut, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(cut);
            if known.contains_key(left) && known.contains_key(right) {
                merges.push((*score, cut, index, left, right));
            }
        }
    }
    merges.sort_by(|a, b| {
        let rest = |m: &(f32, usize, usize, &str, &str)| {
            (Reverse(m.3.chars().count()), Reverse(m.4.chars().count()), m.2)
        };
        b.0.total_cmp(&a.0).then_with(|| rest(a).cmp(&rest(b)))
    });
    merges.into_iter().map(|(_, _, _, left, right)| (left.to_owned(), right.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_come_in_the_order_of_scores() {
        let pieces =
            [("ab", -2.0), ("abc", -3.0), ("bc", -1.0), ("a", -9.0), ("b", -9.0), ("c", -9.0), ("é", -9.0)];
        let merges = merges(&pieces);
        let merges: Vec<(&str, &str)> = merges.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(merges, [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]);
    }
}
