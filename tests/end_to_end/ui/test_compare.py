"""Side by side: several strategies at once, tokens coloured by their distance from the reference, links that repeat."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.end_to_end.server_process import Server
from tests.end_to_end.ui.browser import open_page
from tests.end_to_end.ui.conftest import TOKEN
from tests.patience import PATIENCE

HOSTILE = (
    "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\"> "
    "\x1b[31mred\x1b[0m \u202egnihtemos\u202c & &amp; </textarea> '\"`${1}` say it again: "
)


def run(page: Page, prompt: str, fields: Mapping[str, str]) -> None:
    """Fill in the form, its fields by their labels, and run it to its end."""
    page.get_by_role("textbox", name="Prompt", exact=True).fill(prompt)
    for label, value in fields.items():
        page.get_by_label(label).fill(value)
    page.get_by_role("button", name="Run").click()
    for column in page.locator("article").all():
        expect(column).to_have_attribute("aria-busy", "false")


def test_four_strategies_run_at_once_and_their_tokens_are_coloured(browser: Browser, server: Server) -> None:
    prompt = "The old man went down to the river to look for the key. " * 12
    with open_page(browser, server.url, token=TOKEN, fragment="compare?in=paged,int8,window,compressed") as page:
        run(page, prompt, {"Max tokens": "60"})
        columns = page.locator("article")
        assert [column.get_attribute("aria-label") for column in columns.all()] == [
            "paged",
            "int8",
            "window",
            "compressed",
        ]
        expect(columns.nth(0).locator(".token[class*=' k']")).to_have_count(0)
        window = columns.nth(2)
        tokens = window.locator(".text .token").count()
        assert tokens > 3
        expect(window.locator(".text .token:not([class*=' k'])")).to_have_count(0)
        costs = {name: columns.nth(i).inner_text() for i, name in enumerate(["paged", "int8", "window", "compressed"])}
        assert re.search(r"KV memory\s+[\d.]+ [KM]iB", costs["window"])
        assert "× reference" in costs["window"]
        assert re.search(r"\d+ dropped", costs["window"])
        assert re.search(r"0 dropped", costs["int8"])
        assert re.search(rf"{tokens} tokens compared", costs["window"])


def test_figures_are_those_of_the_api(browser: Browser, server: Server) -> None:
    prompt = "The old man went down to the river to look for the key. " * 12
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "explain": True, "logprobs": 0}
    answer = server.complete(**body, kv_cache="window", kv_cache_reference="paged").json()["choices"][0]
    compared = answer["kv_cache_comparison"]
    with open_page(browser, server.url, token=TOKEN, fragment="compare?in=paged,window") as page:
        run(page, prompt, {"Max tokens": "40"})
        text = page.locator("article").nth(1).locator(".text")
        assert "".join(text.locator(".token").all_inner_texts()).split() == answer["text"].split()
        scale = [0.01, 0.1, 0.5, 2]
        shown = [re.search(r"\bk(\d)\b", token.get_attribute("class") or "") for token in text.locator(".token").all()]
        expected = [sum(kl >= bound for bound in scale) for kl in compared["kl"]]
        assert [int(found[1]) for found in shown if found] == expected
        page.get_by_role("radio", name="rank").check()
        shown = [re.search(r"\bk(\d)\b", token.get_attribute("class") or "") for token in text.locator(".token").all()]
        assert [int(found[1]) for found in shown if found] == [
            sum(r >= b for b in (2, 3, 6, 21)) for r in compared["rank"]
        ]


def test_the_first_difference_of_two_texts_is_marked(browser: Browser, server: Server) -> None:
    prompt = "The old man went down to the river to look for the key. " * 12
    body = {"prompt": prompt, "max_tokens": 60, "temperature": 1, "seed": 3, "return_token_ids": True}
    ids = [server.complete(**body, kv_cache=name).json()["choices"][0]["token_ids"] for name in ("paged", "window")]
    difference = next(i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    with open_page(browser, server.url, token=TOKEN, fragment="compare?in=paged,window") as page:
        run(page, prompt, {"Max tokens": "60", "Temperature": "1", "Seed": "3"})
        column = page.locator("article").nth(1)
        expect(column).to_contain_text(f"at token {difference + 1}")
        expect(column.locator(".first-difference")).to_have_attribute("data-index", str(difference))
        column.locator(".text").focus()
        for _ in range(difference + 1):
            page.keyboard.press("ArrowRight")
        expect(column.locator(".details")).to_contain_text("the first token that differs")


def test_a_link_repeats_the_run_and_its_prompt_is_not_sent(browser: Browser, server: Server) -> None:
    sent: list[str] = []
    with open_page(browser, server.url, token=TOKEN, fragment="compare?in=paged,int8") as page:
        run(page, "A secret: 12345. It is", {"Max tokens": "20", "Temperature": "1"})
        texts = page.locator("article .text").all_inner_texts()
        link = page.url
    fragment = urlsplit(link).fragment
    assert parse_qs(fragment.partition("?")[2])["prompt"] == ["A secret: 12345. It is"]
    with open_page(browser, server.url, token=TOKEN, fragment=fragment) as page:
        page.on("request", lambda request: sent.append(f"{request.url} {request.headers}"))
        expect(page.get_by_role("textbox", name="Prompt", exact=True)).to_have_value("A secret: 12345. It is")
        page.get_by_role("button", name="Run").click()
        expect(page.locator("article").nth(1)).to_have_attribute("aria-busy", "false")
        assert page.locator("article .text").all_inner_texts() == texts
        page.evaluate("location.hash = 'compare?prompt=Another&in=paged,window'")
        expect(page.get_by_role("textbox", name="Prompt", exact=True)).to_have_value("Another")
    assert sent
    assert not any("12345" in each for each in sent)


@pytest.mark.parametrize("view", ["compare", "playground"])
def test_a_hostile_prompt_appears_as_text(browser: Browser, server: Server, view: str) -> None:
    with open_page(browser, server.url, token=TOKEN, fragment=view) as page:
        if view == "compare":
            run(page, HOSTILE, {"Max tokens": "4"})
        else:
            page.get_by_role("radio", name="Completion").check()
            page.get_by_role("textbox", name="Prompt", exact=True).fill(HOSTILE)
            page.get_by_text("All other parameters").click()
            page.get_by_role("combobox", name=re.compile("^echo")).select_option("true")
            page.get_by_role("button", name="Send").click()
            text = page.get_by_role("group", name="Choice 0")
            expect(text).to_contain_text("<script>document.title = 'owned'</script>")
            expect(text).to_contain_text("␛[31mred␛[0m ⟨U+202E⟩gnihtemos⟨U+202C⟩")
        assert page.title() == ("Side by side" if view == "compare" else "Playground") + " – kvmux"
        assert page.locator("main script, main img").count() == 0


def test_a_crafted_link_does_no_harm(browser: Browser, server: Server) -> None:
    link = "compare?color=constructor&in=paged,paged,window,__proto__&prompt=It"
    with open_page(browser, server.url, token=TOKEN, fragment=link) as page:
        run(page, "It is", {"Max tokens": "4"})
        names = [column.get_attribute("aria-label") for column in page.locator("article").all()]
        assert names == ["paged", "window"]
        expect(page.get_by_role("radio", name="KL divergence")).to_be_checked()


def test_the_error_of_one_strategy_does_not_stop_the_others(browser: Browser, server: Server) -> None:
    status = "Failed to load resource: the server responded with a status of 400"
    with open_page(browser, server.url, token=TOKEN, fragment="compare", allowed_errors=[status]) as page:
        page.get_by_label("Max tokens").fill("5000")
        page.get_by_role("button", name="Run").click()
        expect(page.locator("article").first.get_by_role("alert")).to_contain_text("5")


def test_code_of_the_playground_is_the_request(browser: Browser, server: Server) -> None:
    with open_page(browser, server.url, token=TOKEN, fragment="playground") as page:
        page.get_by_role("textbox", name="Message 1").fill('It\'s "quoted" & <so on>')
        page.get_by_role("spinbutton", name=re.compile("^max_completion_tokens")).fill("7")
        page.locator("label", has=page.get_by_text("kv_cache", exact=True)).locator("select").select_option("int8")
        code = page.locator(".code")
        expect(code).to_contain_text('"kv_cache":"int8"')
        page.get_by_role("button", name="Python").click()
        expect(code).to_contain_text('extra_body={"kv_cache": "int8"}')
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_text(re.compile("prompt tokens, .* generated"))).to_be_visible()
        page.get_by_text("Other fields of the answer").click()
        expect(page.get_by_text('"instance": "int8"').first).to_be_visible()
        page.locator("label", has=page.get_by_text("kv_cache_reference", exact=True)).locator("select").select_option(
            "paged"
        )
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_text("Other fields of the answer")).to_be_visible()
        fields = json.loads(page.locator("details pre").text_content() or "")
        compared = fields["choice 0"]["kv_cache_comparison"]
        assert compared["indexes"] == [*range(len(compared["kl"]))], "those of all chunks"
        assert len(compared["indexes"]) > 2
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
