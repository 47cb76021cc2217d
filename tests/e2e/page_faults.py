"""The part of `page.py` in which a connection, an answer, a key or the clipboard fails."""

from browser import FOCUS, URL, ask, stand_in, start


def keep_policy(browser):
    """Answers are made with the server's own eviction policy and all of its options until another one is chosen."""
    for own, capacity in (
        ("morph_kv", "600"),
        ("morph_kv:capacity=800,window=100,fuse=max", "800"),
        ("streaming_llm:capacity=12", "12"),
        ("keyformer", "0"),
        ("full", "512"),
    ):
        page = browser.new_page()

        def serve(route):
            response = route.fetch()
            route.fulfill(response=response, json={**response.json(), "default_evict": own})

        page.route("**/v1/methods", serve)
        start(page)
        stand_in(page)
        evict = lambda: page.evaluate("asked.at(-1).refrain.evict")
        assert page.locator("#capacity").input_value() == capacity, own
        page.locator("#question").focus()
        ask(page, "By the server's own policy?", 1)
        assert evict() == own, evict()
        # A number that nobody has chosen is that of the policy.
        page.locator("#evict").select_option("keyformer")
        assert page.locator("#capacity").input_value() == "0", own
        page.locator("#evict").select_option("morph_kv")
        page.locator("#capacity").fill("640")
        page.locator("#question").focus()
        ask(page, "By another one?", 2)
        assert evict() == {"name": "morph_kv", "capacity": 640}, evict()
        page.locator("#evict").select_option("h2o")
        assert page.locator("#capacity").input_value() == "640"
        page.close()


def lose_connection(page):
    """All that was not added is named, and texts come back into the form once it is empty and left."""
    held = []
    page.route("**/v1/documents", lambda route: held.append(route) if route.request.method == "POST" else route.continue_())
    form = lambda: [page.locator(field).input_value() for field in ("#title", "#text")]
    for title in ("First", "Second"):
        page.locator("#title").fill(title)
        page.locator("#text").fill(f"{title} text.")
        page.locator("#add button").first.click()
    page.locator("#files").set_input_files({"name": "third.txt", "mimeType": "text/plain", "buffer": b"A third text."})
    page.locator("#text").fill("Typed meanwhile")
    while not held:
        page.wait_for_timeout(10)
    held[0].abort()
    page.wait_for_selector("#unread li")
    lines = page.locator("#unread li").all_inner_texts()
    assert lines == ["“First”: The server cannot be reached.", "“Second”", "third.txt"], lines
    assert form() == ["", "Typed meanwhile"]
    for title in ("First", "Second"):
        page.locator("#title").fill("")
        page.locator("#text").fill("")
        assert form() == ["", ""], "keys that empty the form do not reach the next text"
        page.locator("#text").blur()
        assert form() == [title, f"{title} text."], form()
    page.unroute("**/v1/documents")


def answer_without_text(page, answer):
    """An answer that has no text says so, and shows no numbers that it lacks."""
    answer(lines=0)
    page.locator("#evict").select_option("h2o")
    page.locator("#question").focus()
    ask(page, "Nothing?", 1)
    assert page.locator("#turns").get_by_text("The model ended its answer at once, without text.").count() == 2
    assert "undefined" not in page.locator("#turns").inner_text() and page.locator("#turns canvas").count() == 0
    page.locator("#question").fill("")


def leave_out_numbers(page):
    """A number that is missing, or more than the model's context, is told at its field before anything is asked."""
    asked = page.evaluate("asked.length")
    context = page.evaluate("async () => (await (await fetch('v1/models')).json()).data[0].max_model_len")
    for field, wrong in (("capacity", ""), ("tokens", ""), ("tokens", str(context + 1))):
        before = page.locator(f"#{field}").input_value()
        page.locator(f"#{field}").fill(wrong)
        page.locator("#question").fill("How many?")
        page.locator("#question").press("Enter")
        assert page.evaluate(FOCUS)["what"] == field and page.evaluate("asked.length") == asked, (field, wrong)
        page.locator(f"#{field}").fill(before)
    page.locator("#question").fill("")


