use std::io::Write;

use flate2::Compression;
use flate2::write::ZlibEncoder;

use super::*;
use crate::limits::MAX_PART_BYTES;

/// A file of one page: its content, and more objects from number 5.
fn file(content: &[u8], dictionary: &str, more: &[&str]) -> Vec<u8> {
    let mut bytes = b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog /Pages 2 0 R >>\nendobj\n\
        2 0 obj\n<< /Type /Pages /Kids [3 0 R] /Count 1 >>\nendobj\n\
        3 0 obj\n<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents 4 0 R /Resources << /XObject << /X 5 0 R >> \
        /Font << /F << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> /B << /Type /Font /Subtype /Type1 /BaseFont /Helvetica-Bold >> \
        /C << /Type /Font /Subtype /Type1 /BaseFont /Courier >> >> >> >>\nendobj\n"
        .to_vec();
    bytes.extend(format!("4 0 obj\n<< /Length {} {dictionary} >>\nstream\n", content.len()).bytes());
    bytes.extend(content);
    bytes.extend(b"\nendstream\nendobj\n");
    for (index, object) in more.iter().enumerate() {
        bytes.extend(format!("{} 0 obj\n{object}\nendobj\n", index + 5).bytes());
    }
    bytes.extend(b"trailer\n<< /Root 1 0 R >>\n%%EOF\n");
    bytes
}

fn text(content: &str) -> String {
    super::read(&file(content.as_bytes(), "", &[]), "name").unwrap().text
}

fn base85(bytes: &[u8]) -> Vec<u8> {
    let mut text = Vec::new();
    for chunk in bytes.chunks(4) {
        let mut group = [0; 4];
        group[..chunk.len()].copy_from_slice(chunk);
        let group = u32::from_be_bytes(group);
        let digits = [4, 3, 2, 1, 0].map(|power| (group / 85_u32.pow(power) % 85) as u8 + b'!');
        text.extend(&digits[..chunk.len() + 1]);
    }
    text.extend(b"~>");
    text
}

fn deflated(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Lines of text below each other, from a place.
fn lines(x: f64, y: f64, lines: &[&str]) -> String {
    let shown: String = lines.iter().map(|line| format!("({line}) Tj T* ")).collect();
    format!("BT /F 10 Tf 12 TL {x} {y} Td {shown} ET\n")
}

#[test]
fn words_lines_and_paragraphs() {
    let content = lines(
        72.0,
        700.0,
        &["The first line of a text that is long", "enough to go on, hyphen-", "ated once."],
    ) + &lines(72.0, 640.0, &["Another text."]);
    assert_eq!(
        text(&content),
        "The first line of a text that is long enough to go on, hyphenated once.\n\nAnother text."
    );
    // Words are parted by the gaps between them, letters are not.
    assert_eq!(text("BT /F 10 Tf 72 700 Td [(Br) -20 (akes) -300 (work)] TJ ET"), "Brakes work");
}

#[test]
fn sizes_and_weights_make_headings() {
    let body = lines(72.0, 600.0, &["Some text that goes on for a while, so that its size is that of most."]);
    let content = format!("BT /F 20 Tf 72 700 Td (Large) Tj ET BT /B 10 Tf 72 640 Td (2. Bold) Tj ET {body}");
    let expected =
        "# Large\n\n## 2. Bold\n\nSome text that goes on for a while, so that its size is that of most.";
    assert_eq!(text(&content), expected);
}

#[test]
fn columns_are_read_one_after_the_other_and_tables_by_rows() {
    let left = [
        "The left column has some text of",
        "several lines that fill it well",
        "enough to be told from a table,",
        "and it goes on to the",
    ];
    let right = [
        "right column, which has as many",
        "lines of the same kind of text,",
        "so that both are found and read",
        "one after the other.",
    ];
    let content = lines(50.0, 700.0, &left) + &lines(300.0, 700.0, &right);
    assert_eq!(text(&content), [left.join(" "), right.join(" ")].join(" "));
    let content = lines(50.0, 700.0, &["Part", "Stem", "Post"]) + &lines(150.0, 700.0, &["Bolt", "M5", "M6"]);
    assert_eq!(text(&content), "| Part | Bolt |\n| --- | --- |\n| Stem | M5 |\n| Post | M6 |");
}

#[test]
fn programs_keep_their_lines() {
    let content = "BT /C 10 Tf 12 TL 72 700 Td (if a:) Tj T* 24 0 Td (b\\(\\)) Tj ET";
    assert_eq!(text(content), "```\nif a:\n    b()\n```");
}

#[test]
fn artifacts_are_dropped_and_replaced_text_is_taken() {
    let content = "BT /F 10 Tf 72 700 Td /Artifact BMC (no) Tj EMC /Span << /ActualText (yes) >> BDC (n) Tj (o) Tj EMC ET";
    assert_eq!(text(content), "yes");
}

#[test]
fn text_turned_on_its_side_stands_apart() {
    let content = "BT /F 10 Tf 0 1 -1 0 40 300 Tm (arXiv stamp) Tj ET".to_owned()
        + &lines(72.0, 700.0, &["The text of the page itself."]);
    assert_eq!(text(&content), "The text of the page itself.\n\narXiv stamp");
}

#[test]
fn forms_that_draw_themselves_end() {
    let form = "<< /Type /XObject /Subtype /Form /BBox [0 0 1 1] /Length 40 /Resources << /XObject << /X 5 0 R >> >> >>\nstream\n/X Do /X Do BT /F 10 Tf (a) Tj ET             \nendstream";
    let bytes = file(b"BT /F 10 Tf 72 700 Td (text) Tj ET /X Do", "", &[form]);
    assert_eq!(super::read(&bytes, "name").unwrap().text, "text");
}

#[test]
fn streams_that_inflate_beyond_the_limit_are_refused() {
    let bomb = deflated(&vec![b' '; MAX_PART_BYTES + 1]);
    let is_refused = |bytes: &[u8]| matches!(super::read(bytes, "name"), Err(ReadError::TooLarge { .. }));
    assert!(is_refused(&file(&bomb, "/Filter /FlateDecode", &[])));
    assert!(is_refused(&file(&deflated(&bomb), "/Filter [/FlateDecode /FlateDecode]", &[])));
    // Two filters whose names are hidden from a search.
    assert!(is_refused(&file(&deflated(&bomb), "/Filter [/Fl#61teDecode /Fl#61teDecode]", &[])));
    assert!(is_refused(&file(&base85(&bomb), "/Filter [/ASCII85Decode /FlateDecode]", &[])));
    // Its expansion is counted, not estimated: comments that deflate badly make it longer than an estimate would allow.
    let comments: String = (0..2000).map(|n| format!("% {}\n", n * 7919 % 10007)).collect();
    let small = base85(&deflated((comments + "BT /F 10 Tf 72 700 Td (text) Tj ET").as_bytes()));
    assert!(small.len() * 2600 > MAX_PART_BYTES);
    let dictionary = "/Filter [/ASCII85Decode /FlateDecode]";
    assert_eq!(super::read(&file(&small, dictionary, &[]), "name").unwrap().text, "text");
    let small = deflated(b"BT /F 10 Tf 72 700 Td (text) Tj ET");
    assert_eq!(super::read(&file(&small, "/Filter /FlateDecode", &[]), "name").unwrap().text, "text");
}

#[test]
fn titles_that_programs_put_in_are_not_taken() {
    assert!(strings::is_title("On Tyres"));
    for title in ["untitled", "Microsoft Word - tyres.doc", "tyres.indd", "", "1234"] {
        assert!(!strings::is_title(title), "{title}");
    }
}
