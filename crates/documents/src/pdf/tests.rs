use std::io::Write;
use std::sync::mpsc::Sender;

use flate2::Compression;
use flate2::write::ZlibEncoder;

use super::*;
use crate::limits::MAX_PART_BYTES;

mod shown;

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

fn sent(bytes: &[u8], stem: &str) -> Result<Document, ReadError> {
    super::read(bytes, stem, Origin::Sent, ())
}

fn text(content: &str) -> String {
    sent(&file(content.as_bytes(), "", &[]), "name").unwrap().text
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
    assert_eq!(sent(&bytes, "name").unwrap().text, "text");
}

#[test]
fn streams_that_inflate_beyond_the_limit_are_refused() {
    let bomb = deflated(&vec![b' '; MAX_PART_BYTES + 1]);
    let is_refused = |bytes: &[u8]| matches!(sent(bytes, "name"), Err(ReadError::TooLarge { .. }));
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
    assert_eq!(sent(&file(&small, dictionary, &[]), "name").unwrap().text, "text");
    let small = deflated(b"BT /F 10 Tf 72 700 Td (text) Tj ET");
    assert_eq!(sent(&file(&small, "/Filter /FlateDecode", &[]), "name").unwrap().text, "text");
}

#[test]
fn titles_that_programs_put_in_are_not_taken() {
    assert!(strings::is_title("On Tyres"));
    for title in ["untitled", "Microsoft Word - tyres.doc", "tyres.indd", "", "1234"] {
        assert!(!strings::is_title(title), "{title}");
    }
}

/// A file of one page that shows a word, and a stream beside.
fn beside(dictionary: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = file(b"BT /F 10 Tf 72 700 Td (text) Tj ET", "", &[]);
    add(&mut bytes, dictionary, data);
    bytes
}

fn add(bytes: &mut Vec<u8>, dictionary: &str, data: &[u8]) {
    bytes.extend(format!("9 0 obj\n<< /Length {} {dictionary} >>\nstream\n", data.len()).bytes());
    bytes.extend([data, b"\nendstream\nendobj\n"].concat());
}

fn is_too_large(bytes: &[u8]) -> bool {
    matches!(sent(bytes, "name"), Err(ReadError::TooLarge { .. }))
}

/// Codes of LZW, each for a byte more than the one before.
fn growing_lzw() -> Vec<u8> {
    let (mut bytes, mut bits, mut held) = (Vec::new(), 0_u32, 0);
    for code in std::iter::once(0).chain(258..4095_u32) {
        let width = (u32::BITS - (code.max(258) + 1).leading_zeros()).clamp(9, 12);
        bits = bits << width | code;
        held += width;
        while held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
        }
    }
    bytes
}

#[test]
fn a_row_that_a_predictor_would_allocate_is_bounded() {
    let content = b"BT /F 10 Tf 72 700 Td (text) Tj ET";
    let data = deflated(&[&[0], &content[..]].concat());
    let read =
        |parameters: &str| sent(&file(&data, &format!("/Filter /FlateDecode {parameters}"), &[]), "name");
    let row = format!("<< /Predictor 12 /Columns {} >>", content.len());
    assert_eq!(read(&format!("/DecodeParms {row}")).unwrap().text, "text");
    for parameters in [
        "/DecodeParms << /Predictor 12 /Colors 5 /BitsPerComponent 8 /Columns 100000000000000000 >>",
        "/DecodeParms << /Predictor 12 /Col#75mns 100000000000000000 >>",
        "/DecodeParms << /Predictor 12 /Columns%\n100000000000000000.0 >>",
        "/DecodeParms << /Predictor 12 /Columns 9 0 R >>",
        "/DecodeParms << /Predictor 12 /Columns 1000000 /Colors 15 /BitsPerComponent 16 >>",
        "/DP << /Predictor 12 /Columns 1000000 /Colors 15 /BitsPerComponent 16 >>",
    ] {
        assert!(matches!(read(parameters), Err(ReadError::TooLarge { .. })), "{parameters}");
    }
    let parameters = "/Filter [/FlateDecode] /DecodeParms [<< /Predictor 12 /Columns 1000000 /Colors 15 /BitsPerComponent 16 >>]";
    assert!(is_too_large(&file(&data, parameters, &[])));
}