def begin_late(page):
    """A server that does not answer at first is asked again: by a question, and when the connection is back."""
    problem = lambda: page.locator("#problem").inner_text()
    for again in (lambda: page.locator("#question").press("Enter"), lambda: page.evaluate("dispatchEvent(new Event('online'))")):
        for fault, said in (
            (lambda route: route.abort(), "The server cannot be reached."),
            (lambda route: route.fulfill(status=502, json={"error": "Bad gateway"}), "The server, or a proxy before it, answered 502."),
            (lambda route: route.fulfill(body="<p>Log in"), "The server, or a proxy before it, did not answer with JSON."),
        ):
            page.route("**/v1/methods", fault)
            page.goto(URL)
            page.wait_for_function("said => document.getElementById('problem').textContent === said", arg=said)
            page.unroute("**/v1/methods")
        page.locator("#question").fill("Is it there?")
        stand_in(page)
        again()
        page.wait_for_selector("#methods input")
        page.wait_for_selector("#documents li", state="attached")
        assert problem() == "", problem()
    assert page.locator(".turn").count() == 1 and page.locator("#question").input_value() == "Is it there?"
    page.locator("#question").fill("")
    page.locator("#anew").click()


def refuse_files(page):
    """What meets one document and would meet the others as well is told once. What was cancelled is named."""
    names, sent = ["a.txt", "b.txt", "c.txt"], []
    files = [{"name": name, "mimeType": "text/plain", "buffer": name.encode()} for name in names]
    refused = {"status": 429, "json": {"error": {"message": "too many requests wait", "code": "queue_full"}}}
    for do, first in ((lambda route: route.fulfill(**refused), "a.txt: too many requests wait"), (lambda route: None, "a.txt")):
        sent.clear()
        page.route("**/v1/documents", lambda route: (sent.append(route), do(route)) if route.request.method == "POST" else route.continue_())
        page.locator("#files").set_input_files(files)
        page.wait_for_function("() => document.querySelector('#unread li') || !document.getElementById('cancel').hidden")
        if first == "a.txt":
            page.locator("#cancel").click()
        page.wait_for_selector("#unread li")
        lines = page.locator("#unread li").all_inner_texts()
        assert lines == [first, "b.txt", "c.txt"] and len(sent) == 1, (lines, len(sent))
        page.unroute("**/v1/documents")


def compose(page, answer):
    """Keys of an input method neither ask nor stop."""
    press = "([target, how]) => document.querySelector(target).dispatchEvent(new KeyboardEvent('keydown', { bubbles: true, cancelable: true, ...how }))"
    page.locator("#question").fill("車輪")
    page.evaluate(press, ["#question", {"key": "Enter", "keyCode": 229}])
    assert page.locator(".turn").count() == 1 and page.locator("#question").input_value() == "車輪"
    answer(lines=5, pause=10)
    page.locator("#question").press("Enter")
    page.evaluate(press, ["#question", {"key": "Escape", "isComposing": True}])
    page.wait_for_selector("#go:not([disabled])")
    assert page.locator(".turn").nth(1).get_by_text("Line 4.").count() == 2, "the answers are whole"


def copy_in_vain(page):
    """A browser that does not copy is not said to have copied."""
    button = page.locator(".turn").nth(1).locator(".head button").first
    for refuse in (
        "() => { navigator.clipboard.writeText = () => Promise.reject(new Error('denied')); }",
        "() => { Object.defineProperty(navigator, 'clipboard', { value: undefined }); document.execCommand = () => false; }",
    ):
        page.evaluate(refuse)
        page.evaluate("document.getElementById('told').textContent = ''")
        button.click()
        page.wait_for_function("() => document.getElementById('told').textContent")
        assert [page.locator("#told").inner_text(), button.inner_text()] == ["Not copied: select the text"] * 2


def refuse_key(page):
    """A key that no header can carry is unknown. A request that nobody has asked for leaves the focus where it is."""
    page.locator("#access summary").click()
    page.locator("#key").fill("ключ")
    page.locator("#question").focus()
    page.wait_for_function("() => document.getElementById('problem').textContent.includes('does not know this API key')")
    page.locator("#question").focus()
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    assert page.evaluate(FOCUS)["what"] == "question"


def meet_faults(browser):
    """What rarely happens is told, and loses nothing."""
    page = browser.new_page()
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    # Firefox keeps over a reload that the button was off.
    off = lambda response: response.text().replace('<button id="go">', '<button id="go" disabled>')
    page.route(f"{URL}/", lambda route: route.fulfill(response=(response := route.fetch()), body=off(response)))
    start(page)
    assert page.locator("#go").is_enabled()
    lose_connection(page)
    refuse_files(page)
    begin_late(page)
    answer = stand_in(page)
    answer_without_text(page, answer)
    leave_out_numbers(page)
    compose(page, answer)
    copy_in_vain(page)
    refuse_key(page)
    assert not faults, faults
    page.close()
