"""The part of `page.py` in which answers are read: while they come, on phones and paper, and at a high zoom."""

from browser import ask, stand_in, start

CODE = "word " * 60 + "\n" + "\n".join(f"line_{number} = {number}" for number in range(80))
MARKDOWN = r"""**strong with *stress* inside**, *a **b** c*, \*marks\* and \(x\)

A [page](https://example.org/Foo_(bar)).

| a | b |
|---|---|
| `x|y` | p \| q |
| 1 ||
"""
# Marks beside those, and what becomes of each of them.
BLOCKS = (
    ("> A *quote*\n>\n> - of two\n> > and one\n\nbehind", '<blockquote dir="auto"><p dir="auto">A <em>quote</em></p><ul dir="auto">'
        '<li>of two</li></ul><blockquote dir="auto"><p dir="auto">and one</p></blockquote></blockquote><p dir="auto">behind</p>'),
    ("before\n---\n* * *\n- item\n- - -\n- other", '<p dir="auto">before</p><hr><hr><ul dir="auto"><li>item</li></ul><hr><ul dir="auto"><li>other</li></ul>'),
    ("- [x] done\n- [ ] to do\n- [X]no", '<ul dir="auto"><li class="task">☑ done</li><li class="task">☐ to do</li><li>[X]no</li></ul>'),
    ("~~no *not* it~~ ~ 5 ~~ 6", '<p dir="auto"><del>no <em>not</em> it</del> ~ 5 ~~ 6</p>'),
    ("a<br>b<BR />c \\<br> `<br>` <b>", '<p dir="auto">a<br>b<br>c &lt;br&gt; <code>&lt;br&gt;</code> &lt;b&gt;</p>'),
    ("|a|b|c|\n|:--|:-:|--:|\n|1<br>2|3|4|5|", '<tr><th scope="col">a</th><th scope="col" class="center">b</th><th scope="col" class="right">c</th></tr></thead>'
        '<tbody><tr><td>1<br>2</td><td class="center">3</td><td class="right">4</td><td>5</td></tr>'),
    (">" * 5000, '<p dir="auto">&gt;&gt;'),
)
# Addresses: what stands as the link, where it leads, and what stays text.
LINKS = (
    ("See https://example.org/a_b_(c)?d=*e, or so.", ["https://example.org/a_b_(c)?d=*e"], "See , or so."),
    ("(http://example.org/a.) **https://example.org** xhttps://example.org", ["http://example.org/a", "https://example.org"], "(.)  xhttps://example.org"),
    ("<https://example.org/?q=<i>> <javascript:alert(1)> javascript:alert(1)", [], None),
    ("<https://example.org/a;b.>", ["https://example.org/a;b."], ""),
    ("![A plan](https://example.org/plan.png) ![](https://example.org/b.png)", ["https://example.org/plan.png", "https://example.org/b.png"], " "),
    ("[**https://example.org/a**](https://example.org/b \"Title\") [a](javascript:alert(1))", ["https://example.org/b"], " [a](javascript:alert(1))"),
    ('https://example.org/"onmouseover="alert(1)', ["https://example.org/"], '"onmouseover="alert(1)'),
)
# How far the end of the answer lies below what the question leaves free.
BELOW = """() => document.querySelector('.turn .text').getBoundingClientRect().bottom
  - Math.min(document.getElementById('ask').getBoundingClientRect().top, innerHeight)"""
# How many of those parts that scroll by themselves are cut off in a direction.
CUT = "way => [...document.querySelectorAll('.wide, .shaded')].filter(e => e['scroll' + way] > e['client' + way] + 1).length"


def one_method(page):
    for tick in page.locator("#methods input").all()[1:]:
        tick.evaluate("tick => { tick.checked = false; }")


def pieces(text, length):
    return [text[at : at + length] for at in range(0, len(text), length)]