#[test]
fn parameters_in_another_object_are_not_followed() {
    let row = "<< /Predictor 12 /Columns 1000000 /Colors 15 /BitsPerComponent 16 >>";
    for parameters in ["/DecodeParms 5 0 R", "/Decode#50arms%\n5 0 R"] {
        let data = deflated(b"BT /F 10 Tf 72 700 Td (text) Tj ET");
        let bytes = file(&data, &format!("/Filter /FlateDecode {parameters}"), &[row]);
        assert_eq!(sent(&bytes, "name").unwrap().text, "text");
    }
    let bytes = beside("/Filter 5 0 R", &deflated(b"a"));
    assert!(matches!(sent(&bytes, "name"), Err(ReadError::Unsupported { .. })));
}

#[test]
fn streams_of_objects_are_bounded_under_all_names_of_filters() {
    let bomb = deflated(&deflated(&vec![0; MAX_PART_BYTES + 1]));
    for filters in [
        "[/Fl /Fl]",
        "[/Fl/Flate#44ecode]",
        "[/Fl#61teDecode /Fl#61teDecode]",
        "[/Fl %endstream\n/Fl]",
        "[/Fl /Fl] /X /Image",
        "[/Fl /Fl] /Subtype /Image",
    ] {
        assert!(
            is_too_large(&beside(&format!("/Type /ObjStm /N 1 /First 4 /Filter {filters}"), &bomb)),
            "{filters}"
        );
    }
    let runs = [129, 0].repeat(MAX_PART_BYTES / 128 + 1);
    for (filter, data) in [
        ("/LZWDecode", growing_lzw()),
        ("/LZW", growing_lzw()),
        ("[/A85 /L#5aW]", base85(&growing_lzw())),
        ("/RunLengthDecode", runs.clone()),
        ("/RL", runs),
    ] {
        assert!(is_too_large(&beside(&format!("/Type /XRef /Filter {filter}"), &data)), "{filter}");
    }
    assert_eq!(sent(&beside("/Filter [/A85 /Fl]", &base85(&deflated(b"a"))), "name").unwrap().text, "text");
}

#[test]
fn pictures_are_emptied_and_all_other_streams_are_counted_together() {
    let data = deflated(&vec![0; MAX_PART_BYTES]);
    let several = |dictionary: &str| {
        let mut bytes = beside(dictionary, &data);
        (0..4).for_each(|_| add(&mut bytes, dictionary, &data));
        bytes
    };
    assert!(is_too_large(&several("/Type /ObjStm /X /Image /Filter /FlateDecode")));
    // Entries and places of objects take more memory than bytes.
    let entries = deflated(&vec![0; MAX_PART_BYTES / 4]);
    assert!(!is_too_large(&beside("/Filter /FlateDecode", &entries)));
    assert!(is_too_large(&beside("/W [0 1 0] /Filter /FlateDecode", &entries)));
    assert!(is_too_large(&beside("/First 4 /Filter /FlateDecode", &data)));
    let mut bytes = several("/Subtype /Image /Filter /FlateDecode");
    assert_eq!(sent(&bytes, "name").unwrap().text, "text");
    guard::check_streams(&mut bytes, Origin::Sent, &AtomicBool::new(false)).unwrap();
    let start = bytes.windows(12).rposition(|window| window == b">>\nstream\n\x80\x80").unwrap() + 10;
    let (lzw, runs) = (expand::lzw(&bytes[start..], 1000), expand::run_length(&bytes[start..], 1000));
    assert_eq!((inflate::deflated(&bytes[start..], 1000), lzw, runs), (128, 0, 0));
}

#[test]
fn errors_in_deflated_data_do_not_hide_what_lies_behind() {
    let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(&vec![b' '; MAX_PART_BYTES + 1]).unwrap();
    let bomb = encoder.finish().unwrap();
    // A stored block whose length is not told twice, and a distance that leads before the data.
    for start in [&[0, 1, 0, 0, 0, b' '][..], &[0x02, 0x62, 0, 0, 0, 0, 0xFF, 0xFF]] {
        assert!(is_too_large(&file(&[start, &bomb].concat(), "/Filter /FlateDecode", &[])), "{start:?}");
    }
}

