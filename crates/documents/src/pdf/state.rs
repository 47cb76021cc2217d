//! The state of text: its font, its spacing and its place.

use std::rc::Rc;

use hayro_font::Font;
use hayro_font::kurbo::{Affine, Vec2};
use hayro_syntax::content::ops::TypedInstruction;
use hayro_syntax::object::Number;

use super::characters::Characters;
use super::line::Style;

/// A font as it shows text.
#[derive(Clone, Default)]
pub(super) struct Face<'a> {
    pub(super) font: Option<Font<'a>>,
    pub(super) style: Style,
    /// The characters that the font itself does not tell.
    pub(super) characters: Option<Rc<Characters>>,
}

#[derive(Clone)]
pub(super) struct State<'a> {
    pub(super) ctm: Affine,
    pub(super) face: Face<'a>,
    pub(super) size: f64,
    pub(super) character_spacing: f64,
    pub(super) word_spacing: f64,
    /// 1 is the font's own width.
    pub(super) scaling: f64,
    pub(super) leading: f64,
    pub(super) rise: f64,
}

/// The places at which the next glyph and the next line begin.
#[derive(Clone, Copy)]
pub(super) struct Cursor {
    pub(super) text: Affine,
    pub(super) line: Affine,
    /// It was placed since the last glyph.
    pub(super) placed: bool,
}

impl Default for Cursor {
    fn default() -> Self {
        Cursor { text: Affine::IDENTITY, line: Affine::IDENTITY, placed: true }
    }
}

impl State<'_> {
    pub(super) fn new(ctm: Affine) -> Self {
        State {
            ctm,
            face: Face::default(),
            size: 1.0,
            character_spacing: 0.0,
            word_spacing: 0.0,
            scaling: 1.0,
            leading: 0.0,
            rise: 0.0,
        }
    }

    /// Follows an operation that sets a part of the state, or the place of the next glyph.
    pub(super) fn set(&mut self, operation: &TypedInstruction<'_, '_>, cursor: &mut Cursor) {
        match operation {
            TypedInstruction::Transform(m) => self.ctm *= affine([m.0, m.1, m.2, m.3, m.4, m.5]),
            TypedInstruction::CharacterSpacing(n) => self.character_spacing = n.0.as_f64(),
            TypedInstruction::WordSpacing(n) => self.word_spacing = n.0.as_f64(),
            TypedInstruction::HorizontalScaling(n) => self.scaling = n.0.as_f64() / 100.0,
            TypedInstruction::TextLeading(n) => self.leading = n.0.as_f64(),
            TypedInstruction::TextRise(n) => self.rise = n.0.as_f64(),
            TypedInstruction::NextLine(n) => cursor.next_line(n.0.as_f64(), n.1.as_f64()),
            TypedInstruction::NextLineAndSetLeading(n) => {
                self.leading = -n.1.as_f64();
                cursor.next_line(n.0.as_f64(), n.1.as_f64());
            }
            TypedInstruction::NextLineUsingLeading(_) => cursor.next_line(0.0, -self.leading),
            TypedInstruction::SetTextMatrix(m) => {
                cursor.line = affine([m.0, m.1, m.2, m.3, m.4, m.5]);
                cursor.text = cursor.line;
                cursor.placed = true;
            }
            _ => {}
        }
    }
}

impl Cursor {
    pub(super) fn next_line(&mut self, x: f64, y: f64) {
        self.line *= Affine::translate((x, y));
        self.text = self.line;
    }

    pub(super) fn advance(&mut self, by: Vec2) {
        self.text *= Affine::translate(by);
    }
}

fn affine(numbers: [Number; 6]) -> Affine {
    Affine::new(numbers.map(|number| number.as_f64()))
}
