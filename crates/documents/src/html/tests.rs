use super::*;

fn text(page: &str) -> String {
    read(page.as_bytes(), "name").unwrap().text
}

#[test]
fn programs_styles_and_navigation_are_dropped() {
    let page = "<head><title>T</title><style>p{}</style><script>var a = '<p>no';</script></head><body><nav>no<nav>no</nav>no</nav>\
        <p>yes<script>if (a < b) no()</script> and<!-- no --> <span hidden>no</span><b style='display: none'>no</b>yes</p>\
        <select><option>no</select><div role=navigation>no</div><footer>no</footer><article>in<footer>signed</footer></article>";
    assert_eq!(text(page), "yes and yes\n\nin\n\nsigned");
}

#[test]
fn the_main_part_alone_is_read_where_it_has_text() {
    assert_eq!(text("<p>no<main><p>yes</main><p>no"), "yes");
    assert_eq!(text("<p>outside<div role=main></div>"), "outside");
}

#[test]
fn a_page_without_end_tags_is_read() {
    assert_eq!(
        text("<title>T</title><h1>A</h1><p>b<ul><li>c<li>d</ul><table><tr><td>1<td>2<tr><td>3<td>4</table>e"),
        "# A\n\nb\n\n- c\n- d\n\n| 1 | 2 |\n| --- | --- |\n| 3 | 4 |\n\ne"
    );
    assert_eq!(text("<head><title>T</title><p>in the head</p>"), "in the head");
    assert_eq!(text("<nav><a>no<article>yes"), "yes");
}

#[test]
fn tables_that_place_a_page_are_paragraphs() {
    assert_eq!(text("<table><tr><td>menu<td><h2>Head</h2>text</table>end"), "menu\n\n## Head\n\ntext\n\nend");
    assert_eq!(
        text("<table><tr><td>a<td><table><tr><td>1<td>2<tr><td>3<td>4</table>b</table>"),
        "a\n\n| 1 | 2 |\n| --- | --- |\n| 3 | 4 |\n\nb"
    );
}

#[test]
fn lists_code_and_entities() {
    assert_eq!(text("<ol start=4><li>a<ol><li>b</ol><li>c</ol>"), "4. a\n  1. b\n5. c");
    assert_eq!(text("<pre>  a\n    b &lt;</pre>"), "```\n  a\n    b <\n```");
    assert_eq!(text("<p>&eacute;&amp;&#x41;&unknown; a&nbsp;b</p>"), "é&A&unknown; a b");
    assert_eq!(text("<p># no heading"), "\\# no heading");
}

#[test]
fn titles() {
    let title = |page: &str| read(page.as_bytes(), "name").unwrap().title;
    assert_eq!(title("<title> A &amp;\n B </title><h1>C</h1>"), "A & B");
    assert_eq!(title("<svg><title>no</title></svg><h1>C</h1>"), "C");
    assert_eq!(title("<p>text"), "name");
}

#[test]
fn xhtml_closes_elements_in_their_start_tags() {
    let page = "<?xml version='1.0'?><html><head><title>T</title><script src='a'/></head><body><p>yes</p></body></html>";
    assert_eq!(text(page), "yes");
}

#[test]
fn character_sets() {
    let latin = b"<meta charset=windows-1252><p>Gr\xF6\xDFe \x80";
    assert_eq!(read(latin, "n").unwrap().text, "Größe €");
    let error = read(b"<meta charset=\"Shift_JIS\"><p>\x82\xA0", "n").unwrap_err().to_string();
    assert_eq!(error, "its text is in shift_jis; convert it to UTF-8, for example with iconv");
    assert!(matches!(read(b"<p>\xF6", "n"), Err(ReadError::NotUtf8 { at: 3 })));
}

#[test]
fn pages_without_text_and_deep_pages() {
    assert!(matches!(read(b"<div id=root></div><script>go()</script>", "n"), Err(ReadError::NoText { .. })));
    let deep = "<div><ul><li><table><tr><td>".repeat(20_000) + "x";
    assert_eq!(text(&deep), "x");
}

#[test]
fn a_table_of_empty_cells_is_bounded() {
    let page = format!("<table><tr>{}</table><p>text", "<td>".repeat(crate::limits::MAX_CELLS));
    assert!(matches!(super::read(page.as_bytes(), "name"), Err(ReadError::TooLarge { .. })));
}
