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

#[test]
fn a_button_that_is_a_title_is_read_and_one_beside_a_title_is_not() {
    let page = "<h2><button class=accordion-button><span>Can I return it?</span></button></h2><div>Yes.</div>\
        <h2>Shipping <button>Copy link</button></h2><p>Free. <button>Buy</button></p>\
        <dl><dt><button>How long?</button><dd><button>Close</button>Two days.</dl>\
        <details><summary><button>Where to?</button></summary>Anywhere.</details>";
    assert_eq!(
        text(page),
        "## Can I return it?\n\nYes.\n\n## Shipping\n\nFree.\n\nHow long?\n\nTwo days.\n\nWhere to?\n\nAnywhere."
    );
}

#[test]
fn cells_of_several_columns_or_rows_keep_the_others_in_their_columns() {
    let page = "<table><tr><th rowspan=2>Region<th colspan=2>2023<th>Total<tr><th>Q1<th>Q2<th>\
        <tr><td rowspan=3>North<td>1<td>2<td>3<tr><td>4<td>5<td>9<tr></tr><tr><td>6<td>7<td>8</table>";
    assert_eq!(
        text(page),
        "| Region | 2023 |  | Total |\n| --- | --- | --- | --- |\n| Region | Q1 | Q2 |  |\n\
         | North | 1 | 2 | 3 |\n| North | 4 | 5 | 9 |\n| 6 | 7 | 8 |"
    );
    // A cell at the end of a row reaches down as well, and a wide one adds no empty columns.
    let page = "<table><tr><td>a<td rowspan=2 colspan=9>b<tr><td>c<tr><td colspan=9>d</table>";
    assert_eq!(text(page), "| a | b |\n| --- | --- |\n| c | b |\n| d |");
    // A header that is shorter than the rows has as many columns.
    assert_eq!(
        text("<table><tr><th>a<th colspan=2>b<tr><td>1<td>2<td>3</table>"),
        "| a | b |  |\n| --- | --- | --- |\n| 1 | 2 | 3 |"
    );
    // No cell reaches beyond its group of rows.
    let page =
        "<table><thead><tr><th rowspan=9>a<th>b</thead><tbody><tr><td rowspan=0>1<td>2<tr><td>3</table>";
    assert_eq!(text(page), "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 1 | 3 |");
    // Cells of one column are paragraphs, each once.
    assert_eq!(text("<table><tr><td colspan=2>a<tr><td colspan=2>b</table>"), "a\n\nb");
    assert_eq!(text("<table><tr><td rowspan=2>a<td>b<tr><td><h2>c</h2></table>"), "a\n\nb\n\n## c");
}

#[test]
fn tables_that_repeat_their_cells_are_bounded() {
    use crate::limits::{MAX_CELLS, MAX_TEXT_BYTES};
    let refused = |page: &str| matches!(read(page.as_bytes(), "n"), Err(ReadError::TooLarge { .. }));
    let wide = "<td colspan=1000>".repeat(MAX_CELLS / 1000 + 1);
    assert!(refused(&format!("<table><tr>{wide}<td>end</table>")));
    // The cells at the end reach into rows that have a cell at the beginning.
    let wide = "<td colspan=1000 rowspan=65534>".repeat(MAX_CELLS / 2000);
    assert!(refused(&format!("<table><tr><td>{wide}{}</table>", "<tr><td>a".repeat(1000))));
    let short = "<tr><td colspan=1000 rowspan=2>a<tr>".repeat(MAX_CELLS / 1000 + 1);
    assert!(refused(&format!("<table>{short}</table>")));
    let long = "a".repeat(MAX_TEXT_BYTES / 4);
    assert!(refused(&format!("<table><tr><td>b<td rowspan=9>{long}{}</table>", "<tr><td>c".repeat(8))));
    assert!(!refused(&format!("<table><tr><td>b<td rowspan=2>{long}{}</table>", "<tr><td>c".repeat(8))));
}

#[test]
fn a_skipped_element_without_end_tag_ends_where_it_must() {
    assert_eq!(text("<div><p hidden>no<p>a</div><div><p hidden>no</div>b"), "a\n\nb");
    assert_eq!(
        text("<ul><li>a<li style='display: none'>no<ul><li>no<li>no</ul>no<li>b<li hidden>no</ul><p>c"),
        "- a\n- b\n\nc"
    );
    assert_eq!(
        text("<table><tr><td>a<td>b<td hidden>no<tr hidden><td>no<tr><td>c<td>d<td hidden>no</table>e"),
        "| a | b |\n| --- | --- |\n| c | d |\n\ne"
    );
    assert_eq!(text("<dl><dt>a<dd hidden>no<dt>b<dd aria-hidden=true>no</dl>c"), "a\n\nb\n\nc");
    // Elements of its kind inside do not end it.
    assert_eq!(text("<ul><li hidden>no<ul><li>no</li></ul></li><li>a</ul>"), "- a");
    assert_eq!(text("<div hidden>no<div>no</div>no</div>a"), "a");
}

#[test]
fn pictures_that_end_in_their_start_tags_hold_nothing() {
    assert_eq!(text("<p>a<svg class=i /> b <math/>c<svg><path/><svg/><title>no</title></svg> d"), "a b c d");
}

#[test]
fn the_main_part_ends_with_the_element_that_began_it() {
    assert_eq!(text("<div role=main><div>a</div><div hidden>no</div>b</div><footer>© no</footer>"), "a\n\nb");
    assert_eq!(text("<main>a<div role=main>b</div>c</main>no"), "a\n\nb\n\nc");
}

