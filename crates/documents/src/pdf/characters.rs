//! The characters of fonts that do not tell them: by the character collections of Chinese, Japanese and Korean (ISO 32000-2, 9.7.5), or
//! by the encodings of TeX.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hayro_cmap::{BfString, CMap, CMapName, CidFamily, load_embedded};
use hayro_font::CMapResolverFn;
use hayro_syntax::object::dict::keys::{CIDSYSTEMINFO, ENCODING, ORDERING, REGISTRY};
use hayro_syntax::object::{self, Dict, Object};

use super::bitmaps::Bitmaps;
use crate::error::ReadError;
use crate::limits::MAX_FONT_MAPS;

/// The maps that fonts name instead of holding them.
pub(super) struct Maps {
    resolver: CMapResolverFn,
    /// The maps that `hayro-font` has read, each anew for each font.
    read: Arc<AtomicUsize>,
    known: HashMap<Vec<u8>, Rc<CMap>>,
}

/// The characters of a font by their codes.
pub(super) enum Characters {
    /// The characters of its collection's glyphs.
    Collection {
        glyphs: Rc<CMap>,
        characters: Rc<CMap>,
    },
    Bitmaps(Bitmaps),
}

impl Maps {
    pub(super) fn new() -> Self {
        let read = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&read);
        let resolver: CMapResolverFn = Arc::new(move |name| match name {
            // The characters of a collection are kept once for all fonts.
            CMapName::AdobeCns1Ucs2
            | CMapName::AdobeGb1Ucs2
            | CMapName::AdobeJapan1Ucs2
            | CMapName::AdobeKorea1Ucs2 => None,
            name => {
                count.fetch_add(1, Ordering::Relaxed);
                load_embedded(name)
            }
        });
        Maps { resolver, read, known: HashMap::new() }
    }

    pub(super) fn resolver(&self) -> &CMapResolverFn {
        &self.resolver
    }

    /// Checks that the fonts so far name no more maps than their limit.
    pub(super) fn check(&self) -> Result<(), ReadError> {
        if self.read.load(Ordering::Relaxed) > MAX_FONT_MAPS {
            return Err(ReadError::TooLarge {
                what: "named maps of fonts",
                limit: MAX_FONT_MAPS.to_string(),
            });
        }
        Ok(())
    }

    /// The characters of a composite font; none where its collection is not known.
    pub(super) fn characters(&mut self, font: &Dict<'_>, descendant: &Dict<'_>) -> Option<Characters> {
        let glyphs = match font.get::<Object<'_>>(ENCODING)? {
            Object::Name(name) => self.named(CMapName::from_bytes(&name))?,
            Object::Stream(stream) => Rc::new(CMap::parse(&stream.decoded_data().ok()?, load_embedded)?),
            _ => return None,
        };
        let of_map = glyphs.metadata().character_collection.as_ref().map(|collection| &collection.family);
        let name = of_map.and_then(CidFamily::ucs2_cmap).or_else(|| family(descendant)?.ucs2_cmap())?;
        Some(Characters::Collection { characters: self.named(name)?, glyphs })
    }

    fn named(&mut self, name: CMapName<'_>) -> Option<Rc<CMap>> {
        let key = name.to_bytes().to_vec();
        if let Some(map) = self.known.get(&key) {
            return Some(Rc::clone(map));
        }
        let map = Rc::new(CMap::parse(load_embedded(name)?, load_embedded)?);
        self.known.insert(key, Rc::clone(&map));
        Some(map)
    }
}

fn family(descendant: &Dict<'_>) -> Option<CidFamily> {
    let system = descendant.get::<Dict<'_>>(CIDSYSTEMINFO)?;
    let [registry, ordering] = [REGISTRY, ORDERING].map(|key| system.get::<object::String<'_>>(key));
    Some(CidFamily::from_registry_ordering(registry?.as_bytes(), ordering?.as_bytes()))
}

impl Characters {
    /// The characters of a code of so many bytes.
    pub(super) fn of(&self, code: u32, length: usize) -> Option<BfString> {
        match self {
            Characters::Collection { glyphs, characters } => {
                let glyph = glyphs.lookup_cid_code(code, u8::try_from(length).ok()?)?;
                characters.lookup_bf_string(glyph)
            }
            Characters::Bitmaps(bitmaps) => bitmaps.character(code).map(BfString::Char),
        }
    }
}
