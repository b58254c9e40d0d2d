"""The exported page in a real browser."""

import base64
import re
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By

from tests.browser.conftest import messages
from tests.unit.test_export import EXAMPLE, exported


@pytest.fixture(scope="module")
def page(browser: Chrome, tmp_path_factory: pytest.TempPathFactory) -> Chrome:
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_bytes(exported("html", EXAMPLE))
    messages(browser)
    browser.get(file.as_uri())
    return browser


def emulate(page: Chrome, **what: Any) -> None:
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", what)


def background(page: Chrome) -> str:
    return str(page.execute_script("return getComputedStyle(document.body).backgroundColor"))


def test_it_says_nothing_to_the_console_and_asks_for_nothing(page: Chrome) -> None:
    assert messages(page) == []
    assert page.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []


def test_its_pictures_are_drawn(page: Chrome) -> None:
    pictures = page.find_elements(By.CSS_SELECTOR, "svg")
    assert len(pictures) == 4
    for picture in pictures:
        assert picture.size["width"] > 500
        assert picture.size["height"] > 50
        assert picture.find_elements(By.CSS_SELECTOR, ".heat, path")
    fill = "return getComputedStyle(document.querySelector('.heat')).fill"
    assert page.execute_script(fill) == "rgb(194, 65, 12)"


def test_pointing_at_a_picture_tells_what_is_there(page: Chrome) -> None:
    heat = page.find_element(By.CSS_SELECTOR, ".heat")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", heat)
    ActionChains(page).move_to_element(heat).perform()
    tip = page.find_element(By.ID, "tip")
    assert tip.is_displayed()
    assert re.match(r"[0-9.e-]+-[0-9.e-]+ s\n", tip.text)
    assert "≤" in tip.text
    assert messages(page) == []


def test_tables_sort(page: Chrome) -> None:
    (table,) = page.find_elements(By.XPATH, "//table[.//button = 'running']")

    def column() -> list[float]:
        cells = table.find_elements(By.CSS_SELECTOR, "tbody td:nth-child(7)")
        return [float(cell.get_attribute("data-value") or "") for cell in cells]

    button = table.find_elements(By.CSS_SELECTOR, "th button")[6]
    assert button.text == "running"
    before = column()
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    assert column() == sorted(before, reverse=True) != before
    assert messages(page) == []


def test_dark_and_on_paper(page: Chrome) -> None:
    emulate(page, features=[{"name": "prefers-color-scheme", "value": "light"}])
    assert background(page) == "rgb(255, 255, 255)"
    emulate(page, features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert background(page) == "rgb(20, 24, 28)"
    emulate(page, media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert background(page) == "rgb(255, 255, 255)"
    emulate(page, media="", features=[])
    printed = base64.b64decode(page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert printed.startswith(b"%PDF")
    assert printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") in range(1, 8)


@pytest.mark.parametrize("width", [390, 1400])
def test_it_fits_the_window(page: Chrome, width: int) -> None:
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    wide = page.execute_script("return document.documentElement.scrollWidth")
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide <= width


def test_without_script_it_shows_the_same(page: Chrome) -> None:
    source = Path(page.current_url.removeprefix("file://")).read_text()
    without = re.sub(r"<script>.*</script>", "", source, flags=re.DOTALL)
    assert without.count("<svg") == 4
    assert without.count("<path") >= 3
