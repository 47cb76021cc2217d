//! The text that the operations of a page show, with its place. (ISO 32000-2, 9.4)

use std::collections::HashMap;
use std::f64::consts::FRAC_PI_2;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hayro_cmap::BfString;
use hayro_font::kurbo::{Affine, Point, Vec2};
use hayro_font::{Font, FontCache, FontGlyph, FontQuery, FontResolverFn, GlyphId, UNITS_PER_EM};
use hayro_syntax::content::TypedIter;
use hayro_syntax::content::ops::TypedInstruction;
use hayro_syntax::object::dict::keys::{
    ANNOTS, BASE_FONT, CONTENTS, DESCENDANT_FONTS, FONT_DESC, FONT_FILE, FONT_FILE2, FONT_FILE3, RESOURCES,
    SUBTYPE, TO_UNICODE,
};
use hayro_syntax::object::{Array, Dict, Name, ObjRef, Object, Stream};
use hayro_syntax::page::{Page, Resources};

use super::arrays::items;
use super::bitmaps::Bitmaps;
use super::characters::{Characters, Maps};
use super::line::{Span, Style};
use super::state::{Cursor, Face, State};
use super::strings::{push, string};
use super::{annotations, bidi, guard, widths};
use crate::error::ReadError;
use crate::limits::{
    MAX_FORM_DEPTH, MAX_PAGE_SPANS, MAX_PDF_BYTES, MAX_PDF_OPERATIONS, MAX_SPANS, MAX_TEXT_BYTES,
};

/// Graphics states saved inside each other.
const MAX_SAVED: usize = 4096;

/// Characters of one array of texts and operators of one text are bounded by the operations' limit: this many are one.
const BYTES_PER_OPERATION: usize = 16;

/// Runs the operations of one document's pages.
pub(super) struct Interpreter<'a, 's> {
    fonts: FontCache<'a>,
    font_resolver: FontResolverFn,
    maps: Maps,
    /// The fonts that are objects of their own: to check and to find one anew for each text would take most of the time.
    known: HashMap<ObjRef, Face<'a>>,
    operations: usize,
    /// The bytes of all streams that were decoded, those of one stream at each use.
    decoded: usize,
    text_bytes: usize,
    /// Glyphs whose characters are known, and those whose are not.
    glyphs: [usize; 2],
    /// Texts of all pages so far that stand apart.
    all_spans: usize,
    stop: &'s AtomicBool,
    spans: Vec<Span>,
    /// Marked content that is open.
    marks: usize,
    /// The first open mark whose content is no part of the text: a running header, for one.
    artifact: Option<usize>,
    /// The first open mark that says which text its glyphs stand for, and that text until a glyph was drawn.
    actual: Option<(usize, String)>,
}

impl<'a, 's> Interpreter<'a, 's> {
    pub(super) fn new(stop: &'s AtomicBool) -> Self {
        Interpreter {
            fonts: FontCache::new(),
            font_resolver: Arc::new(|query| {
                Some(match query {
                    FontQuery::Standard(font) => font.get_font_data(),
                    FontQuery::Fallback(query) => query.pick_standard_font().get_font_data(),
                })
            }),
            maps: Maps::new(),
            known: HashMap::new(),
            operations: 0,
            decoded: 0,
            text_bytes: 0,
            glyphs: [0; 2],
            all_spans: 0,
            stop,
            spans: Vec::new(),
            marks: 0,
            artifact: None,
            actual: None,
        }
    }

    /// The text of a page, in the order in which it is drawn; upright for a page that is shown turned.
    pub(super) fn page(&mut self, page: &Page<'a>) -> Result<Vec<Span>, ReadError> {
        self.count(1)?;
        self.check_contents(page)?;
        self.close_marks();
        let state = State::new(Affine::new(page.initial_transform(true).as_coeffs()));
        if let Some(content) = page.page_stream() {
            self.run(content, page.resources(), state.clone(), 0)?;
        }
        for annotation in items(page, ANNOTS) {
            self.count(1)?;
            if let Some((form, place)) = annotation.into_dict().as_ref().and_then(annotations::appearance) {
                self.close_marks();
                let state = State { ctm: state.ctm * place, ..state.clone() };
                self.draw(&form, page.resources(), &state, 0)?;
            }
        }
        Ok(std::mem::take(&mut self.spans))
    }

