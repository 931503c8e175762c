"""The page in a real browser, headless Chromium: opened from a file, looked at and used as a person would."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

from ipu_pipe.report import page as page_module
from ipu_pipe.report.page import write_page
from tests.page_example import (
    HOSTILE,
    MICROBATCHES,
    STAGES,
    make_example_trace,
    make_split_example_trace,
)

pytestmark = pytest.mark.browser
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1400,900",
)  # fmt: skip
SHOTS = Path(__file__).parent / "build"  # ignored by git; to look at


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium, with what it logs and requests kept."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_page_load_timeout(30)
    yield driver
    driver.quit()


class Page:
    """One page, open; at the end it must have complained of nothing and asked the network for nothing."""

    def __init__(self, driver: Any, path: Path) -> None:
        self.driver = driver
        driver.get("about:blank")
        (
            driver.get_log("browser"),
            driver.get_log("performance"),
        )  # the page's before, and a new tab's own
        driver.get(path.as_uri())
        self.until(lambda: self.script("return document.documentElement.dataset.ready === 'true'"))

    def script(self, code: str, *args: Any) -> Any:
        return self.driver.execute_script(code, *args)

    def until(self, true: Callable[[], Any], seconds: float = 20) -> Any:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, (self.text("body")[:300], self.driver.get_log("browser"))
            time.sleep(0.02)
        return true()

    def one(self, css: str) -> Any:
        return self.driver.find_element("css selector", css)

    def text(self, css: str) -> str:
        return str(self.one(css).text).replace("\u202f", " ")

    def settled(self) -> List[float]:
        """Return the stretch of time that is drawn, in nanoseconds, once nothing is left to draw."""
        self.script(
            "window.drawn = 0; requestAnimationFrame(() => requestAnimationFrame(() => window.drawn = 1))"
        )
        self.until(lambda: self.script("return window.drawn"))
        return [float(self.one("#canvas").get_attribute(f"data-{end}")) for end in ("from", "to")]

    def hover(self, share: float, row: int = 0) -> None:
        """Move the mouse to a share of the timeline's width in a device's row."""
        from selenium.webdriver import ActionChains

        canvas = self.one("#canvas")
        self.script("arguments[0].scrollIntoView({block: 'center'})", canvas)
        box = self.script(
            "const r = arguments[0].getBoundingClientRect(); return [r.left, r.top, r.width]",
            canvas,
        )
        x, y = box[0] + 84 + share * (box[2] - 84), box[1] + 24 + 44 * row + 12
        actions = ActionChains(self.driver)
        actions.w3c_actions.pointer_action.move_to_location(int(x), int(y))
        actions.perform()

    def keys(self, keys: str, at: str = "#canvas") -> None:
        self.one(at).send_keys(keys)

    def shot(self, name: str) -> None:
        SHOTS.mkdir(exist_ok=True)
        assert self.driver.save_screenshot(str(SHOTS / f"{name}.png"))

    def colours(self) -> int:
        """Return how many colours the timeline shows."""
        return int(
            self.script(
                """const c = document.createElement("canvas"), from = document.getElementById("canvas");
                [c.width, c.height] = [from.width, from.height];
                const pen = c.getContext("2d", {willReadFrequently: true});
                pen.drawImage(from, 0, 0);
                const d = pen.getImageData(0, 0, c.width, c.height).data;
                const seen = new Map();
                for (let i = 0; i < d.length; i += 4) {
                  const k = (d[i] << 16) | (d[i + 1] << 8) | d[i + 2];
                  seen.set(k, (seen.get(k) || 0) + 1);
                }
                return [...seen.values()].filter(n => n > 40).length"""
            )
        )

    def quiet(self) -> None:
        assert self.driver.get_log("browser") == []
        asked = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        urls = [
            message["params"]["request"]["url"]
            for message in asked
            if message["method"] == "Network.requestWillBeSent"
        ]
        assert urls and all(url.startswith(("file:", "data:")) for url in urls), urls


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Writes a page and opens it."""
    pages = []

    def opening(trace: Any, analysis: Any) -> Page:
        write_page(tmp_path / "page.html", trace, analysis)
        pages.append(Page(browser, tmp_path / "page.html"))
        return pages[-1]

    yield opening
    pages[-1].quiet()


