use std::io::Write;

use zip::write::SimpleFileOptions;

use super::*;
use crate::limits::{MAX_CELLS, MAX_PART_BYTES, MAX_TEXT_BYTES};

fn archive(parts: &[(&str, &str)]) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content) in parts {
        zip.start_file(*name, SimpleFileOptions::default()).unwrap();
        zip.write_all(content.as_bytes()).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

fn read(bytes: &[u8], stem: &str) -> Result<Document, ReadError> {
    super::read(bytes, stem, Origin::Own)
}

fn document(body: &str) -> Vec<u8> {
    archive(&[("word/document.xml", &format!("<w:document><w:body>{body}</w:body></w:document>"))])
}

fn text(body: &str) -> String {
    read(&document(body), "name").unwrap().text
}

#[test]
fn deleted_text_instructions_and_fallbacks_are_dropped() {
    let body = "<w:p><w:r><w:t>a</w:t></w:r><w:del><w:r><w:t>no</w:t></w:r></w:del><w:instrText>no</w:instrText>\
        <mc:Fallback><w:r><w:t>no</w:t></w:r></mc:Fallback><w:r><w:t xml:space='preserve'> b</w:t><w:br/><w:t>c &amp; &#100;</w:t></w:r></w:p>";
    assert_eq!(text(body), "a b\nc & d");
}

#[test]
fn headings_go_by_outline_level_and_by_the_names_of_styles() {
    let styles = "<w:styles><w:style w:styleId='berschrift1'><w:name w:val='heading 1'/></w:style>\
        <w:style w:styleId='Own'><w:name w:val='Own'/><w:basedOn w:val='berschrift1'/></w:style>\
        <w:style w:styleId='Loop'><w:name w:val='Loop'/><w:basedOn w:val='Loop'/></w:style></w:styles>";
    let p = |style: &str, text: &str| {
        format!("<w:p><w:pPr><w:pStyle w:val='{style}'/></w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>")
    };
    let body = p("berschrift1", "A")
        + &p("Own", "B")
        + &p("Loop", "c")
        + &p("Heading3", "D")
        + "<w:p><w:pPr><w:outlineLvl w:val='1'/></w:pPr><w:r><w:t>E</w:t></w:r></w:p>";
    let document = format!("<w:document><w:body>{body}</w:body></w:document>");
    let read =
        read(&archive(&[("word/document.xml", &document), ("word/styles.xml", styles)]), "name").unwrap();
    assert_eq!(read.text, "# A\n\n# B\n\nc\n\n### D\n\n## E");
    assert_eq!(read.title, "A");
}

#[test]
fn nested_tables_and_footnotes() {
    let cell = |content: &str| format!("<w:tc><w:p><w:r><w:t>{content}</w:t></w:r></w:p></w:tc>");
    let inner = format!("<w:tbl><w:tr>{}{}</w:tr></w:tbl>", cell("x"), cell("y"));
    let body = format!(
        "<w:tbl><w:tr>{}{}</w:tr><w:tr><w:tc>{inner}</w:tc>{}</w:tr></w:tbl>",
        cell("a"),
        cell("b"),
        cell("c")
    );
    assert_eq!(text(&body), "| a | b |\n| --- | --- |\n| x y | c |");
    let body =
        "<w:document><w:p><w:r><w:t>text</w:t><w:footnoteReference w:id='2'/></w:r></w:p></w:document>";
    let notes = "<w:footnotes><w:footnote w:type='separator' w:id='0'><w:p/></w:footnote>\
        <w:footnote w:id='2'><w:p><w:r><w:t>note</w:t></w:r></w:p></w:footnote></w:footnotes>";
    let read = read(&archive(&[("word/document.xml", body), ("word/footnotes.xml", notes)]), "name").unwrap();
    assert_eq!(read.text, "text[2]\n\n[2] note");
}

#[test]
fn entities_cannot_be_declared_and_unknown_ones_fail() {
    let bomb = "<!DOCTYPE d [<!ENTITY a 'aaaa'><!ENTITY b '&a;&a;'>]><w:document><w:p><w:r><w:t>&b;</w:t></w:r></w:p></w:document>";
    let error = read(&archive(&[("word/document.xml", bomb)]), "name").unwrap_err().to_string();
    assert!(error.contains("document type"), "{error}");
    let error = read(&document("<w:p><w:r><w:t>&b;</w:t></w:r></w:p>"), "name").unwrap_err().to_string();
    assert!(error.contains("entity"), "{error}");
}

#[test]
fn a_part_that_inflates_beyond_the_limit_is_refused() {
    let body = format!("<w:p><w:r><w:t>a</w:t></w:r></w:p>{}", "<w:p></w:p>".repeat(MAX_PART_BYTES / 11 + 1));
    assert!(matches!(read(&document(&body), "name"), Err(ReadError::TooLarge { .. })));
    // One text that never ends.
    let body = format!("<w:p><w:r><w:t>{}", "a".repeat(MAX_PART_BYTES + 1));
    assert!(read(&document(&body), "name").is_err());
}

/// Text of an element that never ends counts before it is written.
#[test]
fn text_in_one_element_is_bounded() {
    let text = "a".repeat(MAX_TEXT_BYTES / 4);
    let (run, paragraph) = (format!("<w:t>{text}</w:t>"), format!("<w:p><w:t>{text}</w:t></w:p>"));
    let style = r#"<w:pPr><w:pStyle w:val="HTMLPreformatted"/></w:pPr>"#;
    let code = format!("<w:p>{style}<w:t>{text}</w:t></w:p>");
    for (begin, part) in
        [("<w:p>", &run), ("<w:p><w:t>", &text), ("<w:tbl><w:tr><w:tc>", &paragraph), ("", &code)]
    {
        let error = read(&document(&format!("{begin}{}", part.repeat(6))), "n").unwrap_err();
        assert!(matches!(error, ReadError::TooLarge { what: "text", .. }), "{error}");
    }
    // Elements that end leave nothing open.
    let cells = format!("<w:tbl><w:tr><w:tc>{paragraph}</w:tc></w:tr></w:tbl>").repeat(3);
    assert!(read(&document(&format!("{cells}<w:p>{run}</w:p>")), "n").is_err(), "the whole is too long");
    assert!(read(&document(&cells), "n").is_ok());
}

#[test]
fn other_archives_and_deep_documents() {
    assert!(matches!(read(&archive(&[("xl/workbook.xml", "")]), "n"), Err(ReadError::Unsupported { .. })));
    assert!(matches!(read(&document(""), "n"), Err(ReadError::NoText { .. })));
    assert!(read(&document("<w:p>"), "n").is_err());
    let deep = format!(
        "{}<w:p><w:r><w:t>x</w:t></w:r></w:p>{}",
        "<w:tbl><w:tr><w:tc>".repeat(9999),
        "</w:tc></w:tr></w:tbl>".repeat(9999)
    );
    assert_eq!(text(&deep), "x");
    let deep = format!("{}<w:t>x</w:t>{}", "<w:p><w:r>".repeat(9999), "</w:r></w:p>".repeat(9999));
    assert_eq!(text(&deep), "x");
}

#[test]
fn a_damaged_sum_is_an_error() {
    let mut bytes =
        archive(&[("word/document.xml", "<w:document><w:p><w:r><w:t>plain</w:t></w:r></w:p></w:document>")]);
    let sum = bytes.iter().position(|byte| *byte == b'P').unwrap() + 14;
    // The sum stands in the entry and in the directory.
    let directory = bytes.windows(4).position(|w| w == b"PK\x01\x02").unwrap() + 16;
    bytes[sum] ^= 1;
    bytes[directory] ^= 1;
    assert!(matches!(read(&bytes, "n"), Err(ReadError::Malformed { .. })));
}

#[test]
fn a_table_of_empty_cells_or_rows_is_bounded() {
    for empty in ["<w:tc/>", "<w:tr/>"] {
        let table = format!("<w:p><w:t>a</w:t></w:p><w:tbl><w:tr>{}</w:tr></w:tbl>", empty.repeat(MAX_CELLS));
        let error = read(&document(&table), "n").unwrap_err().to_string();
        assert!(error.contains("cells of a table"), "{error}");
    }
    let tables = "<w:tbl><w:tr><w:tc/></w:tr></w:tbl>".repeat(MAX_CELLS / 2 + 1);
    assert_eq!(text(&format!("{tables}<w:p><w:t>a</w:t></w:p>")), "a");
}

#[test]
fn a_table_without_end_takes_no_other_part_in() {
    let body = "<w:document><w:tbl><w:tr><w:tc><w:p><w:t>cell</w:t></w:p>";
    let notes = "<w:footnotes><w:footnote w:id='2'><w:p><w:t>note</w:t></w:p></w:footnote></w:footnotes>";
    let parts = [("word/document.xml", body), ("word/footnotes.xml", notes)];
    assert_eq!(read(&archive(&parts), "name").unwrap().text, "cell\n\n[2] note");
}

#[test]
fn a_value_beyond_all_use_is_none() {
    let style = |spaces: usize| {
        let styles = format!(
            "<w:styles><w:style w:styleId='a'><w:name w:val='heading{}1'/></w:style></w:styles>",
            " ".repeat(spaces)
        );
        let body = "<w:document><w:p><w:pPr><w:pStyle w:val='a'/></w:pPr><w:t>text</w:t></w:p></w:document>";
        let parts = [("word/document.xml", body), ("word/styles.xml", styles.as_str())];
        read(&archive(&parts), "name").unwrap().text
    };
    assert_eq!((style(1), style(2000)), ("# text".to_owned(), "text".to_owned()));
}

#[test]
fn a_document_that_takes_too_long_is_refused() {
    let body = document("<w:p><w:t>a</w:t></w:p>");
    let error = read_within(&body, "name", Duration::ZERO).unwrap_err().to_string();
    assert!(error.contains("time beyond the limit of 0 s"), "{error}");
    assert!(Origin::Sent.time() < Origin::Own.time(), "files of others wait for one that was sent");
}

#[test]
fn styles_and_lists_are_bounded() {
    let body = "<w:document><w:body><w:p><w:r><w:t>a</w:t></w:r></w:p></w:body></w:document>";
    let many = |of: &dyn Fn(usize) -> String| (0..=crate::limits::MAX_STYLES).map(of).collect::<String>();
    let styles =
        format!("<w:styles>{}</w:styles>", many(&|i| format!("<w:style w:styleId='{i}'></w:style>")));
    let lists = many(&|i| format!("<w:num w:numId='{i}'><w:abstractNumId w:val='1'/></w:num>"));
    let formats = many(&|i| {
        format!(
            "<w:abstractNum w:abstractNumId='{i}'><w:lvl w:ilvl='0'><w:numFmt w:val='decimal'/></w:lvl></w:abstractNum>"
        )
    });
    for (name, part) in [("styles", &styles), ("numbering", &lists), ("numbering", &formats)] {
        let name = format!("word/{name}.xml");
        let read = read(&archive(&[("word/document.xml", body), (&name, part)]), "n");
        assert!(matches!(read, Err(ReadError::TooLarge { what: "styles", .. })), "{read:?}");
    }
}

#[test]
fn relations_name_the_parts() {
    let office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships";
    let relations = |relations: &[(&str, &str)]| {
        let relation = |(kind, target): &(&str, &str)| {
            format!("<Relationship Id='r' Type='{office}/{kind}' Target='{target}'/>")
        };
        format!("<Relationships>{}</Relationships>", relations.iter().map(relation).collect::<String>())
    };
    let root =
        relations(&[("officeDocument", "/word/document2.xml"), ("metadata/core-properties", "core.psmdcp")]);
    let main = relations(&[
        ("styles", "styles2.xml"),
        ("numbering", "/word/numbering2.xml"),
        ("footnotes", "./sub/../footnotes2.xml"),
        ("endnotes", "missing.xml"),
        ("hyperlink", "https://example.com/"),
    ]);
    let p = |properties: &str, text: &str| format!("<w:p><w:pPr>{properties}</w:pPr><w:t>{text}</w:t></w:p>");
    let body = p("<w:pStyle w:val='A'/>", "Head") + &p("<w:numPr><w:numId w:val='7'/></w:numPr>", "item");
    let document = format!("<w:document><w:body>{body}</w:body></w:document>");
    let parts = [
        ("_rels/.rels", root.as_str()),
        ("core.psmdcp", "<coreProperties><dc:title>Title</dc:title></coreProperties>"),
        ("word/document2.xml", &document),
        ("word/_rels/document2.xml.rels", &main),
        (
            "word/styles2.xml",
            "<w:styles><w:style w:styleId='A'><w:name w:val='heading 2'/></w:style></w:styles>",
        ),
        (
            "word/numbering2.xml",
            "<w:numbering><w:abstractNum w:abstractNumId='1'><w:lvl w:ilvl='0'><w:numFmt w:val='decimal'/></w:lvl>\
             </w:abstractNum><w:num w:numId='7'><w:abstractNumId w:val='1'/></w:num></w:numbering>",
        ),
        (
            "word/footnotes2.xml",
            "<w:footnotes><w:footnote w:id='2'><w:p><w:t>foot</w:t></w:p></w:footnote></w:footnotes>",
        ),
        (
            "word/endnotes.xml",
            "<w:endnotes><w:endnote w:id='3'><w:p><w:t>end</w:t></w:p></w:endnote></w:endnotes>",
        ),
    ];
    let document = read(&archive(&parts), "name").unwrap();
    assert_eq!(document.title, "Title");
    assert_eq!(document.text, "## Head\n\n1. item\n\n[2] foot\n\n[3] end");
    // A workbook has a main part too.
    let root = relations(&[("officeDocument", "xl/workbook.xml")]);
    let workbook = archive(&[("_rels/.rels", &root), ("xl/workbook.xml", "<workbook><sheets/></workbook>")]);
    assert!(matches!(read(&workbook, "n"), Err(ReadError::Unsupported { .. })));
}

#[test]
fn merged_cells_keep_the_others_in_their_columns() {
    let cell = |properties: &str, text: &str| {
        format!("<w:tc><w:tcPr>{properties}</w:tcPr><w:p><w:r><w:t>{text}</w:t></w:r></w:p></w:tc>")
    };
    let table = |rows: &[String]| {
        let rows: String = rows.iter().map(|row| format!("<w:tr>{row}</w:tr>")).collect();
        text(&format!("<w:tbl>{rows}</w:tbl>"))
    };
    let (restart, goes_on) = ("<w:vMerge w:val='restart'/>", "<w:vMerge/>");
    let rows = [
        cell(restart, "Region") + &cell("<w:gridSpan w:val='2'/>", "2023") + &cell("", "Total"),
        cell("<w:vMerge w:val='continue'/>", "") + &cell("", "Q1") + &cell("", "Q2") + &cell("", ""),
        cell(restart, "North") + &cell("", "1") + &cell("", "2") + &cell("", "3"),
        cell(goes_on, "") + &cell("", "4") + &cell("", "5") + &cell("", "9"),
        format!("<w:trPr><w:gridBefore w:val='3'/></w:trPr>{}", cell("", "12")),
    ];
    assert_eq!(
        table(&rows),
        "| Region | 2023 |  | Total |\n| --- | --- | --- | --- |\n| Region | Q1 | Q2 |  |\n\
         | North | 1 | 2 | 3 |\n| North | 4 | 5 | 9 |\n|  |  |  | 12 |"
    );
    // Properties that a change was made of are not those of the cell.
    let changed = "<w:tcPrChange><w:tcPr><w:gridSpan w:val='2'/></w:tcPr></w:tcPrChange>";
    let rows = [cell("", "a") + &cell("", "b"), cell(changed, "c") + &cell("", "d")];
    assert_eq!(table(&rows), "| a | b |\n| --- | --- |\n| c | d |");
}

#[test]
fn exponents_are_told_from_the_numbers_before_them() {
    let run = |text: &str| format!("<w:r><w:t>{text}</w:t></w:r>");
    let raised =
        |text: &str| format!("<w:r><w:rPr><w:vertAlign w:val='superscript'/></w:rPr><w:t>{text}</w:t></w:r>");
    let runs = [
        run("10"),
        raised("−"),
        raised("1"),
        raised("2"),
        run(" the 1"),
        raised("st"),
        run(" of 10"),
        run("6"),
    ];
    // The mark of the paragraph has properties of its own.
    let mark = "<w:pPr><w:rPr><w:vertAlign w:val='superscript'/></w:rPr></w:pPr>";
    for mark in ["", mark] {
        assert_eq!(text(&format!("<w:p>{mark}{}</w:p>", runs.concat())), "10^−12 the 1st of 106");
    }
}

/// The text of paragraphs, each with a list and a depth, or with a style.
fn numbered(paragraphs: &[(&str, usize, &str)]) -> String {
    let level = |depth: usize, format: &str, label: &str, more: &str| {
        format!(
            "<w:lvl w:ilvl='{depth}'><w:start w:val='1'/><w:numFmt w:val='{format}'/><w:lvlText w:val='{label}'/>{more}</w:lvl>"
        )
    };
    let definition = |id: usize, levels: &[String]| {
        format!("<w:abstractNum w:abstractNumId='{id}'>{}</w:abstractNum>", levels.concat())
    };
    let list = |id: &str, definition: usize, more: &str| {
        format!("<w:num w:numId='{id}'><w:abstractNumId w:val='{definition}'/>{more}</w:num>")
    };
    let restart = "<w:lvlOverride w:ilvl='0'><w:startOverride w:val='3'/></w:lvlOverride>";
    let numbering = [
        definition(0, &[level(0, "decimal", "%1", ""), level(1, "decimal", "%1.%2", "")]),
        definition(
            1,
            &[
                level(0, "lowerLetter", "(%1)", ""),
                level(1, "lowerRoman", "%2.", ""),
                level(2, "upperRoman", "%3)", "<w:lvlRestart w:val='0'/>"),
                level(3, "decimalZero", "%1-%4", "<w:isLgl/>"),
                level(4, "bullet", "•", ""),
                level(5, "none", "", ""),
            ],
        ),
        definition(
            2,
            &[level(0, "decimal", "%1.", "").replace("<w:start w:val='1'/>", "<w:start w:val='5'/>")],
        ),
        list("heads", 0, ""),
        list("letters", 1, ""),
        list("first", 2, ""),
        list("second", 2, ""),
        list("anew", 2, restart),
    ];
    let style = |id: &str, name: &str, more: &str| {
        format!("<w:style w:styleId='{id}'><w:name w:val='{name}'/>{more}</w:style>")
    };
    let styles = [
        style("H1", "heading 1", "<w:pPr><w:numPr><w:numId w:val='heads'/></w:numPr></w:pPr>"),
        style(
            "H2",
            "heading 2",
            "<w:basedOn w:val='H1'/><w:pPr><w:numPr><w:ilvl w:val='1'/></w:numPr></w:pPr>",
        ),
    ];
    let paragraph = |(list, depth, text): &(&str, usize, &str)| {
        let properties = match *list {
            "H1" | "H2" => format!("<w:pStyle w:val='{list}'/>"),
            _ => format!("<w:numPr><w:ilvl w:val='{depth}'/><w:numId w:val='{list}'/></w:numPr>"),
        };
        format!("<w:p><w:pPr>{properties}</w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>")
    };
    let body: String = paragraphs.iter().map(paragraph).collect();
    let parts = [
        ("word/document.xml", format!("<w:document><w:body>{body}</w:body></w:document>")),
        ("word/styles.xml", format!("<w:styles>{}</w:styles>", styles.concat())),
        ("word/numbering.xml", format!("<w:numbering>{}</w:numbering>", numbering.concat())),
    ];
    read(&archive(&parts.each_ref().map(|(name, part)| (*name, part.as_str()))), "name").unwrap().text
}

#[test]
fn headings_have_the_numbers_of_their_styles() {
    let paragraphs = [
        ("H1", 0, "Scope"),
        ("H1", 0, "Term"),
        ("H2", 0, "Begin"),
        ("H2", 0, "End"),
        ("H1", 0, ""),
        ("H2", 0, "Law"),
    ];
    assert_eq!(numbered(&paragraphs), "# 1 Scope\n\n# 2 Term\n\n## 2.1 Begin\n\n## 2.2 End\n\n## 3.1 Law");
}

#[test]
fn items_have_the_labels_of_their_levels() {
    let items = [0, 1, 1, 2, 0, 2, 3, 4, 5].map(|depth| ("letters", depth, "x"));
    assert_eq!(
        numbered(&items),
        "- (a) x\n  - i. x\n  - ii. x\n    - I) x\n- (b) x\n    - II) x\n      - 2-1 x\n        - x\n          - x"
    );
    let many: Vec<_> = std::iter::repeat_n(("letters", 0, "x"), 28).collect();
    assert!(numbered(&many).ends_with("- (z) x\n- (aa) x\n- (bb) x"));
}

#[test]
fn lists_of_one_definition_go_on_counting_unless_they_begin_anew() {
    let items =
        [("first", 0, "a"), ("second", 0, "b"), ("anew", 0, "c"), ("anew", 0, "d"), ("first", 0, "e")];
    assert_eq!(numbered(&items), "5. a\n6. b\n3. c\n4. d\n5. e");
}

#[test]
fn elements_inside_elements_are_bounded() {
    use crate::limits::MAX_XML_DEPTH;
    let nested = |depth: usize| {
        let part = format!("<w:document>{}x{}</w:document>", "<w:p>".repeat(depth), "</w:p>".repeat(depth));
        read(&archive(&[("word/document.xml", &part)]), "n")
    };
    assert!(matches!(
        nested(MAX_XML_DEPTH),
        Err(ReadError::TooLarge { what: "elements inside elements", .. })
    ));
    assert!(!matches!(nested(MAX_XML_DEPTH - 1), Err(ReadError::TooLarge { .. })));
}