#[test]
fn code_in_a_table_keeps_its_lines() {
    let code = "```\ndef f():\n    return 1\n```";
    let pre = "<pre>def f():\n    return 1\n</pre>";
    let numbers = "<div><pre><span>1</span>\n<span>2</span>\n</pre></div>";
    assert_eq!(
        text(&format!("<table><tr><td>{numbers}</td><td>{pre}</td></tr></table>a")),
        format!("{code}\n\na")
    );
    assert_eq!(text(&format!("<table><tr><th>f<tr><td>{pre}</table>")), format!("f\n\n{code}"));
    // The columns of a wider table say more than the lines of its cells.
    assert_eq!(
        text(&format!("<table><tr><th>a<th>b<th>c<tr><td>1<td>{pre}<td>2</table>")),
        "| a | b | c |\n| --- | --- | --- |\n| 1 | def f(): return 1 | 2 |"
    );
    assert_eq!(text("<pre>1\n2</pre>"), "```\n1\n2\n```");
}

#[test]
fn exponents_readings_and_formulas() {
    assert_eq!(
        text(
            "<p>10<sup>6</sup> or 10<sup>−6</sup>, the 1<sup>st</sup>, x<sup>2</sup>, Na<sup>+</sup>, (a)<sup>3</sup>"
        ),
        "10^6 or 10^−6, the 1st, x^2, Na+, (a)^3"
    );
    assert_eq!(text("<p><ruby>東<rp>(</rp><rt>とう</rt><rp>)</rp>京<rt>きょう</ruby>へ"), "東京へ");
    assert_eq!(
        text(
            "<p>So <span style='display: none'><math>no</math></span><img class='mwe-math-fallback-image-inline' \
             aria-hidden=true alt='{\\displaystyle E=mc^{2}}'> holds <img alt='a decoration'>."
        ),
        "So E=mc^{2} holds ."
    );
}

#[test]
fn marks_of_notes_are_told_from_the_words_before_them() {
    assert_eq!(
        text(
            "<p>reimbursement<sup>1</sup> of 2020<sup><a href='#n2'>2</a></sup>, in full.<a href='#n3'><sup>3</sup></a> \
             A trip<sup><a href='#a'>a</a>,<a href='#b'>b</a></sup> by <a href='/car'>car m<sup>2</sup></a>"
        ),
        "reimbursement^1 of 2020[2], in full.[3] A trip[a],[b] by car m^2"
    );
    // An anchor is no link, and a link without text marks nothing behind it.
    assert_eq!(text("<p>x<a id=x><sup>2</sup></a><a href=y><img></a>y<sup>2</sup>"), "x^2y^2");
}

#[test]
fn struck_text_is_marked() {
    assert_eq!(
        text("<p><del>old price 5 </del><ins>6</ins>,<s> a <strike>b</strike> c</s>d<del></del>"),
        "~~old price 5~~ 6, ~~a b c~~d"
    );
    assert_eq!(
        text("<del><p>a<p>b</del><p>c<s>d<pre>e\nf</pre>g"),
        "~~a~~\n\n~~b~~\n\nc~~d~~\n\n```\ne\nf\n```\n\n~~g~~"
    );
}

#[test]
fn formulas_are_written_once_and_in_order() {
    let formula = "<math><semantics><mrow><mi>a</mi></mrow><annotation encoding='application/x-tex'>a^2 &lt; \\frac{a}{b}\
        </annotation><annotation-xml encoding='MathML-Content'><ci>a</ci></annotation-xml></semantics></math>";
    assert_eq!(text(&format!("<p>So {formula} holds.")), "So $a^2 < \\frac{a}{b}$ holds.");
    assert_eq!(text("<p>So <math alttext='x_{1}'><msub><mi>x</mi><mn>1</mn></msub></math>."), "So $x_{1}$.");
    let marked = |marks: &str| text(&format!("<p><math>{marks}</math>"));
    assert_eq!(
        marked(
            "<msup><mi>a</mi> <mn>2</mn></msup><mo>+</mo><mn>2</mn><mo>&InvisibleTimes;</mo><msup><mi>b</mi><mrow><mi>n</mi><mo>+</mo><mn>1</mn></mrow></msup>"
        ),
        "a^2+2 b^(n+1)"
    );
    assert_eq!(
        marked(
            "<mfrac><mrow><mi>a</mi><mo>−</mo><mi>b</mi></mrow><msqrt><mi>x</mi><mi>y</mi></msqrt></mfrac>"
        ),
        "(a−b)/√(x y)"
    );
    assert_eq!(
        marked(
            "<munderover><mo>∑</mo><mn>1</mn><mi>n</mi></munderover><mi>sin</mi><mroot><mi>x</mi><mn>3</mn></mroot>"
        ),
        "∑_1^n sin x^(1/3)"
    );
    assert_eq!(
        marked(
            "<mtable><mtr><mtd><mn>1</mn></mtd><mtd><mn>0</mn></mtd></mtr><mtr><mtd><mn>0</mn></mtd></mtr></mtable>"
        ),
        "1, 0; 0"
    );
    assert_eq!(marked("<mtext><svg/></mtext><msup><mi/><mn>2</mn></msup><mi>x</mi>"), "^2 x");
    let page =
        "<?xml version='1.0'?><html><body><p><math><msup><mi/><mn>2</mn></msup></math></p></body></html>";
    assert_eq!(text(page), "^2");
    // A missing end tag loses nothing.
    assert_eq!(text("<p><math><mi>x</mi><p>a<math><mfrac><mn>1</mn>"), "x\n\na1");
    assert_eq!(text(&format!("<p><math>{}", "<msup><mi>a</mi>".repeat(20_000))).len(), 59_998);
}