def begin(page, answer, text):
    """Asks, and waits until a part of a slow answer is there."""
    answer(pieces=pieces(text, 8), pause=10)
    page.locator("#question").fill("What?")
    page.locator("#question").press("Enter")
    page.wait_for_function("n => document.querySelector('.turn .text')?.textContent.length > n", arg=len(text) // 2)


def stop(page):
    page.keyboard.press("Escape")
    page.wait_for_selector("#go:not([disabled])")


def grow(page, answer):
    """Code is seen down to its end as it grows, and what is selected in a list stays so."""
    begin(page, answer, f"```\n{CODE}")
    assert page.evaluate(CUT, "Height") == 0 and page.evaluate(BELOW) <= 1
    page.emulate_media(media="print")
    assert page.evaluate(CUT, "Height") == page.evaluate(CUT, "Width") == 0
    assert page.locator("#ask").is_hidden() and page.locator(".aside").is_hidden()
    page.emulate_media(media="screen")
    stop(page)
    page.locator("#anew").click()
    begin(page, answer, "".join(f"{number}. item {number}\n" for number in range(1, 60)))
    page.evaluate("getSelection().selectAllChildren(document.querySelector('.text li'))")
    seen = page.locator(".text li").count()
    page.wait_for_function("n => document.querySelectorAll('.text li').length > n", arg=seen + 2)
    assert page.evaluate("getSelection().toString()") == "item 1"
    stop(page)
    page.locator("#anew").click()


def mark(page, answer):
    """Marks inside each other, escaped ones, and bars in cells. An answer looks the same whether it came in pieces or at once."""
    for length in (1, len(MARKDOWN)):
        answer(pieces=pieces(MARKDOWN, length))
        page.locator("#question").focus()
        ask(page, "How is it marked?", 1)
        text = page.locator(".turn .text")
        assert text.locator("p").first.inner_html() == (
            r"<strong>strong with <em>stress</em> inside</strong>, <em>a <strong>b</strong> c</em>, *marks* and \(x\)"
        ), text.inner_html()
        assert text.locator("a").get_attribute("href") == "https://example.org/Foo_(bar)"
        rows = [row.locator("td").all_inner_texts() for row in text.locator("tbody tr").all()]
        assert rows == [["x|y", "p | q"], ["1", ""]], rows
        assert text.get_by_role("group").count() == 1 and text.get_by_role("region").count() == 0
        page.locator("#anew").click()


def show_marks(page):
    """Marks of other kinds, as blocks and as links. What comes in pieces becomes the same, and nothing is loaded from elsewhere."""
    page.evaluate("""async () => {
      const { render } = await import('./page/markdown.js');
      const shown = (texts) => {
        const place = document.createElement('div');
        for (const text of texts) render(place, text);
        return place;
      };
      window.shownAtOnce = (text) => shown([text]);
      window.shownInPieces = (text) => shown([...text].map((_, i) => text.slice(0, i + 1)));
    }""")
    for text, html in BLOCKS:
        at_once = page.evaluate("text => shownAtOnce(text).innerHTML", text)
        assert html in at_once, (text[:80], at_once[:500])
        if len(text) < 1000:
            assert page.evaluate("text => shownInPieces(text).innerHTML", text) == at_once, text
    for text, links, rest in LINKS:
        shown = page.evaluate(
            """text => {
          const place = shownAtOnce(text), links = [...place.querySelectorAll('a')];
          const others = place.querySelectorAll(':not(p, strong, a)').length + place.querySelectorAll('a a').length;
          const hrefs = links.map(link => link.getAttribute('href'));
          links.forEach(link => link.remove());
          return [hrefs, place.textContent, others];
        }""",
            text,
        )
        assert (shown[0] == links or rest is None) and shown[2] == 0, (text, shown)
        assert rest is None or shown[1] == rest, (text, shown)
        assert all(href.startswith("http") for href in shown[0]), (text, shown)


def count_tokens(page, answer):
    """Tokens that are read at one layer and computed at another count once, whatever else the prompt has."""
    stats = {"prompt_tokens": 1048, "document_tokens": 576, "ttft": 1, "kv_bytes_held": 1}
    for name, read, expected in (
        ("relax_kv", {"cached_tokens": 608, "reused_tokens": 563, "recomputed_tokens": 45}, [563, 45, 440]),
        ("sam_kv", {"cached_tokens": 352, "reused_tokens": 32, "recomputed_tokens": 320, "left_out_tokens": 256}, [32, 320, 440, 256]),
        ("vanilla", {"recomputed_tokens": 576}, [1048]),
    ):
        answer(stats={**stats, **read})
        page.locator("#question").focus()
        ask(page, "How many?", 1)
        numbers = page.locator(".turn .kinds dd").evaluate_all("all => all.map(dd => parseInt(dd.textContent))")
        assert numbers == expected, (name, numbers)
        page.locator("#anew").click()


def leave(page, answer):
    """An answer that was under way when the page was left is one that was stopped, though its connection was lost first."""
    page.on("dialog", lambda dialog: dialog.accept())
    begin(page, answer, "A word. " * 200)
    with page.expect_navigation():
        page.evaluate("() => { answer.isLost = true; setTimeout(() => location.reload(), 100); }")
    page.wait_for_selector("#documents li", state="attached")
    ends = [end for end in page.locator(".turn article > .hint").all_inner_texts() if end]
    assert ends == ["Stopped.", "Not asked."], ends


def read_answers(browser):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    start(page)
    answer = stand_in(page)
    one_method(page)
    grow(page, answer)
    mark(page, answer)
    show_marks(page)
    count_tokens(page, answer)
    # A window of 1280 by 1024 pixels at 400 %: the question does not cover what is read.
    page.set_viewport_size({"width": 320, "height": 256})
    begin(page, answer, "A word. " * 200)
    assert page.locator("#ask").evaluate("ask => getComputedStyle(ask).position") == "static" and page.evaluate(BELOW) <= 1
    stop(page)
    page.close()
    page = browser.new_page()
    start(page)
    leave(page, stand_in(page))
    page.close()
    # A keyboard on a phone's screen has no Shift+Enter.
    page = browser.new_page(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    start(page)
    page.locator("#question").focus()
    page.keyboard.type("One line")
    page.keyboard.press("Enter")
    page.keyboard.type("and another")
    assert page.locator("#question").input_value() == "One line\nand another" and page.locator(".turn").count() == 0
    page.close()
