"""`report.html` in a real browser: it opens from disk, asks nothing of a network, and does what it says."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_folders import HOSTILE, make_run

from offline_grpo.report.page import save_page

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
no_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install one, or name it in CHROMIUM")
pytestmark = [pytest.mark.slow, pytest.mark.browser, no_browser]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        found = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Any, path: Path, *, width: int = 1600, dark: bool = False) -> Any:
    """The page once everything is drawn; it has no error, no dialog, and no request but for itself."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: request.url == path.as_uri() or wrong.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-drawn]", timeout=60_000)
    assert page.locator("figure .main-svg").count() > 0
    assert wrong == []
    page.wrong = wrong
    return page


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    for number, (loss, solved) in enumerate([("grpo", 3), ("<b>dapo</b>", 1), ("gspo", 2)]):
        make_run(folder / str(number), loss=loss, solved=solved, text="four" if number else HOSTILE, truncated_frac=0.5)
    return save_page([folder], folder / "report.html")


@pytest.fixture(scope="module")
def page(browser: Any, sweep: Path) -> Any:
    return opened(browser, sweep)


def test_the_pictures_are_there_and_fit_a_telephone_at_night(browser: Any, sweep: Path) -> None:
    page = opened(browser, sweep, width=400, dark=True)
    plots = page.locator("figure:visible [role=img]").all()
    for plot in plots:
        plot.scroll_into_view_if_needed()
        plot.locator(".main-svg").first.wait_for()
    boxes = [plot.bounding_box() for plot in page.query_selector_all("figure .main-svg:first-child")]
    assert len(boxes) == len(plots) >= 5
    assert all(box["height"] > 200 and box["width"] > 300 and box["x"] + box["width"] <= 400 for box in boxes)
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
    assert page.locator("nav a").all_inner_texts()[:3] == ["Results", "Look at", "Learning curves"]


def test_tables_sort_by_number_and_back(page: Any) -> None:
    cells = page.locator("#results tbody td:nth-child(3)")
    values = [f"{share:.3f} [{share - 0.01:.3f}, {share + 0.01:.3f}]" for share in (0.75, 0.5, 0.25)]
    assert cells.all_inner_texts() == values
    page.get_by_role("button", name="pass@1 [95%]").first.press("Enter")
    assert cells.all_inner_texts() == values[::-1]
    page.get_by_role("button", name="pass@1 [95%]").first.press("Enter")
    assert cells.all_inner_texts() == values


def test_differences_and_findings_are_shown(page: Any) -> None:
    page.locator("#forest").scroll_into_view_if_needed()
    page.wait_for_selector("#forest .errorbars")
    ticks = sorted(page.locator("#forest .ytick").all(), key=lambda tick: tick.bounding_box()["y"])
    names = page.locator("#paired tbody tr td:first-child").all_inner_texts()
    assert [tick.text_content() for tick in ticks] == names == ["loss=gspo", "loss=<b>dapo</b>"]
    assert page.locator("#forest .errorbars path.xerror").count() == 2
    finding = page.locator("#findings li").all_inner_texts()[0]
    assert finding.startswith("3 of 3 runs (0, 1, 2; numbers of the first): 50% of the completions are cut off")


def test_a_sample_can_be_found(page: Any) -> None:
    form = page.locator("#samples form")
    form.get_by_label("Text").fill("FOUR 7")
    form.get_by_label("Iteration").fill("8")
    form.get_by_label("Reward from").fill("0.5")
    assert "2 of " in page.locator("#samples [role=status]").inner_text()
    assert page.locator("#samples mark").all_inner_texts()[-2:] == ["four 7", "four 7"]
    assert page.locator("#samples article mark").first.get_attribute("title") == "advantage 0.700"
    page.evaluate("document.forms[0].reset()")
    form.get_by_label("Run").fill("2")
    titles = page.locator("#samples h3").all_inner_texts()
    assert titles
    assert all(title.startswith("run 2 ") for title in titles)
    page.evaluate("document.forms[0].reset()")


def test_the_legend_and_the_links_of_findings(page: Any) -> None:
    lines = "figure:has([id='eval/pass@1']) .scatterlayer .trace"
    before = page.locator(lines).count()
    page.locator("#learning .legend button").first.click()
    page.wait_for_function("([lines, before]) => document.querySelectorAll(lines).length < before", arg=[lines, before])
    assert page.locator(lines).count() > 0
    assert page.locator("#learning .legend button").nth(1).inner_text() == "loss=gspo"
    page.locator("#findings a").first.click()
    assert page.evaluate("document.querySelector(':target').id") == "train/truncated_frac"
    page.locator("#all summary").click()
    page.get_by_label("Metric").select_option("train/time/train_s")
    page.wait_for_selector("#chosen .main-svg")
    assert page.wrong == []


def test_hostile_text_is_shown_as_it_is(page: Any) -> None:
    page.locator("#samples form").get_by_label("Problem").fill("</script><script>alert(1)")
    assert "<script>alert(1)</script><img src=x" in page.locator("#samples article").first.inner_text()
    assert "<b>dapo</b>" in page.locator("#learning .legend").inner_text()
    page.mouse.move(300, 300)
    assert page.wrong == []
