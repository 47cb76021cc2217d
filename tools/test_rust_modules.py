"""Tests of rust_modules: which imports it sees in small crates, and which circles it finds among them."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
import rust_modules


class Imports(unittest.TestCase):
    def crate(self, **files):
        """Writes a crate: `lib="…"`, and `a__b="…"` for a/b.rs."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        for name, text in files.items():
            file = self.folder / (name.replace("__", "/") + ".rs")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return rust_modules.import_graph(rust_modules.read(self.folder / "lib.rs"))

    def name(self, file):
        return str(file.relative_to(self.folder).with_suffix(""))

    def edges(self, **files):
        graph = self.crate(**files)
        return {f"{self.name(file)}:{line} {self.name(target)}" for file in graph for target, (line, _) in graph[file].items()}

    def circles(self, **files):
        return [[self.name(file) for file in circle] for circle in rust_modules.circles(self.crate(**files))]

    def test_use_of_a_module_and_inline_paths(self):
        edges = self.edges(
            lib="mod a;\nmod b;\nmod c;",
            a="use crate::b;\n\nfn f() { b::g(); }",
            b="pub fn g() {}\nfn h() -> crate::c::D { super::c::d::<u8>() }",
            c="pub struct D;",
        )
        self.assertEqual(edges, {"a:3 b", "b:2 c"})

    def test_nested_trees_renames_and_raw_names(self):
        edges = self.edges(
            lib="mod a; mod b; mod c; mod d; mod r#type;",
            a="use std::fmt;\nuse crate::{\n    b::{self, B as Other},\n    c::{D, inner::{E, F}},\n};\nuse super::d::*;\nuse crate::r#type::T;\nfn f(_: G) { b::x() }",
            b="pub struct B; pub fn x() {}",
            c="pub struct D; pub mod inner { pub struct E; pub struct F; }",
            d="pub struct G; pub struct Unused;",
            type="pub struct T;",
        )
        self.assertEqual(edges, {"a:3 b", "a:4 c", "a:6 d", "a:7 type"})

    def test_a_glob_takes_only_what_is_named_and_traits(self):
        files = {"lib": "mod a; mod b;", "a": "use crate::b::*;\nfn f() {}", "b": "pub struct B;"}
        self.assertEqual(self.edges(**files), set())
        self.assertEqual(self.edges(**{**files, "b": "pub trait B {}"}), {"a:1 b"})
        self.assertEqual(self.edges(**{**files, "a": "use crate::b::*;\nfn f(_: B) {}"}), {"a:1 b"})

    def test_a_re_export_leads_to_the_file_that_defines(self):
        edges = self.edges(
            lib="mod a;\nmod b;\npub use b::{B, c::C as Renamed};\npub use self::b::*;\npub struct Own;",
            a="use crate::B;\nfn f(_: crate::Renamed) {}\nfn g(_: crate::Hidden) {}\nfn h(_: crate::Own) {}",
            b="pub mod c;\npub struct B;\npub struct Hidden;",
            b__c="pub struct C;",
        )
        self.assertEqual(edges, {"a:1 b", "a:2 b/c", "a:4 lib"})

    def test_a_re_export_that_the_file_uses_itself_is_an_import(self):
        files = {"lib": "mod a;\npub use a::A;\npub trait T {}", "a": "use crate::T;\npub struct A;"}
        self.assertEqual(self.circles(**files), [])
        self.assertEqual(self.circles(**{**files, "lib": files["lib"] + "\nimpl T for A {}"}), [["a", "lib"]])

    def test_parent_and_child(self):
        files = {"lib": "mod a;", "a": "mod b;\nuse self::b::B;\npub struct A;", "a__b": "use super::A;\npub struct B;"}
        self.assertEqual(self.circles(**files), [["a/b", "a"]])
        self.assertEqual(self.circles(**{**files, "a": "mod b;\npub struct A;"}), [])
        self.assertEqual(self.circles(**{**files, "a__b": "pub struct B;"}), [])
        self.assertEqual(self.edges(**{**files, "a": "mod b;\nfn f() { b::g() }"}), {"a:2 a/b", "a/b:1 a"})

    def test_a_private_import_of_the_parent_leads_on(self):
        edges = self.edges(
            lib="mod a; mod c;",
            a="mod b;\nuse crate::c::C;",
            a__b="use super::C;",
            c="pub struct C;",
        )
        self.assertEqual(edges, {"a:2 c", "a/b:1 c"})

    def test_a_function_and_a_module_of_one_name(self):
        edges = self.edges(
            lib="mod step;\nmod a;\npub use step::step;",
            step="pub fn step() {}\npub struct Step;",
            a="use crate::step;\nfn f() { step(); }",
        )
        self.assertEqual(edges, {"a:1 step"})

    def test_tests_comments_and_strings_are_left_out(self):
        edges = self.edges(
            lib="mod a; mod b;",
            a="""
//! See [`crate::b::B`].
/* use crate::b::B; */
const S: &str = "crate::b::B";
const R: &str = r#"use crate::b::B; ""#;
const C: (char, &'static str) = ('"', "use crate::b;");
#[cfg(test)]
use crate::b::B;
#[cfg(test)]
#[allow(dead_code)]
pub(crate) fn helper<T, U>(_: [u8; 3]) -> crate::b::B { crate::b::make() }
#[cfg(all(test, unix))]
mod tests;
#[cfg(test)]
mod more { use crate::b::B; }
struct X { #[cfg(test)] field: crate::b::B, other: u8 }
""",
            a__tests="use crate::b::B;",
            b="pub struct B;",
        )
        self.assertEqual(edges, set())

    def test_code_behind_a_test_item_is_read(self):
        after = "\nfn f(_: crate::b::B) {}"
        for item in ["fn t() {}", "use x::{y, z};", "const T: X = X { a: 1 };", "mod t { fn u() {} }", "impl<A, B> X<A, B> {}"]:
            edges = self.edges(lib="mod a; mod b;", a=f"#[cfg(test)]\n{item}{after}", b="pub struct B;")
            self.assertEqual(edges, {"a:3 b"}, item)

    def test_paths_in_attributes_macros_and_visibilities(self):
        edges = self.edges(
            lib="mod a; mod b; mod c; mod d;",
            a="#[serde(with = \"crate::b::hex\")]\npub(in crate::a) struct S(pub(crate) u8, pub (crate::c::C, u8));\nmacro_rules! m { () => { $crate::d::f() } }",
            b="pub mod hex {}",
            c="pub struct C;",
            d="pub fn f() {}",
        )
        self.assertEqual(edges, {"a:1 b", "a:2 c", "a:3 d"})

    def test_names_of_other_crates_are_no_imports(self):
        edges = self.edges(
            lib="mod a; mod codes;",
            a="use std::codes::X;\nuse ::codes::Y;\nfn f() -> impl Iterator<Item = u8> + use<'_> { T::codes::<u8>(); Self::codes() }",
            codes="pub struct X;",
        )
        self.assertEqual(edges, set())

    def test_a_re_export_of_another_crate_is_no_import(self):
        files = {"lib": "mod a;\npub use std::fmt::Result;\nthread_local! { static WORK: u8 = 0; }", "a": "use crate::Result;"}
        self.assertEqual(self.edges(**files), set())
        self.assertEqual(self.edges(**{**files, "a": "use crate::WORK;"}), {"a:1 lib"})

    def test_inline_modules_and_paths_of_files(self):
        edges = self.edges(
            lib='mod a; mod b;\n#[path = "other.rs"]\nmod c;',
            a="mod inner { use super::super::b::B;\nmod deep; }\nfn f(_: crate::c::C) {}",
            a__inner__deep="use crate::a::inner;\nfn f() { crate::c::f() }",
            b="pub struct B;",
            other="pub struct C;",
        )
        self.assertEqual(edges, {"a:1 b", "a:3 other", "a/inner/deep:1 a", "a/inner/deep:2 other"})

    def test_circles_are_found_once_and_the_short_ones_first(self):
        circles = self.circles(
            lib="mod a; mod b; mod c; mod d;",
            a="use crate::b::B; pub struct A;",
            b="use crate::c::C; pub struct B;",
            c="use crate::a::A; use crate::d::D; pub struct C;",
            d="use crate::c::C; pub struct D;",
        )
        self.assertEqual(circles, [["c", "d"], ["a", "b", "c"]])


if __name__ == "__main__":
    unittest.main()
