//! The annotations that are part of a page's text: the fields of a form as they are filled, and notes written on the page.
//! (ISO 32000-2, 12.5)

use hayro_font::kurbo::{self, Affine};
use hayro_syntax::object::dict::keys::{AP, AS, BBOX, F, MATRIX, N, RECT, SUBTYPE};
use hayro_syntax::object::{Dict, Name, Rect, Stream};

/// The flags of annotations that no screen shows: `Hidden` and `NoView`.
const UNSEEN: i32 = 0b10_0010;

/// The form that shows an annotation, and the map of its space to that of the page; none where it is no text of the page.
pub(super) fn appearance<'a>(annotation: &Dict<'a>) -> Option<(Stream<'a>, Affine)> {
    let subtype = annotation.get::<Name<'_>>(SUBTYPE)?;
    let flags = annotation.get::<i32>(F).unwrap_or_default();
    if !matches!(&*subtype, b"Widget" | b"FreeText") || flags & UNSEEN != 0 {
        return None;
    }
    let appearances = annotation.get::<Dict<'a>>(AP)?;
    let form = appearances.get::<Stream<'a>>(N).or_else(|| {
        let state = annotation.get::<Name<'_>>(AS)?;
        appearances.get::<Dict<'a>>(N)?.get::<Stream<'a>>(&*state)
    })?;
    let place = place(form.dict(), annotation.get::<Rect>(RECT)?)?;
    Some((form, place))
}

/// The map of a form's box to a rectangle of its page.
fn place(form: &Dict<'_>, to: Rect) -> Option<Affine> {
    let Rect { x0, y0, x1, y1 } = form.get::<Rect>(BBOX)?;
    let from = matrix(form).transform_rect_bbox(kurbo::Rect::new(x0, y0, x1, y1));
    let scale = |to: f64, from: f64| if from == 0.0 { 1.0 } else { to / from };
    let (width, height) = (scale(to.x1 - to.x0, from.width()), scale(to.y1 - to.y0, from.height()));
    let at_origin = Affine::translate((-from.x0, -from.y0));
    Some(Affine::translate((to.x0, to.y0)) * Affine::scale_non_uniform(width, height) * at_origin)
}

/// The matrix of a form's space.
pub(super) fn matrix(form: &Dict<'_>) -> Affine {
    form.get::<[f64; 6]>(MATRIX).map_or(Affine::IDENTITY, Affine::new)
}
