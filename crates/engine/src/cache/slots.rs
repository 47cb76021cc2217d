//! The slots of a cache that holds a part of the prompt.

use refrain_kv::Span;

/// Positions that a cache holds, one a slot, ascending.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SlotMap {
    /// Apart, and no two of them neighbours.
    spans: Vec<Span>,
    /// Slots before each.
    before: Vec<u32>,
    len: usize,
}

impl SlotMap {
    /// Of spans that may come in any order and may overlap.
    pub(crate) fn new(spans: impl IntoIterator<Item = Span>) -> SlotMap {
        let mut all: Vec<Span> = spans.into_iter().filter(|span| !span.is_empty()).collect();
        all.sort_unstable_by_key(|span| span.start);
        let mut places = SlotMap::default();
        for span in all {
            match places.spans.last_mut() {
                Some(last) if span.start <= last.end => last.end = last.end.max(span.end),
                _ => places.spans.push(span),
            }
        }
        for span in &places.spans {
            places.before.push(places.len as u32);
            places.len += span.len();
        }
        places
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Positions held below `position`; its slot, if it is held.
    pub(crate) fn before(&self, position: u32) -> u32 {
        match self.spans.partition_point(|span| span.start < position) {
            0 => 0,
            i => self.before[i - 1] + (position.min(self.spans[i - 1].end) - self.spans[i - 1].start),
        }
    }

    /// Whether a position is held.
    pub(crate) fn holds(&self, position: u32) -> bool {
        self.before(position) < self.before(position + 1)
    }

    /// Half-open range of slots that the row at a held `position` sees.
    pub(crate) fn visible(&self, position: u32, window: Option<usize>) -> (u32, u32) {
        let window = window.map_or(u32::MAX, |window| window as u32);
        (self.before((position + 1).saturating_sub(window)), self.before(position + 1))
    }

    /// The parts of `span` that are not held.
    pub(crate) fn lacks(&self, span: Span) -> Vec<Span> {
        let (mut start, mut lacking) = (span.start, Vec::new());
        for held in &self.spans {
            if held.start > start && start < span.end {
                lacking.push(Span { start, end: held.start.min(span.end) });
            }
            start = start.max(held.end);
        }
        if start < span.end {
            lacking.push(Span { start, end: span.end });
        }
        lacking
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: usize, end: usize) -> Span {
        Span::new(start, end)
    }

    #[test]
    fn places_are_counted_in_order_without_gaps() {
        let places = SlotMap::new([span(10, 12), span(0, 3), span(3, 5), span(11, 14), span(7, 7)]);
        assert_eq!((places.spans(), places.len()), (&[span(0, 5), span(10, 14)][..], 9));
        let before: Vec<u32> = [0, 4, 5, 9, 10, 13, 14, 20].iter().map(|p| places.before(*p)).collect();
        assert_eq!(before, [0, 4, 5, 5, 5, 8, 9, 9]);
        assert_eq!(places.visible(12, None), (0, 8));
        assert_eq!(places.visible(12, Some(3)), (5, 8));
        assert_eq!(places.visible(12, Some(10)), (3, 8));
    }

    #[test]
    fn what_is_lacking_is_what_is_not_held() {
        let places = SlotMap::new([span(2, 4), span(6, 8)]);
        assert_eq!(places.lacks(span(0, 10)), [span(0, 2), span(4, 6), span(8, 10)]);
        assert_eq!(places.lacks(span(3, 7)), [span(4, 6)]);
        assert!(places.lacks(span(6, 8)).is_empty());
        assert_eq!(SlotMap::default().lacks(span(1, 3)), [span(1, 3)]);
    }
}