def test_the_answer_comes_first_and_every_figure_says_what_it_is(
    opened: Callable[..., Page],
) -> None:
    page = opened(*make_example_trace())
    assert page.text("h1") == "Trace of an example" and "740 events" in page.text("#subtitle")
    assert page.text("#bottleneck").startswith(
        "Stage 1 (from blocks.1.0) on device 1: device 1 with stage 1 computes for 6.15 ms"
    )
    tiles = {
        t.text.split("\n")[0]: t.text.replace("\u202f", " ").split("\n")[1:]
        for t in page.driver.find_elements("css selector", ".tile")
    }
    assert tiles["Utilization of devices"] == ["50.3 %", "measured"]
    assert tiles["Utilization of the schedule"] == ["57.0 %", "planned"]
    assert tiles["Gain by moving boundaries"] == ["+2.1 %", "predicted"]
    sections = page.driver.find_elements(
        "css selector", "main > section:not(#answer):not(#notes) h2"
    )
    assert len(sections) == 7 and all(heading.text.endswith("measured") for heading in sections)
    assert page.one("html").get_attribute("lang") == "en"
    for labelled in page.driver.find_elements("css selector", "canvas, svg, .stacked"):
        assert labelled.get_attribute("aria-label")


def test_zooming_panning_and_the_whole_run_again(opened: Callable[..., Page]) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    page = opened(*make_example_trace())
    whole = page.settled()
    assert whole[0] == 0 and page.colours() >= 5
    page.hover(0.25)
    before = whole[0] + 0.25 * (whole[1] - whole[0])
    canvas = page.one("#canvas")
    width = canvas.size["width"]
    offset = int(84 + 0.25 * (width - 84) - width / 2)
    origin = ScrollOrigin.from_element(canvas, offset, 0)
    ActionChains(page.driver).scroll_from_origin(origin, 0, -600).perform()
    near = page.settled()
    assert near[1] - near[0] < 0.7 * (whole[1] - whole[0])
    assert near[0] + 0.25 * (near[1] - near[0]) == pytest.approx(
        before, rel=0.02
    )  # what was under the pointer still is
    ActionChains(page.driver).move_to_element(canvas).click_and_hold().move_by_offset(
        -200, 0
    ).release().perform()
    panned = page.settled()
    assert panned[0] - near[0] == pytest.approx(200 / (width - 84) * (near[1] - near[0]), rel=0.02)
    ActionChains(page.driver).double_click(canvas).perform()
    assert page.settled() == whole
    page.keys("+++")
    assert page.settled()[1] - page.settled()[0] == pytest.approx(0.6**3 * whole[1])
    begin = page.settled()[0]
    page.keys("\ue014")  # right
    assert page.settled()[0] > begin
    page.keys("\ue012-0")  # left
    assert page.settled() == whole
    page.one("#zoom-in").click()
    assert page.settled()[1] - page.settled()[0] == pytest.approx(whole[1] / 2)


def test_searching_hovering_and_choosing_kinds(opened: Callable[..., Page]) -> None:
    page = opened(*make_example_trace())
    whole = page.settled()
    page.keys("13\n", "#microbatch")
    results = page.settled()
    assert (
        page.text("#status").startswith("microbatch 13: 16 events")
        and results[1] - results[0] < 0.2 * whole[1]
    )
    trace, _ = make_example_trace()
    mine = [e for e in trace.events.rows() if e.microbatch == 13 and e.kind != "update"]
    assert results[0] < min(e.start_ns for e in mine) and max(e.end_ns for e in mine) < results[1]
    (forward,) = [e for e in mine if e.kind == "forward" and e.stage == 1]
    page.hover(
        ((forward.start_ns + forward.end_ns) / 2 - results[0]) / (results[1] - results[0]), row=1
    )
    page.until(lambda: page.one("#tip").is_displayed())
    assert page.text("#tip").split("\n") == [
        "forward of microbatch 13", "stage 1, device 1", "2.1 ms from 92.0 ms (measured)", "reads weights' version 3",
        "512 KiB handed on",
    ]  # fmt: skip
    (wait,) = [e for e in mine if e.kind == "wait" and e.stage == 2 and e.carries == "activations"]
    page.hover(((wait.start_ns + wait.end_ns) / 2 - results[0]) / (results[1] - results[0]), row=2)
    page.until(lambda: "wait" in page.text("#tip"))
    assert "waits for activations from device 1" in page.text("#tip")
    page.shot("search")
    page.keys("\ue00c")  # Escape
    colours = page.colours()
    button = page.one('#legend button[data-kind="wait"]')
    button.click()
    page.settled()
    assert button.get_attribute("aria-pressed") == "false" and page.colours() < colours
    page.one("#microbatch").clear()
    page.keys("9999\n", "#microbatch")
    page.until(lambda: page.text("#status") == "no events of microbatch 9999")


