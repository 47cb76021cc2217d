//! Bounds on the widths that a font states: `hayro-font` makes room for every code below the first one, and for every code of
//! a range.

use hayro_syntax::object::array::FlexArrayIter;
use hayro_syntax::object::dict::keys::{FIRST_CHAR, LAST_CHAR, W, W2};
use hayro_syntax::object::{Array, Dict};

use crate::error::ReadError;

/// Widths of a font, whose codes have 16 bits at most.
const MAX_WIDTHS: usize = 1 << 16;

/// Asserts that a font, or the descendant of one, states no more widths than fonts have codes.
pub(super) fn check(font: &Dict<'_>) -> Result<(), ReadError> {
    let codes = [FIRST_CHAR, LAST_CHAR].iter().filter_map(|key| font.get::<usize>(key));
    let horizontal =
        ranges(font, W, |items| items.next::<(u32, u32, f32)>().map(|(first, last, _)| (first, last)));
    let vertical = ranges(font, W2, |items| {
        items.next::<(u32, u32, f32, f32, f32)>().map(|(first, last, ..)| (first, last))
    });
    if codes.chain([horizontal, vertical]).any(|widths| widths > MAX_WIDTHS) {
        return Err(ReadError::TooLarge { what: "widths of a font", limit: MAX_WIDTHS.to_string() });
    }
    Ok(())
}

/// The widths of an array of lists and ranges, read as `hayro-font` reads it. Counts little beyond the limit.
fn ranges<'a>(
    font: &Dict<'a>,
    key: &[u8],
    range: impl Fn(&mut FlexArrayIter<'a>) -> Option<(u32, u32)>,
) -> usize {
    let Some(array) = font.get::<Array<'a>>(key) else { return 0 };
    let (mut items, mut widths) = (array.flex_iter(), 0_usize);
    while widths <= MAX_WIDTHS {
        let more = if let Some((_, list)) = items.next::<(u32, Array<'a>)>() {
            list.iter::<f32>().take(MAX_WIDTHS + 1).count()
        } else if let Some((first, last)) = range(&mut items) {
            (last as usize + 1).saturating_sub(first as usize)
        } else {
            break;
        };
        widths = widths.saturating_add(more);
    }
    widths
}
