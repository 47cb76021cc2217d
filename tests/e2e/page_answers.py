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


def read_answers(browser):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    start(page)
    answer = stand_in(page)
    one_method(page)
    grow(page, answer)
    mark(page, answer)
    # A window of 1280 by 1024 pixels at 400 %: the question does not cover what is read.
    page.set_viewport_size({"width": 320, "height": 256})
    begin(page, answer, "A word. " * 200)
    assert page.locator("#ask").evaluate("ask => getComputedStyle(ask).position") == "static" and page.evaluate(BELOW) <= 1
    stop(page)
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
