//! The text that the pages of files show.

use hayro_font::StandardFont;

use super::*;
use crate::limits::MAX_FONT_MAPS;

/// A file of several pages, by their content.
fn pages(contents: &[String]) -> Vec<u8> {
    let kids: String = (0..contents.len()).map(|at| format!("{} 0 R ", 10 + at)).collect();
    let first = file(b"", "", &[]);
    let mut bytes =
        String::from_utf8(first).unwrap().replace("/Kids [3 0 R] /Count 1", &format!("/Kids [{kids}]"));
    let page =
        bytes[bytes.find("3 0 obj\n").unwrap() + 8..bytes.find("\nendobj\n4 0 obj").unwrap()].to_owned();
    for (at, content) in contents.iter().enumerate() {
        let page = page.replace("/Contents 4 0 R", &format!("/Contents {} 0 R", 1000 + at));
        bytes += &format!("{} 0 obj\n{page}\nendobj\n", 10 + at);
        bytes += &format!(
            "{} 0 obj\n<< /Length {} >>\nstream\n{content}\nendstream\nendobj\n",
            1000 + at,
            content.len()
        );
    }
    bytes += "trailer\n<< /Root 1 0 R >>\n%%EOF\n";
    bytes.into_bytes()
}

fn pages_text(contents: &[String]) -> String {
    sent(&pages(contents), "name").unwrap().text
}

/// A text at a place, in a size.
fn at(x: f64, y: f64, size: f64, text: &str) -> String {
    format!("BT /F {size} Tf {x} {y} Td ({text}) Tj ET\n")
}

/// Text of a page that occurs on no other.
fn body(page: usize) -> String {
    let word = ["One", "Two", "Three", "Four", "Five"][page];
    lines(
        72.0,
        500.0,
        &[
            &format!("{word} begins a text of several words that is on this page,"),
            &format!("and goes on as {word}."),
        ],
    )
}

#[test]
fn running_lines_are_the_same_but_for_a_number_that_grows_with_the_page() {
    let of = |count, page: &dyn Fn(usize) -> String| {
        pages_text(&(0..count).map(|at| page(at) + &body(at)).collect::<Vec<_>>())
    };
    let texts = ["One", "Two", "Three", "Four", "Five"].map(|word| {
        format!("{word} begins a text of several words that is on this page, and goes on as {word}.")
    });
    let text = of(5, &|page| {
        at(72.0, 800.0, 10.0, "Bicycle Handbook, 2023 edition")
            + &at(72.0, 30.0, 10.0, &format!("Page {} of 5", page + 1))
    });
    assert_eq!(text, texts.join("\n\n"));
    // The page's number may begin at another.
    let text = of(2, &|page| at(72.0, 30.0, 10.0, &format!("{}", page + 17)));
    assert_eq!(text, texts[..2].join("\n\n"));
    // That of pages before the first chapter is Roman, and may be large.
    let text = of(5, &|page| at(72.0, 30.0, 14.0, ["iii", "iv", "v", "vi", "vii"][page]));
    assert_eq!(text, texts.join("\n\n"));
    let text = of(3, &|page| at(72.0, 800.0, 14.0, ["mix", "i", "xl"][page]));
    assert_eq!(text.matches("# ").count(), 3, "{text}");
    // Other numbers are data.
    let text = of(5, &|page| at(72.0, 30.0, 10.0, &format!("Page total {}.50", 412 + 7 * page)));
    assert_eq!(text.matches("Page total").count(), 5, "{text}");
    // So are the parts of a title.
    let text = of(3, &|page| at(72.0, 800.0, 20.0, &format!("Results \\({}/3\\)", page + 1)));
    assert_eq!(text.matches("# Results (").count(), 3, "{text}");
}

