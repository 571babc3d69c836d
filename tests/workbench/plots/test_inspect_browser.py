"""The attention report in a browser: the models' numbers, by mouse, keys and address, offline."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_posenc.analysis.split import CapturedAttention
from fairseq_posenc.workbench.plots.inspection import render_page
from tests.helpers.tiny_models import make_model
from tests.workbench.plots.test_inspect import read_by

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="left out: playwright, which drives a browser, is not installed"
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
MISSING = "left out: no Chromium here; on Debian: apt install chromium"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]
WORDS = ["in", "front", "of", "a", "house", "two", "men", "play", "guitars"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM)


@pytest.fixture
def screen(browser) -> Iterator[Any]:
    """A page of 1280 x 800 that fails if it logs anything, or asks for a file but its own."""
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 800})
    screen = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    screen.on("console", lambda message: said.append(message.text))
    screen.on("pageerror", lambda error: said.append(str(error)))
    screen.on("request", lambda request: asked.append(request.url[:5]))
    yield screen
    context.close()
    assert not said
    assert set(asked) <= {"file:", "data:"}


class Shown:
    """A page, and what its models did."""

    def __init__(self, path: Path, attention: list[list[CapturedAttention]]) -> None:
        self.path = path
        self.attention = attention

    def layer(self, stack: str, number: int) -> CapturedAttention:
        """Return the self-attention of a layer, counted from 0."""
        (found,) = (
            each
            for each in self.attention[0]
            if (each.stack, each.cross, each.layer) == (stack, False, number)
        )
        return found

    def __call__(self, screen: Any, view: str = "") -> Any:
        screen.goto("about:blank")  # so that another address is another visit
        screen.goto(f"{self.path.as_uri()}#{view}")
        screen.wait_for_function("performance.getEntriesByName('drawn').length")
        return screen


def show(folder: Path, *models: tuple[str, dict], words: list[str] = WORDS, without="") -> Shown:
    """Write the page of models with random weights, large enough for clear attention.

    Parameters whose names have ``without`` in them are 0.
    """
    watched, attention = [], []
    for family, options in models:
        torch.manual_seed(0)
        model = make_model(family, **options)
        for name, parameter in model.named_parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
            if without and without in name:
                parameter.data.zero_()
        watched.append(read_by(family, model, words))
        attention.append(watched[-1].captured)
    path = folder / "attention.html"
    path.write_text(render_page(watched, "fairseq-posenc inspect --text 'a <b>'"), encoding="utf-8")
    return Shown(path, attention)


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Shown:
    return show(tmp_path_factory.mktemp("one"), ("translation", {"position_encoding": "t5"}))


def title(screen) -> str:
    return screen.locator(".title").inner_text().lower()


def picture(screen, selector: str = ".matrix") -> str:
    return screen.locator(selector).first.evaluate("canvas => canvas.toDataURL()")


def address(screen) -> str:
    return screen.evaluate("location.hash")


def table(screen, name: str) -> list[list[str]]:
    """Open a table and return its cells."""
    details = screen.locator(f"[data-table={name}]").first
    if details.get_attribute("open") is None:
        details.locator("summary").click()
    details.locator("tr").first.wait_for()
    read_cells = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    return details.locator("tr").evaluate_all(read_cells)


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def test_it_opens_without_a_network_and_says_nothing(shown, screen):
    shown(screen)
    assert title(screen) == "encoder · layer 1 · head 1 · weight"
    assert screen.locator("#notice").inner_text() == ""
    source = screen.locator("#source").inner_text()
    assert "fairseq-posenc inspect --text 'a <b>'" in source
    assert re.search(r"model\.pt, SHA-256 [0-9a-f]{64}", source)


@pytest.mark.parametrize(
    ("family", "without", "alike"),
    [("masked_lm", "q_proj", True), ("causal_lm", "q_proj", True), ("masked_lm", "", False)],
)
def test_a_first_view_whose_weights_are_all_alike_says_so(family, without, alike, tmp_path, screen):
    show(tmp_path, (family, {"position_encoding": "none"}), without=without)(screen)
    said = screen.locator(".alike").inner_text()
    assert said.startswith("The weights of every row are nearly alike") == alike
    screen.get_by_text("score", exact=True).first.click()
    assert screen.locator(".alike").inner_text() == ""


def test_the_first_paint_of_a_large_page_takes_less_than_a_second(tmp_path, screen):
    """Six layers of eight heads on 64 tokens, in three kinds of attention."""
    sizes = {"layers": 6, "embed_dim": 128, "attention_heads": 8}
    options = {f"{s}_{name}": n for s in ("encoder", "decoder") for name, n in sizes.items()}
    options |= {"max_source_positions": 64, "max_target_positions": 64}
    huge = show(tmp_path, ("translation", {"position_encoding": "m4m", **options}), words=WORDS * 7)
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    assert min(huge(screen).evaluate(paint) for _ in range(3)) < 1000  # the machine may be busy
    assert screen.locator(".heads button").count() == 48


def test_the_numbers_are_the_models(shown, screen):
    for layer in shown.attention[0]:
        kind = "cross" if layer.cross else layer.stack
        query = 4
        shown(screen, f"kind={kind}&layer={layer.layer + 1}&head=4&query={query}")
        head, *rows = table(screen, "row")
        assert [row[0] for row in rows] == [f"{word} ({i})" for i, word in enumerate(WORDS)]
        planes = {"weight": layer.weights, "score": layer.split.scores}
        planes |= {part: getattr(layer.split, part) for part in ("content", "position", "both")}
        assert head[1:] == list(planes)
        for column, values in enumerate(planes.values(), start=1):
            for row, value in zip(rows, values[0, 3, query].tolist()):
                if kind == "decoder" and rows.index(row) > query:
                    assert row[column] == "–"
                else:
                    assert number(row[column]) == pytest.approx(value, abs=1e-2)


def test_the_curves_are_means_by_distance(shown, screen):
    shown(screen, "layer=2&head=3")
    layer = shown.layer("encoder", 1)
    head, *rows = table(screen, "curves")
    assert head == ["key − query", "weight", "content", "position", "both"]
    assert [int(row[0]) for row in rows] == list(range(1 - len(WORDS), len(WORDS)))
    for distance, *means in rows:
        for text, values in zip(means, (layer.weights, layer.split.content, layer.split.position)):
            expected = values[0, 2].diagonal(int(distance)).mean().item()
            assert number(text) == pytest.approx(expected, abs=1e-2)


def test_the_reading_of_a_pair_adds_up(shown, screen):
    shown(screen, "kind=decoder&layer=2&head=2&query=5&key=2")
    printed = screen.locator(".reading").inner_text()
    weight, score, *parts = map(number, re.findall(r"(?<= )[−\d.]*\d(?=[, .+]|$)", printed))
    assert weight == pytest.approx(shown.layer("decoder", 1).weights[0, 1, 5, 2].item(), abs=1e-2)
    assert score == pytest.approx(sum(parts), abs=3e-2)
    assert "“two” to “of”" in printed
    shown(screen, "kind=decoder&query=2&key=5")
    assert "not seen in this layer" in screen.locator(".reading").inner_text()


def test_every_picture_has_a_table(shown, screen):
    shown(screen, "layer=2&head=3&show=content")
    for canvas in screen.locator("canvas[role=img]").all():
        assert canvas.get_attribute("aria-label")
    for button in screen.locator(".heads button").all():
        assert re.fullmatch(r"layer \d, head \d", button.get_attribute("aria-label"))
    layer = shown.layer("encoder", 1)
    head, *rows = table(screen, "matrix")
    assert head == ["content", *WORDS]
    for row, values in zip(rows, layer.split.content[0, 2].tolist()):
        assert list(map(number, row[1:])) == pytest.approx(values, abs=1e-2)
    habits = table(screen, "heads")
    assert len(habits) == 1 + 2 * 4
    itself = layer.weights[0, 2].diagonal().mean().item()
    assert number(habits[7][2]) == pytest.approx(itself, abs=1e-2)


def test_a_click_on_a_head_changes_matrix_curves_and_address(shown, screen):
    shown(screen)
    before = [picture(screen), picture(screen, ".chart.weight"), picture(screen, ".chart.parts")]
    screen.get_by_role("button", name="layer 2, head 3").click()
    after = [picture(screen), picture(screen, ".chart.weight"), picture(screen, ".chart.parts")]
    assert all(one != other for one, other in zip(before, after))
    assert title(screen) == "encoder · layer 2 · head 3 · weight"
    assert "layer=2&head=3" in address(screen)


def test_the_address_restores_the_view(shown, screen):
    shown(screen)
    screen.get_by_role("button", name="layer 2, head 4").click()
    screen.get_by_text("Decoder", exact=True).click()
    screen.locator("#shows").get_by_text("position").click()
    screen.locator(".matrix").focus()
    screen.keyboard.press("ArrowDown")
    seen, kept = picture(screen), address(screen)
    shown(screen, kept.lstrip("#"))
    assert title(screen) == "decoder · layer 2 · head 4 · position"
    assert screen.locator("[aria-pressed=true]").get_attribute("aria-label") == "layer 2, head 4"
    screen.locator(".matrix").focus()
    assert picture(screen) == seen
    assert address(screen) == kept
    screen.evaluate("location.hash = '#layer=1&head=3'")
    screen.wait_for_function("document.querySelector('.title').textContent.includes('head 3')")
    assert title(screen) == "encoder · layer 1 · head 3 · weight"


def test_an_address_that_asks_for_what_is_not_there_says_so(shown, screen):
    shown(screen, "layer=99&head=x&show=gain&kind=middle&query=-1")
    printed = screen.locator("#notice").inner_text()
    missing = ("layer 99, they are 1 to 2", "head NaN", "query -1")
    for part in (*(f"no {name}" for name in missing), "“gain”", "“middle”"):
        assert part in printed
    assert title(screen) == "encoder · layer 1 · head 1 · weight"


def test_the_keyboard_reaches_everything(shown, screen):
    shown(screen)
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft"):
        screen.keyboard.press(key)
    assert title(screen) == "encoder · layer 2 · head 2 · weight"
    screen.keyboard.press("ArrowDown")  # there is no further layer
    assert title(screen) == "encoder · layer 2 · head 2 · weight"
    screen.keyboard.press("3")
    assert title(screen) == "encoder · layer 2 · head 2 · content"
    screen.keyboard.press("5")  # both is 0 everywhere
    assert title(screen) == "encoder · layer 2 · head 2 · content"
    screen.keyboard.press("]")
    assert title(screen) == "decoder · layer 2 · head 2 · content"
    screen.locator(".matrix").focus()
    for key in ("ArrowUp", "ArrowRight"):
        screen.keyboard.press(key)
    assert "“a” to “front”" in screen.locator(".reading").inner_text()
    assert title(screen) == "decoder · layer 2 · head 2 · content"
    screen.keyboard.press("Escape")
    assert "query" not in address(screen)


def test_pointing_at_a_pair_isolates_its_row_and_column(shown, screen):
    shown(screen)
    rest = picture(screen)
    box = screen.locator(".matrix").bounding_box()
    screen.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.6)
    assert picture(screen) != rest
    assert screen.locator(".reading").inner_text().startswith("“")
    screen.mouse.move(box["x"] + 20, box["y"] + box["height"] * 0.6)  # a label: a row alone
    assert screen.locator(".reading").inner_text().startswith("Point at a pair")
    assert screen.locator(".from").inner_text().startswith("What “")
    screen.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 20)
    assert screen.locator(".from").inner_text().startswith("Who attends to “")
    screen.mouse.move(2, 2)
    assert picture(screen) == rest
    screen.mouse.click(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.6)
    assert re.search(r"query=\d&key=\d", address(screen))


def test_the_colors_follow_the_system(shown, screen):
    background = "getComputedStyle(document.body).backgroundColor"
    light, drawn = shown(screen).evaluate(background), picture(screen)
    screen.emulate_media(color_scheme="dark")
    screen.wait_for_function(f"{background} !== '{light}'")
    redrawn = "before => document.querySelector('.matrix').toDataURL() !== before"
    screen.wait_for_function(redrawn, arg=drawn)  # a moment after the event


def test_a_narrow_window_shows_all_of_it(shown, screen):
    screen.set_viewport_size({"width": 400, "height": 800})
    shown(screen)
    assert screen.evaluate("document.documentElement.scrollWidth") == 400


def test_two_models_stand_side_by_side(tmp_path, screen):
    specs = {"translation": "t5", "masked_lm": "m4m"}
    models = [(family, {"position_encoding": spec}) for family, spec in specs.items()]
    show(tmp_path, *models)(screen, "layer=2&head=3")
    first, second = screen.locator(".model").all()
    assert first.bounding_box()["x"] + first.bounding_box()["width"] <= second.bounding_box()["x"]
    assert first.locator(".title").inner_text() == second.locator(".title").inner_text()
    assert "encoder m4m" in second.locator(".about").inner_text()
    screen.keyboard.press("ArrowDown")
    assert "2 layers with 4 heads" in first.locator(".missing").inner_text()
    assert second.locator(".title").inner_text().lower().startswith("encoder · layer 3 · head 3")
    screen.locator("#shows").get_by_text("query table factor").click()
    screen.keyboard.press("]")
    assert "no such attention" in second.locator(".missing").inner_text()
    assert first.locator(".missing").inner_text() == ""
