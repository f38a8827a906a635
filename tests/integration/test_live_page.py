"""The live page in a real browser, in front of a real pair with API keys: what it shows, and what it sends.

``HISPARSE_PD_SCREENSHOTS=DIR`` keeps the pictures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.browser import CHROMIUM, Page, open_page
from tests.integration.harness import Deployment, Service, router_service, running

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; Debian's package chromium has it"),
]

KEY = "key-of-the-live-page-test-0123"
WIDE, NARROW = 1280, 400
STATE = "document.getElementById('state').textContent"
USAGE = "document.getElementById('usage').innerText"


@pytest.fixture(scope="module")
def router(trained_pair: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A router whose clients need a key."""
    directory = tmp_path_factory.mktemp("page")
    keys = directory / "clients.keys"
    keys.write_text(f"{KEY}\n")
    options = ["--api-key-file", str(keys), "--health-interval-secs", "1"]
    router = router_service(trained_pair.prefill, trained_pair.decode, directory, options)
    with running([router]):
        yield router


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("HISPARSE_PD_SCREENSHOTS")
    return Path(kept) if kept else tmp_path_factory.mktemp("screenshots")


@pytest.fixture(scope="module")
def page(router: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page as it comes up, without a key. Each test below goes on from the one before it."""
    with open_page(tmp_path_factory.mktemp("profile")) as opened:
        opened.show_as(width=WIDE, height=900)
        opened.open(router.url)
        yield opened


def _send(page: Page, flag: str) -> str:
    """Send the prompt that is in the box; return the answer once its usage is shown."""
    page.click(f"hisparse-{flag}")
    page.evaluate("document.getElementById('usage').replaceChildren()")
    page.click("send")
    page.wait_for(f"{USAGE} && !document.getElementById('send').disabled")
    assert page.evaluate("document.getElementById('error').hidden"), page.text("error")
    return page.text("answer")


def test_without_the_key_the_page_says_so(page: Page, pictures: Path) -> None:
    page.wait_for(f"{STATE} === 'an API key is needed'")
    assert page.evaluate("document.getElementById('key').getAttribute('aria-invalid')") == "true"
    assert page.evaluate("document.title") == "hisparse-pd: an API key is needed"
    page.type("key", "a-wrong-key-0123456789")
    page.wait_for(f"{STATE} === 'the API key is wrong'")
    page.screenshot(pictures / "live-page-locked.png")
    page.click("send")
    page.wait_for("document.getElementById('error').textContent.includes('API key')")


def test_with_the_key_it_shows_the_deployment(page: Page, trained_pair: Deployment) -> None:
    page.type("key", KEY)
    page.wait_for(f"{STATE} === 'serving'")
    page.wait_for("document.getElementById('model').textContent.includes('retrieval')")
    names = page.evaluate("[...document.querySelectorAll('.nodes h4')].map((name) => name.textContent)")
    assert names == [f"127.0.0.1:{node.port}" for node in (*trained_pair.prefill, *trained_pair.decode)]
    states = page.evaluate("[...document.querySelectorAll('.nodes .status')].map((s) => s.textContent)")
    assert states == ["healthy", "healthy"]
    bars = page.evaluate(
        "[...document.querySelectorAll('[role=meter]')].map((bar) => bar.getAttribute('aria-label'))"
    )
    assert bars == ["kv pool", "host pool", "device pool", "index pool", "lookup pool"]
    stored = page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length")
    assert stored == 0, "the key is kept in memory only"


@pytest.mark.parametrize(("flag", "mode"), [("auto", "dense"), ("false", "dense"), ("true", "hisparse")])
def test_a_prompt_is_answered_and_its_numbers_are_shown(page: Page, flag: str, mode: str) -> None:
    assert "4012" in _send(page, flag)
    usage = page.evaluate(USAGE)
    assert mode in usage
    assert "prompt tokens" in usage
    assert "ended by" in usage
    assert re.search(r"tokens a step\s+\d", usage), usage
    page.wait_for("document.getElementById('requests').textContent !== '0'")
    page.wait_for("document.getElementById('draft-note').textContent.endsWith(' accepted')")
    page.wait_for("parseFloat(document.getElementById('accept-length').textContent) > 1")


def test_an_error_of_the_service_is_shown(page: Page) -> None:
    page.evaluate("document.getElementById('max-tokens').value = 60000")
    page.click("send")
    page.wait_for("document.getElementById('error').textContent.length > 20")
    assert not page.evaluate("document.getElementById('send').disabled")
    page.evaluate("document.getElementById('max-tokens').value = 64")


def test_pictures(page: Page, pictures: Path) -> None:
    """Pictures have both colour schemes, wide and narrow; nothing is wider than the window."""
    _send(page, "true")
    # The page stands still by then: the bars have moved, and the last requests are counted.
    page.wait_for("document.getElementById('requests-note').textContent.startsWith('2 hisparse')")
    for name, width, dark in (
        ("live-page", WIDE, False),
        ("live-page-dark", WIDE, True),
        ("live-page-narrow", NARROW, False),
    ):
        page.show_as(width=width, height=900, dark=dark)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        page.screenshot(pictures / f"{name}.png")
        assert (pictures / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page.show_as(width=WIDE, height=900)


def test_every_control_has_a_name(page: Page) -> None:
    unnamed = """
        [...document.querySelectorAll('input, textarea, button, [role=meter]')].filter((element) =>
            !(element.labels?.length || element.getAttribute('aria-label') || element.textContent.trim()))
            .map((element) => element.outerHTML)
    """
    assert page.evaluate(unnamed) == []


def test_the_ranks_of_a_node_are_shown(page: Page, pictures: Path) -> None:
    """/status is answered as by a router with a decode node of eight ranks; ``test_status`` checks that."""
    assert page.evaluate("document.querySelector('#decode .ranks').hidden"), "of one rank there is no list"
    page.evaluate("""
        window.ask = window.fetch;
        window.fetch = async (path, options) => {
            const answer = await window.ask(path, options);
            if (path !== "/status") return answer;
            const status = await answer.json();
            const pool_used_tokens = { host: 250, device: 0 };
            const pool_total_tokens = { host: 1000, device: 640 };
            status.nodes[1].load.ranks = [...Array(8).keys()].map((rank) => ({ dp_rank: rank, numbers: {
                num_running_reqs: { "": 1200 + rank }, num_queue_reqs: { "": rank },
                pool_used_tokens, pool_total_tokens } }));
            return Response.json(status);
        };
    """)
    lines = "[...document.querySelectorAll('#decode .ranks tr')].map((row) => row.innerText)"
    page.wait_for(f"{lines}.length === 9")
    head, first, *_, last = page.evaluate(lines)
    assert head.split("\t") == ["rank", "running", "queued", "host", "device"]
    assert first.split("\t") == ["0", "1,200", "0", "25.0 %", "0.0 %"]
    assert last.split("\t") == ["7", "1,207", "7", "25.0 %", "0.0 %"]
    assert page.evaluate("document.querySelector('#prefill .ranks').hidden")
    page.show_as(width=NARROW, height=900)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW
    page.screenshot(pictures / "live-page-ranks.png")
    page.show_as(width=WIDE, height=900)
    page.evaluate("window.fetch = window.ask")
    page.wait_for("document.querySelector('#decode .ranks').hidden")


def test_a_router_that_drains_is_shown_as_such(page: Page) -> None:
    """/status is answered as by a router that drains; ``test_status`` checks that."""
    page.evaluate("""
        window.ask = window.fetch;
        window.fetch = async (path, options) => {
            const answer = await window.ask(path, options);
            if (path !== "/status") return answer;
            return Response.json({ ...await answer.json(), ready: false, draining: true });
        };
    """)
    page.wait_for(f"{STATE} === 'shutting down'")
    page.wait_for("document.getElementById('router-status').textContent === 'draining'")
    page.evaluate("window.fetch = window.ask")
    page.wait_for(f"{STATE} === 'serving'")


def test_a_node_that_goes_away_is_shown_as_such(page: Page, trained_pair: Deployment, pictures: Path) -> None:
    trained_pair.decode[0].kill()
    page.wait_for(f"{STATE} === 'no healthy pair'")
    page.wait_for("document.querySelector('#decode .status').textContent === 'away'")
    assert "/health" in page.evaluate("document.querySelector('#decode .trouble').textContent")
    assert page.evaluate("document.querySelector('#prefill .status').textContent") == "healthy"
    page.screenshot(pictures / "live-page-away.png")


def test_the_page_asked_nobody_else_and_broke_no_rule(page: Page, router: Service) -> None:
    """The last test: it looks at everything that the tests before it made the page do."""
    assert {url for url in page.requests if not url.startswith(f"{router.url}/")} <= {"about:blank"}
    refused = "the server responded with a status of"  # 401, 400: as they should be
    complaints = [complaint for complaint in page.complaints if refused not in complaint]
    assert not complaints
