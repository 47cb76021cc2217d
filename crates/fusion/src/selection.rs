//! A choice of document tokens, layer by layer, and the tokens that must be computed for it.

use refrain_kv::Span;

use crate::LayerTokens;

/// Document tokens that are kept at one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerSelection {
    /// Kept positions, ascending and apart.
    pub spans: Vec<Span>,
    /// Positions among them whose keys and values are computed anew, ascending.
    pub recomputed: Vec<u32>,
}

impl LayerSelection {
    /// Tokens kept.
    pub fn len(&self) -> usize {
        self.spans.iter().map(|span| span.len()).sum()
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Whether a position is kept.
    pub fn contains(&self, position: u32) -> bool {
        let after = self.spans.partition_point(|span| span.start <= position);
        after > 0 && self.spans[after - 1].contains(position)
    }
}

/// Document tokens that are kept, and the times that the choice met a case that its paper leaves open.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// One entry a layer. All of them keep equally many tokens.
    pub layers: Vec<LayerSelection>,
    /// Cases that the paper leaves open.
    pub ambiguous_cases: usize,
}

/// The computation of a [`Selection`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SelectionPlan {
    /// Document tokens computed at layer 0, ascending.
    pub tokens: Vec<u32>,
    /// Tokens of each layer.
    pub layers: Vec<LayerTokens>,
}

impl Selection {
    /// The computation that lets every layer's recomputed tokens be fresh: a token whose deepest such layer is `l` goes through
    /// all layers above `l`. At layers where such a token is not kept, its cached key and value stand in for it while document
    /// tokens attend. Active tokens shrink with depth.
    pub fn plan(&self) -> SelectionPlan {
        let mut layers = Vec::with_capacity(self.layers.len());
        let mut deeper: Vec<u32> = Vec::new();
        for kept in self.layers.iter().rev() {
            let stand_in = deeper.iter().filter(|position| !kept.contains(**position));
            let stand_in = stand_in.map(|position| Span { start: *position, end: position + 1 });
            let mut documents_see: Vec<Span> = kept.spans.iter().copied().chain(stand_in).collect();
            documents_see.sort_unstable_by_key(|span| span.start);
            layers.push(LayerTokens {
                question_sees: kept.spans.clone(),
                documents_see,
                written: kept.recomputed.clone(),
                continuing: deeper.clone(),
            });
            deeper.extend(&kept.recomputed);
            deeper.sort_unstable();
            deeper.dedup();
        }
        layers.reverse();
        SelectionPlan { tokens: deeper, layers }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(a: usize, b: usize) -> Span {
        Span::new(a, b)
    }

    fn kept(spans: &[(usize, usize)], recomputed: &[u32]) -> LayerSelection {
        let spans = spans.iter().map(|(a, b)| span(*a, *b)).collect();
        LayerSelection { spans, recomputed: recomputed.to_vec() }
    }

    #[test]
    fn a_token_goes_through_all_layers_above_its_deepest_and_stands_in_where_it_is_not_kept() {
        let layers = vec![
            kept(&[(0, 2), (4, 6)], &[0, 4]),
            kept(&[(0, 2), (8, 10)], &[0]),
            kept(&[(0, 2), (4, 6)], &[0, 5]),
            kept(&[(0, 2), (8, 10)], &[0]),
        ];
        let plan = Selection { layers: layers.clone(), ambiguous_cases: 0 }.plan();
        // 4 is computed anew at layer 0 and nowhere deeper: projected there, it goes no further. 5 is at layer 2:
        // it goes through layers 0, where it is kept as it was, and 1, where it is not kept.
        assert_eq!(plan.tokens, [0, 4, 5]);
        let layer = |of: usize, continuing: &[u32], stand_in: &[Span]| {
            let mut documents_see = layers[of].spans.clone();
            documents_see.extend(stand_in);
            documents_see.sort_unstable_by_key(|span| span.start);
            LayerTokens {
                question_sees: layers[of].spans.clone(),
                documents_see,
                written: layers[of].recomputed.clone(),
                continuing: continuing.to_vec(),
            }
        };
        assert_eq!(plan.layers[0], layer(0, &[0, 5], &[]));
        assert_eq!(plan.layers[1], layer(1, &[0, 5], &[span(5, 6)]));
        assert_eq!(plan.layers[2], layer(2, &[0], &[]));
        assert_eq!(plan.layers[3], layer(3, &[], &[]));
    }

    #[test]
    fn kept_positions_are_found_in_their_spans() {
        let kept = kept(&[(2, 4), (4, 5), (9, 12)], &[]);
        let found: Vec<u32> = (0..14).filter(|p| kept.contains(*p)).collect();
        assert_eq!((found, kept.len()), (vec![2, 3, 4, 9, 10, 11], 6));
    }
}