#[test]
fn rows_of_a_table_over_several_pages_stay() {
    let row = |page: usize, row: usize| {
        format!("2023-0{}-{:02} {}.34 {}.78", page + 1, row + 10, row * page + 3, row + page)
    };
    let page = |page| {
        let rows: Vec<String> = (0..6).map(|at| row(page, at)).collect();
        at(72.0, 780.0, 10.0, "Date")
            + &at(200.0, 780.0, 10.0, "Amount")
            + &lines(72.0, 760.0, &rows.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let text = pages_text(&(0..5).map(page).collect::<Vec<_>>());
    for (page, at) in (0..5).flat_map(|page| (0..6).map(move |at| (page, at))) {
        assert!(text.contains(&row(page, at)), "{}: {text}", row(page, at));
    }
    // The header stands once.
    assert_eq!(text.matches("Date").count(), 1, "{text}");
    assert!(text.starts_with("Date Amount"), "{text}");
}

#[test]
fn narrow_spaces_part_words_and_no_letters() {
    let shown = |texts: &[&str]| {
        let texts: String = texts.iter().map(|text| format!("({text}) -150 ")).collect();
        text(&format!("BT /F 10 Tf 72 700 Td [{texts}] TJ ET"))
    };
    let words = "Newer versions of this text are on the net";
    assert_eq!(shown(&words.split(' ').collect::<Vec<_>>()), words);
    assert_eq!(shown(&["H", "e", "a", "d", "i", "n", "g"]), "Heading");
}

#[test]
fn lines_that_hang_behind_their_first_go_on_with_it() {
    let reference =
        lines(72.0, 700.0, &["Zarkos SG \\(2003\\). Econometric and Statistical Computing Using Ox. Com-"])
            + &lines(
                90.0,
                688.0,
                &["putational Economics, 21, 277 to 295, which lists more of them", "in full."],
            );
    assert_eq!(
        text(&reference),
        "Zarkos SG (2003). Econometric and Statistical Computing Using Ox. Computational Economics, 21, 277 to 295, which lists more \
        of them in full."
    );
    let heading = "BT /B 12 Tf 72 760 Td (7.18 Why the output of a function depends on the) Tj 22 -14 Td (order of its factors) Tj ET ";
    assert!(
        text(&(heading.to_owned() + &reference))
            .starts_with("# 7.18 Why the output of a function depends on the order of its factors\n\n")
    );
    // An indent begins a paragraph behind the end of another, and where programs begin.
    let first = "A paragraph of one line that ends where the next one begins";
    for (first, second) in
        [(format!("{first}."), "/F 10 Tf (Another one.)"), (first.to_owned(), "/C 10 Tf (a = 1)")]
    {
        let text = text(&format!("BT /F 10 Tf 72 700 Td ({first}) Tj 15 -12 Td {second} Tj ET"));
        assert_eq!(text.matches("\n\n").count(), 1, "{text}");
    }
}

/// A file that shows codes in a bitmap font of TeX, whose glyphs have names of a letter and a number.
fn bitmaps(shown: &[u8], codes: &[u8], name: impl Fn(u8) -> String, width: impl Fn(u8) -> u8) -> Vec<u8> {
    let differences: String = codes.iter().map(|code| format!("{code} /{} ", name(*code))).collect();
    let widths: String = (0..=255).map(|code| format!("{} ", width(code))).collect();
    let font = format!(
        "<< /Type /Font /Subtype /Type3 /FontMatrix [0.01 0 0 0.01 0 0] /FontBBox [0 0 100 100] /CharProcs << >> /FirstChar 0 \
        /LastChar 255 /Widths [{widths}] /Encoding << /Type /Encoding /Differences [{differences}] >> >>"
    );
    let shown: String = shown.iter().map(|code| format!("{code:02X}")).collect();
    let bytes = file(format!("BT /W 10 Tf 72 700 Td <{shown}> Tj ET").as_bytes(), "", &["<<>>", &font]);
    String::from_utf8(bytes).unwrap().replace("/Font << /F ", "/Font << /W 6 0 R /F ").into_bytes()
}

#[test]
fn bitmap_fonts_of_tex_have_the_characters_of_their_codes() {
    let read = |shown: &[u8], more: &[u8], name: &str, even: bool| {
        let codes = [&(b'a'..=b'z').collect::<Vec<_>>(), more].concat();
        let width = |code| if even { 52 } else { 50 + code % 8 };
        sent(&bitmaps(shown, &codes, |code| format!("{name}{code}"), width), "n").map(|read| read.text)
    };
    let t1 = read(b"\x10o\x1Dce\x11\x15na\xEFf", &[16, 17, 21, 29, 239], "a", false);
    assert_eq!(t1.unwrap(), "“oflce”–naïf");
    let ot1 = read(b"\\o\x0Ece\"{na\x1Ff'", b"\x0E\x1F\"'\\{", "a", false);
    assert_eq!(ot1.unwrap(), "“office”–naØf’");
    // Programs are set in signs of ASCII.
    assert_eq!(read(b"{a\"'", b"\"'{", "C0", true).unwrap(), "{a\"'");
    // A name that is no code tells nothing, nor do codes that are numbered from the first glyph.
    let unknown = [read(b"abc", &[], "a1", false), read(b"abc", &[0, 1], "a", false)];
    for read in unknown {
        let error = read.unwrap_err().to_string();
        assert!(
            error.contains("do not tell the characters") && error.contains("ocrmypdf --force-ocr"),
            "{error}"
        );
    }
}

/// A file that shows a text in a composite font, whose descendant is object 7.
fn composite(text: &str, encoding: &str, descendant: &str, more: &[&str]) -> Vec<u8> {
    let font = format!(
        "<< /Type /Font /Subtype /Type0 /BaseFont /Foo /Encoding {encoding} /DescendantFonts [7 0 R] >>"
    );
    let more = [&["<<>>", &font, descendant], more].concat();
    let content = format!("BT /W 10 Tf 72 700 Td <{text}> Tj ET");
    let bytes = String::from_utf8(file(content.as_bytes(), "", &more)).unwrap();
    bytes.replace("/Font << /F ", "/Font << /W 6 0 R /F ").into_bytes()
}

fn of_collection(ordering: &str, more: &str) -> String {
    let system = format!("/CIDSystemInfo << /Registry (Adobe) /Ordering ({ordering}) /Supplement 0 >>");
    format!("<< /Type /Font /Subtype /CIDFontType0 /BaseFont /Foo {system} {more} >>")
}

#[test]
fn fonts_of_named_maps_are_read() {
    for (encoding, ordering, text, expected) in [
        ("/90ms-RKSJ-H", "Japan1", "82A082A28ABF8E9A", "あい漢字"),
        ("/UniJIS-UTF16-H", "Japan1", "3042D842DFB7", "あ𠮷"),
        ("/UniGB-UCS2-H", "GB1", "4F60597D", "你好"),
        ("/GBK-EUC-H", "GB1", "C4E3BAC3", "你好"),
        ("/ETen-B5-H", "CNS1", "A741A66E", "你好"),
        ("/KSCms-UHC-H", "Korea1", "C7D1B1DB", "한글"),
    ] {
        let bytes = composite(text, encoding, &of_collection(ordering, ""), &[]);
        assert_eq!(sent(&bytes, "name").unwrap().text, expected, "{encoding}");
    }
}

/// The font holds its glyphs, and tells no characters.
#[test]
fn characters_of_a_held_font_are_those_of_its_collection() {
    let (data, _) = StandardFont::Helvetica.get_font_data();
    let data: String = (*data).as_ref().iter().map(|byte| format!("{byte:02X}")).collect();
    let held =
        format!("<< /Filter /ASCIIHexDecode /Length {} >>\nstream\n{data}>\nendstream", data.len() + 1);
    let descriptor = "<< /Type /FontDescriptor /FontName /Foo /FontFile 9 0 R >>";
    let descendant = of_collection("Japan1", "/FontDescriptor 8 0 R");
    let bytes = composite("034B034D", "/Identity-H", &descendant, &[descriptor, &held]);
    assert_eq!(sent(&bytes, "name").unwrap().text, "あい");
}

#[test]
fn named_maps_of_fonts_are_bounded() {
    let font = |at| {
        format!(
            "/W{at} << /Type /Font /Subtype /Type0 /BaseFont /Foo{at} /Encoding /90ms-RKSJ-H /DescendantFonts [5 0 R] >> "
        )
    };
    let read = |count: usize| {
        let shown: String = (0..count).map(|at| format!("/W{at} 10 Tf <82A0> Tj ")).collect();
        let bytes = file(format!("BT 72 700 Td {shown} ET").as_bytes(), "", &[&of_collection("Japan1", "")]);
        let fonts: String = (0..count).map(font).collect();
        let bytes =
            String::from_utf8(bytes).unwrap().replace("/Font << /F ", &format!("/Font << {fonts} /F "));
        sent(bytes.as_bytes(), "name")
    };
    assert_eq!(read(MAX_FONT_MAPS).unwrap().text, "あ".repeat(MAX_FONT_MAPS));
    assert!(
        matches!(read(MAX_FONT_MAPS + 1), Err(ReadError::TooLarge { what, .. }) if what.contains("maps"))
    );
}

#[test]
fn fields_of_forms_and_notes_are_read_where_they_stand() {
    let form = |content: &str, more: &str| {
        format!(
            "<< /Type /XObject /Subtype /Form /BBox [0 0 100 20] {more} /Length {} /Resources << /Font << /F << /Type /Font \
            /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>\nstream\n{content}\nendstream",
            content.len()
        )
    };
    let text = |text: &str| format!("/Tx BMC BT /F 10 Tf 2 5 Td ({text}) Tj ET EMC");
    let objects = [
        "<<>>".to_owned(),
        form(&text("Ada Lovelace"), ""),
        form(&text("yes"), ""),
        form(&text("no"), ""),
        form(&text("hidden"), ""),
        // Its space is twice as large as its rectangle, and begins elsewhere.
        form(
            "BT /F 20 Tf 102 105 Td (A note.) Tj ET",
            "/Matrix [0.5 0 0 0.5 -50 -50] /BBox [100 100 300 140]",
        ),
    ];
    let annotations = "/Annots [99 0 R \
        << /Subtype /Widget /Rect [150 695 250 715] /AP << /N 6 0 R >> >> \
        << /Subtype /Widget /Rect [150 675 250 695] /AS /On /AP << /N << /On 7 0 R /Off 8 0 R >> >> >> \
        << /Subtype /Widget /Rect [150 655 250 675] /F 2 /AP << /N 9 0 R >> >> \
        << /Subtype /Widget /Rect [150 655 250 675] /F 32 /AP << /N 9 0 R >> >> \
        << /Subtype /Link /Rect [150 655 250 675] /AP << /N 9 0 R >> >> \
        << /Subtype /FreeText /Rect [72 600 172 620] /AP << /N 10 0 R >> >>]";
    let content = at(72.0, 700.0, 10.0, "Name:") + &at(72.0, 680.0, 10.0, "Member:");
    let objects: Vec<&str> = objects.iter().map(String::as_str).collect();
    let bytes = String::from_utf8(file(content.as_bytes(), "", &objects)).unwrap();
    let bytes = bytes.replace("/Contents 4 0 R", &format!("/Contents 4 0 R {annotations}"));
    let text = sent(bytes.as_bytes(), "name").unwrap().text;
    assert_eq!(text, "| Name: | Ada Lovelace |\n| --- | --- |\n| Member: | yes |\n\nA note.");
}

/// A file that shows texts in a font whose codes are those of Unicode.
fn unicode(content: &str, encoding: &str) -> Vec<u8> {
    let map = "/CIDInit /ProcSet findresource begin begincmap 1 begincodespacerange <0000> <FFFF> endcodespacerange \
        1 beginbfrange <0000> <FFFF> <0000> endbfrange endcmap";
    let map = format!("<< /Length {} >>\nstream\n{map}\nendstream", map.len());
    let font = format!(
        "<< /Type /Font /Subtype /Type0 /BaseFont /Foo /Encoding /{encoding} /ToUnicode 8 0 R /DescendantFonts [7 0 R] >>"
    );
    let bytes = file(content.as_bytes(), "", &["<<>>", &font, &of_collection("Identity", ""), &map]);
    let bytes = String::from_utf8(bytes).unwrap();
    bytes.replace("/Font << /F ", "/Font << /W 6 0 R /F ").into_bytes()
}

/// A text in that font at a place, its glyphs as far apart as they are wide.
fn unicode_at(x: f64, y: f64, text: &str) -> String {
    let codes: String = text.encode_utf16().map(|unit| format!("{unit:04X}")).collect();
    format!("BT /W 10 Tf {x} {y} Td <{codes}> Tj ET\n")
}

#[test]
fn vertical_text_is_read_down_and_from_the_right() {
    let content =
        unicode_at(300.0, 700.0, "縦書きの文章は右から") + &unicode_at(285.0, 700.0, "左へ行が進む。");
    assert_eq!(
        sent(&unicode(&content, "Identity-V"), "name").unwrap().text,
        "縦書きの文章は右から左へ行が進む。"
    );
}

#[test]
fn hebrew_and_arabic_are_read_from_the_right() {
    let reversed = |text: &str| text.chars().rev().collect::<String>();
    let read = |content: &str| sent(&unicode(content, "Identity-H"), "name").unwrap().text;
    // Lines end at the right edge, and words may be placed one by one.
    let content = unicode_at(300.0, 700.0, &reversed("שלום עולם, זהו משפט"))
        + &unicode_at(205.0, 700.0, &reversed("ארוך של"))
        + &unicode_at(380.0, 688.0, &("Windows XP".to_owned() + &reversed("שתי שורות עם ")))
        + &unicode_at(72.0, 600.0, "12")
        + &unicode_at(300.0, 600.0, &reversed("פריט"));
    let text = read(&content);
    assert!(text.starts_with("שלום עולם, זהו משפט ארוך של שתי שורות עם Windows XP"), "{text}");
    assert!(text.ends_with("פריט 12"), "{text}");
    // Forms of letters, a ligature among them, are the letters.
    assert_eq!(read(&unicode_at(300.0, 700.0, "\u{FEE1}\u{FEFC}\u{FEB3}")), "سلام");
    assert_eq!(read(&unicode_at(72.0, 700.0, "The word םולש means peace.")), "The word שלום means peace.");
}

/// Each row of a table has a cell in every column, which a few lines may make many.
#[test]
fn cells_of_tables_are_bounded() {
    let at = |x: usize, y: usize| {
        format!("BT /F 0.5 Tf {x} {}.{} Td (a) Tj ET\n", 830 - y * 7 / 10, 9 - y * 7 % 10)
    };
    let table = |rows: usize| {
        let head: String = (0..60).map(|column| at(5 + 9 * column, 0)).collect();
        let body: String = (1..rows).map(|row| at(5, row) + &at(14, row)).collect();
        sent(&file((head + &body).as_bytes(), "", &[]), "n")
    };
    assert!(table(100).unwrap().text.lines().count() > 90);
    assert!(matches!(table(1100), Err(ReadError::TooLarge { what: "cells of a table", .. })));
}