    /// Whether the fonts tell no characters of most glyphs that the pages so far show.
    pub(super) fn is_unknown(&self) -> bool {
        self.glyphs[1] > self.glyphs[0]
    }

    fn check_contents(&mut self, page: &Page<'a>) -> Result<(), ReadError> {
        if let Some(stream) = page.raw().get::<Stream<'_>>(CONTENTS) {
            return self.check(&stream);
        }
        items(page, CONTENTS).filter_map(Object::into_stream).try_for_each(|part| self.check(&part))
    }

    /// Adds a stream that is about to be decoded to those that were.
    fn check(&mut self, stream: &Stream<'_>) -> Result<(), ReadError> {
        self.count(1)?;
        self.decoded += guard::check(stream)?;
        if self.decoded > MAX_PDF_BYTES {
            return Err(ReadError::too_large("streams", MAX_PDF_BYTES));
        }
        Ok(())
    }

    fn count(&mut self, operations: usize) -> Result<(), ReadError> {
        self.operations += operations;
        if self.operations > MAX_PDF_OPERATIONS || self.stop.load(Ordering::Relaxed) {
            return Err(ReadError::TooLarge {
                what: "drawing operations",
                limit: format!("{MAX_PDF_OPERATIONS}"),
            });
        }
        if self.text_bytes > MAX_TEXT_BYTES {
            return Err(ReadError::too_large("text", MAX_TEXT_BYTES));
        }
        Ok(())
    }

    fn run(
        &mut self,
        content: &[u8],
        resources: &Resources<'a>,
        mut state: State<'a>,
        depth: usize,
    ) -> Result<(), ReadError> {
        let mut saved = Vec::new();
        let mut cursor = Cursor::default();
        let mut operations = TypedIter::new(content);
        while let Some(operation) = operations.next() {
            self.count(1)?;
            match operation {
                TypedInstruction::SaveState(_) if saved.len() < MAX_SAVED => saved.push(state.clone()),
                TypedInstruction::RestoreState(_) => state = saved.pop().unwrap_or(state),
                TypedInstruction::XObject(form) if self.artifact.is_none() => {
                    self.form(form.0, resources, &state, depth)?
                }
                TypedInstruction::BeginMarkedContent(tag) => self.mark(tag.0, None),
                TypedInstruction::BeginMarkedContentWithProperties(tag) => {
                    let properties = match tag.1 {
                        Object::Dict(properties) => Some(properties.clone()),
                        Object::Name(name) => resources.properties.get::<Dict<'_>>(name),
                        _ => None,
                    };
                    self.mark(tag.0, properties);
                }
                TypedInstruction::EndMarkedContent(_) => self.unmark(),
                TypedInstruction::BeginText(_) => cursor = Cursor::default(),
                TypedInstruction::TextFont(font) => {
                    state.size = font.1.as_f64();
                    state.face = self.face(font.0, resources)?;
                }
                TypedInstruction::ShowText(text) => self.show(text.0, &state, &mut cursor)?,
                TypedInstruction::NextLineAndShowText(text) => {
                    cursor.next_line(0.0, -state.leading);
                    self.show(text.0, &state, &mut cursor)?;
                }
                TypedInstruction::ShowTextWithParameters(text) => {
                    state.word_spacing = text.0.as_f64();
                    state.character_spacing = text.1.as_f64();
                    cursor.next_line(0.0, -state.leading);
                    self.show(text.2, &state, &mut cursor)?;
                }
                TypedInstruction::ShowTexts(texts) => self.show_all(texts.0, &state, &mut cursor)?,
                operation => state.set(&operation, &mut cursor),
            }
        }
        Ok(())
    }

    fn mark(&mut self, tag: &Name<'_>, properties: Option<Dict<'_>>) {
        self.marks += 1;
        if &**tag == b"Artifact" {
            self.artifact.get_or_insert(self.marks);
        }
        let text = properties
            .and_then(|properties| properties.get::<hayro_syntax::object::String<'_>>(b"ActualText"));
        if let Some(text) = text {
            let shown = || bidi::reordered(&string(text.as_bytes()), false);
            self.actual.get_or_insert_with(|| (self.marks, shown()));
        }
    }

    fn unmark(&mut self) {
        self.artifact = self.artifact.filter(|at| *at != self.marks);
        self.actual = self.actual.take().filter(|(at, _)| *at != self.marks);
        self.marks = self.marks.saturating_sub(1);
    }

    fn close_marks(&mut self) {
        (self.marks, self.artifact, self.actual) = (0, None, None);
    }

    /// Runs a form: a content stream that others draw.
    fn form(
        &mut self,
        name: &Name<'_>,
        resources: &Resources<'a>,
        state: &State<'a>,
        depth: usize,
    ) -> Result<(), ReadError> {
        let Some(form) = resources.get_x_object(name) else { return Ok(()) };
        if form.dict().get::<Name<'_>>(SUBTYPE).is_none_or(|subtype| &*subtype != b"Form") {
            return Ok(());
        }
        self.draw(&form, resources, state, depth)
    }

    fn draw(
        &mut self,
        form: &Stream<'a>,
        resources: &Resources<'a>,
        state: &State<'a>,
        depth: usize,
    ) -> Result<(), ReadError> {
        if depth >= MAX_FORM_DEPTH {
            return Ok(());
        }
        self.check(form)?;
        let Ok(content) = form.decoded_data() else { return Ok(()) };
        self.count(content.len() / BYTES_PER_OPERATION)?;
        let own = form.dict().get::<Dict<'a>>(RESOURCES).map(Resources::new);
        let state = State { ctm: state.ctm * annotations::matrix(form.dict()), ..state.clone() };
        self.run(&content, own.as_ref().unwrap_or(resources), state, depth + 1)
    }

    /// A font, the style that its name tells, and its characters.
    fn face(&mut self, name: &Name<'_>, resources: &Resources<'a>) -> Result<Face<'a>, ReadError> {
        let reference = resources.fonts.get_ref(&**name);
        if let Some(known) = reference.and_then(|reference| self.known.get(&reference)) {
            return Ok(known.clone());
        }
        let Some(dict) = resources.get_font(name) else { return Ok(Face::default()) };
        let descendant =
            dict.get::<Array<'_>>(DESCENDANT_FONTS).and_then(|fonts| fonts.iter::<Dict<'_>>().next());
        for dict in [Some(&dict), descendant.as_ref()].into_iter().flatten() {
            let descriptor = dict.get::<Dict<'_>>(FONT_DESC).unwrap_or_default();
            let files = [FONT_FILE, FONT_FILE2, FONT_FILE3].map(|key| descriptor.get::<Stream<'_>>(key));
            let maps = [TO_UNICODE, b"Encoding", b"CIDToGIDMap"].map(|key| dict.get::<Stream<'_>>(key));
            files.iter().chain(&maps).flatten().try_for_each(|stream| self.check(stream))?;
            widths::check(dict)?;
        }
        let mut style =
            dict.get::<Name<'_>>(BASE_FONT).map(|base| Style::of(base.as_str())).unwrap_or_default();
        let font = self.fonts.font(&dict, &self.font_resolver, self.maps.resolver());
        self.maps.check()?;
        let bitmaps = font.as_ref().and_then(|font| Bitmaps::of(&dict, font));
        style.mono |= bitmaps.as_ref().is_some_and(|bitmaps| bitmaps.mono);
        let characters = match descendant {
            Some(descendant) => self.maps.characters(&dict, &descendant),
            None => bitmaps.map(Characters::Bitmaps),
        };
        let found = Face { font, style, characters: characters.map(Rc::new) };
        if let Some(reference) = reference {
            self.known.insert(reference, found.clone());
        }
        Ok(found)
    }

    fn show_all(
        &mut self,
        texts: &Array<'_>,
        state: &State<'a>,
        cursor: &mut Cursor,
    ) -> Result<(), ReadError> {
        for item in texts.iter::<Object<'_>>() {
            match item {
                Object::String(text) => self.show(&text, state, cursor)?,
                Object::Number(adjustment) => {
                    let by = -adjustment.as_f64() / f64::from(UNITS_PER_EM) * state.size;
                    let horizontal = state.face.font.as_ref().is_none_or(Font::is_horizontal);
                    cursor.advance(if horizontal {
                        Vec2::new(by * state.scaling, 0.0)
                    } else {
                        Vec2::new(0.0, by)
                    });
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn show(&mut self, text: &[u8], state: &State<'a>, cursor: &mut Cursor) -> Result<(), ReadError> {
        let Some(font) = &state.face.font else { return Ok(()) };
        self.count(text.len() / BYTES_PER_OPERATION)?;
        let horizontal = font.is_horizontal();
        let mut at = 0;
        while at < text.len() {
            let (code, length) = font.read_code(text, at);
            at += length.max(1);
            let space = if code == 32 && length == 1 { state.word_spacing } else { 0.0 };
            let advance = font.code_advance(code) / f64::from(UNITS_PER_EM) * state.size;
            let spacing = state.character_spacing + space;
            let step = if horizontal {
                Vec2::new((advance.x + spacing) * state.scaling, 0.0)
            } else {
                Vec2::new(0.0, advance.y + spacing)
            };
            if self.artifact.is_none() {
                // The text goes by the code; which glyph draws it does not matter.
                let shown = match font.glyph(GlyphId::NOTDEF, code) {
                    FontGlyph::Outline(glyph) => glyph.as_unicode(),
                    FontGlyph::Type3(glyph) => glyph.as_unicode(),
                };
                let shown = shown.or_else(|| state.face.characters.as_ref()?.of(code, length));
                let place = state.ctm * cursor.text * Affine::translate((0.0, state.rise));
                // Vertical text is laid out as horizontal text that is turned.
                let (turn, width) = match horizontal {
                    true => (0.0, advance.x * state.scaling),
                    false => (-FRAC_PI_2, -advance.y),
                };
                self.glyph(shown, place * Affine::rotate(turn), width, state, cursor.placed)?;
                cursor.placed = false;
            }
            cursor.advance(step);
        }
        Ok(())
    }

    /// Adds a glyph to the text it continues, or begins another.
    fn glyph(
        &mut self,
        shown: Option<BfString>,
        place: Affine,
        width: f64,
        state: &State<'a>,
        placed: bool,
    ) -> Result<(), ReadError> {
        let mut text = String::new();
        self.glyphs[usize::from(shown.is_none() && self.actual.is_none())] += 1;
        match shown {
            // The first glyph stands for the text, the others for none.
            _ if self.actual.is_some() => {
                text = self.actual.as_mut().map_or(text, |(_, text)| std::mem::take(text))
            }
            Some(BfString::Char(c)) => push(&mut text, c),
            Some(BfString::String(s)) => {
                bidi::reordered(&s, false).chars().for_each(|c| push(&mut text, c));
            }
            // Nothing is known of the glyph, and a mark would stand for noise in most files.
            None => return Ok(()),
        }
        let [a, b, ..] = place.as_coeffs();
        let (origin, end) = (place * Point::ZERO, place * Point::new(width, 0.0));
        let size = (state.size * place.determinant().abs().sqrt()).abs();
        let known = [origin.x, origin.y, end.x, end.y, size]
            .iter()
            .all(|value| value.is_finite() && value.abs() < 1e7);
        if !known || size <= 0.0 {
            return Ok(());
        }
        // Quarter turns clockwise, the page's y growing downwards.
        let turns = (b.atan2(a) / FRAC_PI_2).round().rem_euclid(4.0) as u8;
        let turn = |p: Point| match turns {
            0 => (p.x, p.y),
            1 => (p.y, -p.x),
            2 => (-p.x, -p.y),
            _ => (-p.y, p.x),
        };
        let ((x0, y), (x1, _)) = (turn(origin), turn(end));
        self.text_bytes += text.len();
        let span =
            Span { text, x0: x0.min(x1), x1: x1.max(x0), y, size, style: state.face.style, placed, turns };
        match self.spans.last_mut() {
            Some(last) if last.continues(&span) => last.push(&span),
            _ => {
                self.count_span()?;
                self.spans.push(span);
            }
        }
        if self.text_bytes > MAX_TEXT_BYTES {
            Err(ReadError::too_large("text", MAX_TEXT_BYTES))
        } else {
            Ok(())
        }
    }

    /// Counts a text that stands apart. One operation may show many, and each takes more memory than its bytes.
    fn count_span(&mut self) -> Result<(), ReadError> {
        self.all_spans += 1;
        if self.all_spans > MAX_SPANS || self.spans.len() >= MAX_PAGE_SPANS {
            let limit = format!("{MAX_PAGE_SPANS} on a page, {MAX_SPANS} in all");
            return Err(ReadError::TooLarge { what: "texts that stand apart", limit });
        }
        Ok(())
    }
}