#[test]
fn deflated_data_are_counted_as_they_are_inflated() {
    let mixed: Vec<u8> =
        (0..70_000_u32).flat_map(|n| (n.wrapping_mul(n) % 8191).to_string().into_bytes()).collect();
    for level in 0..=9 {
        for length in [0, 1, 100, 65_536, mixed.len()] {
            let mut encoder = ZlibEncoder::new(Vec::new(), Compression::new(level));
            encoder.write_all(&mixed[..length]).unwrap();
            let data = encoder.finish().unwrap();
            assert_eq!(inflate::deflated(&data, usize::MAX), length, "{level}");
            assert_eq!(inflate::deflated(&data[2..], usize::MAX), length, "{level}");
        }
    }
}

#[test]
fn parts_of_contents_are_counted_at_each_use() {
    let content = format!("BT /F 10 Tf 72 700 Td (text) Tj ET{}", " ".repeat(3 << 20));
    let contents = |parts: &str| {
        let bytes = String::from_utf8(file(content.as_bytes(), "", &[])).unwrap();
        bytes.replace("/Contents 4 0 R", &format!("/Contents [{parts}]")).into_bytes()
    };
    assert_eq!(sent(&contents("4 0 R"), "name").unwrap().text, "text");
    assert!(is_too_large(&contents(&"4 0 R ".repeat(6))));
    // A part that refers to nothing ends no parts.
    assert!(is_too_large(&contents(&format!("99 0 R {}", "4 0 R ".repeat(6)))));
}

#[test]
fn a_file_whose_encryption_hides_its_objects_is_refused_with_the_remedy() {
    for dictionary in ["/Type /ObjStm", "/W [1 2 1]"] {
        let mut bytes = beside(dictionary, b"a");
        bytes.extend(b"trailer\n<< /Root 1 0 R /Encrypt 8 0 R >>\n");
        let error = sent(&bytes, "name").unwrap_err().to_string();
        assert!(error.contains("qpdf --decrypt"), "{error}");
        let own = super::read(&bytes, "name", Origin::Own, ());
        assert!(
            !matches!(own, Err(ReadError::Unsupported { remedy, .. }) if remedy.contains("qpdf")),
            "{own:?}"
        );
    }
}

/// One operation may show as many texts as it has bytes.
#[test]
fn texts_that_stand_apart_are_bounded_within_an_operation() {
    let letters = |count| format!("BT /F 0.01 Tf 0.5 Tc 0 700 Td ({}) Tj ET", "a".repeat(count));
    assert!(is_too_large(&file(letters(crate::limits::MAX_PAGE_SPANS + 1).as_bytes(), "", &[])));
    let replaced =
        format!("/Span << /ActualText () >> BDC {} EMC", letters(crate::limits::MAX_PAGE_SPANS + 1));
    assert!(is_too_large(&file(replaced.as_bytes(), "", &[])));
    assert!(sent(&file(letters(100).as_bytes(), "", &[]), "name").is_ok());
}

