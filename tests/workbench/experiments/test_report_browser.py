"""The page of a comparison in a browser: Chromium without a network."""

from __future__ import annotations

from pathlib import Path

from fairseq_posenc.workbench.experiments.compare import report
from tests.workbench.experiments.test_compare import FOUR, make_results
from tests.workbench.plots.test_inspect_browser import (  # noqa: F401  (fixtures)
    browser,
    pytestmark,
    screen,
)


def test_the_page_shows_table_and_curves_on_any_screen(tmp_path: Path, screen):  # noqa: F811
    report.write_report(make_results(tmp_path, FOUR))
    for width in (1280, 400):
        screen.set_viewport_size({"width": width, "height": 800})
        screen.goto((tmp_path / report.PAGE).as_uri())
        picture = screen.locator("img").first
        assert picture.evaluate("image => image.complete && image.naturalWidth") > 400
        assert picture.bounding_box()["width"] <= width
        for name in FOUR:
            assert screen.locator(f"td:has-text('{name}')").first.is_visible()
        assert not screen.locator("details pre").first.is_visible()
        screen.locator("summary").first.click()
        assert screen.locator("details pre").first.is_visible()