def test_halves_of_backwards_and_stages_of_a_device_are_distinguished(
    opened: Callable[..., Page],
) -> None:
    page = opened(*make_split_example_trace())
    kinds = [
        button.get_attribute("data-kind")
        for button in page.driver.find_elements("css selector", "#legend button")
    ]
    assert {"backward", "input gradient", "weight gradient"} < set(kinds)
    inks = page.script(
        "return [...document.querySelectorAll('#legend .swatch')].map(swatch => getComputedStyle(swatch).backgroundColor)"
    )
    assert len(set(inks)) == len(kinds)
    page.keys("3\n", "#microbatch")
    page.settled()
    page.one("#in-view summary").click()
    page.until(lambda: "weight gradient of microbatch" in page.text("#in-view"))
    assert "0 (" in page.text("#devices tbody tr") and "3 (" in page.text("#devices tbody tr")
    assert page.text("#stages thead").endswith(
        "forward backward input gradient weight gradient update FLOP/s"
    )
    page.shot("halves")


def test_without_a_mouse_and_as_tables(opened: Callable[..., Page]) -> None:
    page = opened(*make_example_trace())
    page.keys("\ue015n")  # down, next
    page.until(lambda: "device 0" in page.text("#status"))
    first = page.text("#status")
    page.keys("nn")
    page.until(lambda: page.text("#status") not in ("", first))
    assert page.one("#tip").is_displayed()
    page.one("#in-view summary").click()
    page.until(lambda: len(page.driver.find_elements("css selector", "#in-view tbody tr")) == 200)
    page.keys("13\n", "#microbatch")
    page.settled()
    page.until(
        lambda: 16 <= len(page.driver.find_elements("css selector", "#in-view tbody tr")) < 100
    )
    assert "forward of microbatch 13" in page.text("#in-view")