#[test]
fn widths_of_fonts_are_bounded() {
    let read = |font: &str, more: &[&str]| {
        let more = [&["<<>>", font], more].concat();
        let bytes = file(b"BT /W 10 Tf 72 700 Td (text) Tj ET", "", &more);
        let fonts = String::from_utf8(bytes).unwrap().replace("/Font << /F ", "/Font << /W 6 0 R /F ");
        sent(fonts.as_bytes(), "name")
    };
    let is_refused = |font: &str, more: &[&str]| matches!(read(font, more), Err(ReadError::TooLarge { what, .. }) if what.contains("widths"));
    let simple = |codes: &str| {
        format!("<< /Type /Font /Subtype /TrueType /BaseFont /Helvetica {codes} /Widths [500] >>")
    };
    assert_eq!(read(&simple("/FirstChar 32 /LastChar 32"), &[]).unwrap().text, "text");
    assert!(is_refused(&simple("/FirstChar 2000000000 /LastChar 2000000000"), &[]));
    assert!(is_refused(&simple("/FirstChar 7 0 R /LastChar 7 0 R"), &["2000000000"]));
    let font =
        "<< /Type /Font /Subtype /Type0 /BaseFont /Foo /Encoding /Identity-H /DescendantFonts [7 0 R] >>";
    let composite = |widths: &str, more: &str| {
        let system = "/CIDSystemInfo << /Registry (Adobe) /Ordering (Identity) /Supplement 0 >>";
        let descendant = format!("<< /Type /Font /Subtype /CIDFontType2 /BaseFont /Foo {system} {widths} >>");
        is_refused(font, &[&descendant, more])
    };
    assert!(!composite("/W [0 [500 600] 2 65000 500] /W2 [0 [1 2 3] 1 65000 1 2 3]", "0"));
    assert!(composite("/W [0 2147483647 500]", "0"));
    assert!(composite("/W [0 [500] 0 8 0 R 500]", "2147483647"));
    assert!(composite("/W2 [0 2147483647 1 2 3]", "0"));
    // One list may stand at many places.
    let list = format!("[{}]", "500 ".repeat(40_000));
    assert!(composite("/W [0 8 0 R 40000 8 0 R]", &list));
}

/// A search would read the rest of the file at each word.
#[test]
fn objects_without_an_end_are_bounded() {
    let is_refused = |text: &str| {
        let bytes = ["%PDF-1.5\n", &text.repeat((1 << 18) / text.len())].concat();
        search::check(bytes.as_bytes(), &AtomicBool::new(false)).is_err()
    };
    for text in [
        "1 0 obj(\n",
        "1 0 obj [0 (\n",
        "1 0 obj % ",
        "1 % ",
        "1 0 % ",
        "<</A (\n",
        "<</A 0>><</A (\n",
        "1 0 obj<</A (\n",
        "<</Type/ObjStm>>% ",
        "<</Type/ObjStm>>stream\n",
        "<< /A [ ",
    ] {
        assert!(is_refused(text), "{text}");
    }
    for text in [
        "1 0 obj(\\\\)\n",
        "1 0 obj << /A << /B [(a) <00> << /C (\\() >> % ends\n] >> >> endobj\n",
        "1 0 obj <</A 1>>stream\n((((endstream endobj\n",
        "<<<<<<<<<<<<<<<<",
        "<< ) << } ",
        "100% 1 0 obj\n",
    ] {
        assert!(!is_refused(text), "{text}");
    }
    let hostile = ["%PDF-1.5\n", &"1 0 obj(\n".repeat(100_000)].concat();
    assert!(
        matches!(sent(hostile.as_bytes(), "name"), Err(ReadError::Malformed { reason, .. }) if reason.contains("do not end"))
    );
}

/// A permit that reading holds is held until the thread has ended, also where that is after the time.
#[test]
fn a_late_thread_is_told_to_stop_and_holds_what_it_was_given() {
    struct Held(Sender<()>);
    impl Drop for Held {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }
    let (dropped, is_dropped) = channel();
    let (resume, resumed) = channel::<()>();
    let (bytes, (tell, told)) = (file(b"BT /F 10 Tf 72 700 Td (text) Tj ET", "", &[]), channel());
    let late = within(Duration::ZERO, Held(dropped), move |stop| {
        let bytes = Arc::new(Stoppable { bytes, stop: Arc::clone(stop) });
        let _ = resumed.recv();
        let _ = tell.send(Pdf::new(bytes).is_ok());
        Ok(())
    });
    assert!(matches!(late, Err(ReadError::TooLarge { what: "time", .. })));
    assert!(is_dropped.try_recv().is_err());
    resume.send(()).unwrap();
    is_dropped.recv().unwrap();
    assert!(!told.recv().unwrap());
}

/// Lines that all end in a hyphen make one word.
#[test]
fn a_word_may_be_parted_on_every_line() {
    let content = format!("BT /F 1 Tf 1 TL 0 0 Td {} ET", "(a-) ' ".repeat(4000));
    let text = text(&content);
    assert_eq!((text.len(), text.trim_matches('a')), (4001, "-"));
}
