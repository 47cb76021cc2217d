//! Arrays of a page.

use hayro_syntax::object::{Array, MaybeRef, Object};
use hayro_syntax::page::Page;

/// The items of an array. An item that refers to nothing does not end them.
pub(super) fn items<'a>(page: &Page<'a>, key: &[u8]) -> impl Iterator<Item = Object<'a>> {
    let xref = page.xref();
    let items = page.raw().get::<Array<'a>>(key).map(|array| array.raw_iter());
    items.into_iter().flatten().filter_map(move |item| match item {
        MaybeRef::Ref(reference) => xref.get::<Object<'a>>(reference.into()),
        MaybeRef::NotRef(item) => Some(item),
    })
}
