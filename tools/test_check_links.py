"""Tests of check-links."""

import importlib.machinery
import importlib.util
import tempfile
import unittest
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent / "check-links"
LOADER = importlib.machinery.SourceFileLoader("check_links", str(PROGRAM))
check_links = importlib.util.module_from_spec(importlib.util.spec_from_loader("check_links", LOADER))
LOADER.exec_module(check_links)


class CheckLinks(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name).resolve()
        self.addCleanup(setattr, check_links, "ROOT", check_links.ROOT)
        check_links.ROOT = self.folder

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def problems(self, text, name="a.md"):
        found = []
        check_links.check_markdown(self.write(name, text), found)
        return found

    def test_files_and_headings_have_to_be_there(self):
        self.write("b.md", "# One `two`, [three](c)\n## Again\n## Again\n")
        good = "[a](b.md) [a](b.md#one-two-three) [a](b.md#again-1) [a](#here) [a](https://x.y/z) `[a](no.md)`\n# Here\n```\n[a](no.md)\n```\n"
        self.assertEqual(self.problems(good), [])
        for link, what in [("no.md", "is not there"), ("b.md#two", "has no such heading"), ("#two", "has no such heading")]:
            self.assertEqual(self.problems(f"\n[a]({link})\n"), [f"a.md:2: {link} {what}"])

    def test_what_is_included_counts_from_the_place_of_the_chapter(self):
        self.write("b.md", "# Far\n<!-- ANCHOR: part -->\n[a](c.md)\n<!-- ANCHOR_END: part -->\n")
        self.write("c.md", "")
        self.assertEqual(self.problems("{{#include b.md}}\n[a](#far)\n"), [])
        self.assertEqual(self.problems("{{#include b.md:part}}\n[a](#far)\n"), ["a.md:2: #far has no such heading"])
        self.assertEqual(self.problems("{{#include ../b.md}}\n", "in/a.md"), ["in/a.md:3: c.md is not there"])
        self.assertEqual(self.problems("{{#include no.md}}\n"), ["a.md: no.md is included and not there"])
        self.assertEqual(self.problems("{{#include b.md:other}}\n"), ["a.md: b.md has no section other"])

    def test_quoted_code_stands_in_its_file(self):
        self.write("b.rs", "fn b() {\n    1\n}\n")
        quote = "<!-- quoted from b.rs -->\n```rust\n{}\n```\n"
        self.assertEqual(self.problems(quote.format("fn b() {\n    1")), [])
        self.assertEqual(self.problems(quote.format("fn b() {\n    2")), ["a.md:1: what is quoted does not stand in b.rs"])

    def test_pages_of_a_site_lead_to_places_that_are_there(self):
        self.write("site/a.html", '<a href="b.html#x">b</a><img src="no.png"><a href="b.html#y">b</a><a href="https://x.y">far</a>')
        self.write("site/b.html", '<h1 id="x">b</h1>')
        found = []
        self.assertEqual(check_links.check_site(self.folder / "site", found), 2)
        self.assertEqual(found, ["a.html: no.png is not there", "a.html: b.html#y has no such place"])


if __name__ == "__main__":
    unittest.main()
