"""The documentation's search, where its pages are read from a disk."""

from __future__ import annotations

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("start", ["index.html", "api/probe.html"])
def test_it_finds_a_page_and_asks_nobody(page, site, start):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / start).as_uri())
    page.locator("input.md-search__input").fill("stable rank")
    page.locator(".md-search-result__link").first.wait_for()
    assert page.locator(".md-search-result__link").count() > 2
    assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