def test_memory_traffic_and_the_other_views(opened: Callable[..., Page]) -> None:
    trace, analysis = make_example_trace()
    longest = [{"microbatch": 7, "at_ns": 60_000_000, "duration_ns": 3_500_000}]
    row = {
        "stage": 3,
        "kind": "forward",
        "count": 2,
        "lost_ns": 5_000_000,
        "median_ns": 9e5,
        "longest": longest,
    }
    page = opened(trace, {**analysis, "stragglers": [row]})
    figures = page.driver.find_elements("css selector", "#memory figure")
    assert len(figures) == STAGES and all(
        len(f.find_elements("css selector", "path")) == 4 for f in figures
    )
    assert "device 0: peak 8 MiB at 4 ms" in page.text("#memory")
    assert "microbatches under way: 0, 1, 2, 3" in page.text("#memory")
    assert page.text("#traffic tbody tr") == "0 \u00b7 20 MiB \u00b7 \u00b7"
    assert "100 µs (least 100 µs)" in page.text("#traffic")
    assert len(page.driver.find_elements("css selector", "#devices tbody tr")) == STAGES
    waits = page.text("#waits tbody").split("\n")
    assert len(waits) == STAGES and waits[0].split()[1] == "\u00b7"
    assert "0 (at most 0)" in page.text("#staleness") and "3.5 ms (microbatch 7)" in page.text(
        "#stragglers"
    )
    assert "stage 1 (from blocks.1.0)" in page.text("#stages")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_and_a_narrow_window(opened: Callable[..., Page], scheme: str) -> None:
    page = opened(*make_example_trace())
    emulate = page.driver.execute_cdp_cmd
    emulate(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    grounds = []
    for width in (1400, 800):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        emulate("Emulation.setDeviceMetricsOverride", size)
        page.settled()
        assert (
            page.script("return document.documentElement.scrollWidth") <= width
        )  # nothing is cut off at the side
        assert page.colours() >= 5
        grounds.append(page.script("return getComputedStyle(document.body).backgroundColor"))
        page.shot(f"{scheme}-{width}")
    assert grounds == ["rgb(251, 251, 250)" if scheme == "light" else "rgb(20, 23, 26)"] * 2
    emulate("Emulation.clearDeviceMetricsOverride", {})


def test_names_are_only_ever_text(opened: Callable[..., Page]) -> None:
    trace, analysis = make_example_trace(HOSTILE)
    analysis["bottleneck"].update(what="link", device=3, why=HOSTILE, do=HOSTILE)
    analysis["notes"] = [HOSTILE, "</script>" + HOSTILE]
    page = opened(trace, analysis)
    assert (
        page.text("h1") == f"Trace of {HOSTILE}"
        and page.script("return document.title") == f"Trace of {HOSTILE}"
    )
    assert page.script("return window.hostile === undefined && document.images.length === 0")
    assert page.text("#bottleneck").startswith(f"The link from device 3: {HOSTILE}")
    assert HOSTILE in page.text("#stages") and HOSTILE in page.text("#answer")


def test_a_script_that_was_let_in_does_not_run(browser: Any, tmp_path: Path) -> None:
    """As if names were not escaped: the page draws itself, and nothing that is not ours runs or is applied."""
    write_page(tmp_path / "page.html", *make_example_trace())
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    inserted = (
        HOSTILE, '<p id="attribute" onclick="window.hostile = true" style="position: fixed">x</p>',
        '<a id="link" href="javascript:window.hostile = true">x</a>', "<style>h1 { display: none }</style>",
        '<base href="http://localhost:9/">',
    )  # fmt: skip
    (tmp_path / "page.html").write_text(
        text.replace("<header>", "".join(inserted) + "<header>", 1), encoding="utf-8"
    )
    page = Page(browser, tmp_path / "page.html")
    page.settled()
    assert page.colours() >= 5 and page.one("h1").is_displayed()
    page.script("for (const id of ['attribute', 'link']) document.getElementById(id).click()")
    # a frame later the clicks have had their effect, had they any
    page.settled()
    assert page.script("return window.hostile === undefined")
    assert (
        page.script("return getComputedStyle(document.getElementById('attribute')).position")
        == "static"
    )
    assert page.script("return document.baseURI").startswith("file:")
    messages = [entry["message"] for entry in browser.get_log("browser")]
    assert messages and all("Content Security Policy" in message for message in messages)
    page.quiet()


def test_what_the_analysis_does_not_know_is_called_not_known(opened: Callable[..., Page]) -> None:
    trace, analysis = make_example_trace()
    for analysis_given in (
        {},
        dict.fromkeys(analysis),
        {key: [] if isinstance(value, list) else value for key, value in analysis.items()},
    ):
        page = opened(trace, analysis_given)
        assert "not known" in page.text("#answer") and page.settled()[1] > 0
    empty = trace._replace(
        events=trace.events.select(slice(0)),
        counters=type(trace.counters).from_rows([]),
        metadata={},
    )
    assert "0 events" in opened(empty, {}).text("#subtitle")


def test_of_more_events_than_it_holds_the_page_shows_an_overview_and_a_window(
    opened: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "MOST_EVENTS", 200)
    page = opened(*make_example_trace())
    assert page.text("#window").startswith("Of 740 events the page holds 200, from ")
    page.settled()
    assert page.colours() >= 5  # the overview
    page.one("#zoom-window").click()
    begin, end = page.settled()
    assert 0 < begin < end and page.colours() >= 5
    page.keys(f"{MICROBATCHES - 1}\n", "#microbatch")
    page.until(lambda: page.text("#status").endswith("in the window"))
