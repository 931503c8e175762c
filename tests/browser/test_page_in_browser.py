"""Open the page from a file in a real browser, headless Chromium, look at it and use it as a
person would."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

from ipu_pipe.report import page as page_module
from ipu_pipe.report.analysis.analyze import read_and_analyze
from ipu_pipe.report.page import write_page
from ipu_pipe.schedule.timelines import make_schedule
from tests.page_example import (
    HOSTILE,
    MICROBATCHES,
    STAGES,
    make_example_trace,
    make_split_example_trace,
)
from tests.support.runs import ROOT
from tests.test_trainer_traces import NAMES, make_host_records, write_ranks

pytestmark = pytest.mark.browser
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1400,900",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start Chromium with its logs and requests recorded."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


def wait_for_answer(is_true: Callable[[], Any]) -> None:
    """Wait at most a minute until a question is answered by yes."""
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


class BrowserPage:
    """An open page; at the end it must have logged no message and sent no request to the
    network."""

    def __init__(self, driver: Any, path: Path) -> None:
        self.driver = driver
        driver.get("about:blank")
        # discard the logs of the previous page and of a new tab
        driver.get_log("browser")
        driver.get_log("performance")
        driver.get(path.as_uri())
        wait_for_answer(
            lambda: self.run_script("return document.documentElement.dataset.ready === 'true'")
        )

    def run_script(self, code: str, *args: Any) -> Any:
        return self.driver.execute_script(code, *args)

    def find(self, css: str) -> Any:
        return self.driver.find_element("css selector", css)

    def find_all(self, css: str) -> List[Any]:
        return self.driver.find_elements("css selector", css)

    def read_text(self, css: str) -> str:
        return str(self.find(css).text).replace("\u202f", " ")

    def wait_until_drawn(self) -> List[float]:
        """Wait until drawing has ended. Return the drawn span of time in nanoseconds, [from,
        to]."""
        self.run_script(
            "window.drawn = 0; requestAnimationFrame(() => requestAnimationFrame(() => window.drawn = 1))"
        )
        wait_for_answer(lambda: self.run_script("return window.drawn"))
        return [float(self.find("#canvas").get_attribute(f"data-{end}")) for end in ("from", "to")]

    def hover(self, share: float, row: int = 0) -> None:
        """Move the mouse to a fraction of the timeline's width in a device's row."""
        from selenium.webdriver import ActionChains

        canvas = self.find("#canvas")
        self.run_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
        box = self.run_script(
            "const r = arguments[0].getBoundingClientRect(); return [r.left, r.top, r.width]",
            canvas,
        )
        x, y = box[0] + 84 + share * (box[2] - 84), box[1] + 24 + 44 * row + 12
        actions = ActionChains(self.driver)
        actions.w3c_actions.pointer_action.move_to_location(int(x), int(y))
        actions.perform()

    def send_keys(self, keys: str, at: str = "#canvas") -> None:
        self.find(at).send_keys(keys)

    def count_colours(self) -> int:
        """Return the number of colours in the timeline."""
        return int(
            self.run_script(
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

    def assert_quiet(self) -> None:
        assert self.driver.get_log("browser") == []
        logged = self.driver.get_log("performance")
        messages = [json.loads(entry["message"])["message"] for entry in logged]
        requests = [m for m in messages if m["method"] == "Network.requestWillBeSent"]
        urls = [message["params"]["request"]["url"] for message in requests]
        assert urls and all(url.startswith(("file:", "data:")) for url in urls), urls


OpenPage = Callable[..., BrowserPage]


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[OpenPage]:
    """Return a function that writes a page and opens it; check at the end that the last page was
    quiet."""
    pages = []

    def open_written_page(trace: Any, analysis: Any) -> BrowserPage:
        write_page(tmp_path / "page.html", trace, analysis)
        pages.append(BrowserPage(browser, tmp_path / "page.html"))
        return pages[-1]

    yield open_written_page
    pages[-1].assert_quiet()


def test_the_answer_comes_first_and_every_figure_says_what_it_is(
    open_page: OpenPage,
) -> None:
    page = open_page(*make_example_trace())
    assert page.read_text("h1") == "Trace of an example"
    assert "740 events" in page.read_text("#subtitle")
    assert page.read_text("#bottleneck").startswith(
        "Stage 1 (from blocks.1.0) on device 1: device 1 with stage 1 computes for 6.15 ms"
    )
    tiles = [tile.text.replace("\u202f", " ") for tile in page.find_all(".tile")]
    assert "Utilization of devices\n50.3 %\nmeasured" in tiles
    assert "Utilization of the schedule\n57.0 %\nplanned" in tiles
    assert "Gain by moving boundaries\n+2.1 %\npredicted" in tiles
    sections = page.find_all("main > section:not(#answer):not(#notes) h2")
    assert len(sections) == 8 and all(heading.text.endswith("measured") for heading in sections)
    assert page.find("html").get_attribute("lang") == "en"
    for labelled in page.find_all("canvas, svg, .stacked"):
        assert labelled.get_attribute("aria-label")


def test_zooming_panning_and_the_whole_run_again(open_page: OpenPage) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    page = open_page(*make_example_trace())
    whole = page.wait_until_drawn()
    assert whole[0] == 0 and page.count_colours() >= 5
    page.hover(0.25)
    before = whole[0] + 0.25 * (whole[1] - whole[0])
    canvas = page.find("#canvas")
    width = canvas.size["width"]
    offset = int(84 + 0.25 * (width - 84) - width / 2)
    origin = ScrollOrigin.from_element(canvas, offset, 0)
    ActionChains(page.driver).scroll_from_origin(origin, 0, -600).perform()
    near = page.wait_until_drawn()
    assert near[1] - near[0] < 0.7 * (whole[1] - whole[0])
    # the time under the pointer stays there
    assert near[0] + 0.25 * (near[1] - near[0]) == pytest.approx(before, rel=0.02)
    ActionChains(page.driver).move_to_element(canvas).click_and_hold().move_by_offset(
        -200, 0
    ).release().perform()
    panned = page.wait_until_drawn()
    assert panned[0] - near[0] == pytest.approx(200 / (width - 84) * (near[1] - near[0]), rel=0.02)
    ActionChains(page.driver).double_click(canvas).perform()
    assert page.wait_until_drawn() == whole
    page.send_keys("+++")
    near = page.wait_until_drawn()
    assert near[1] - near[0] == pytest.approx(0.6**3 * whole[1])
    page.send_keys("\ue014")  # right
    assert page.wait_until_drawn()[0] > near[0]
    page.send_keys("\ue012-0")  # left
    assert page.wait_until_drawn() == whole
    page.find("#zoom-in").click()
    begin, end = page.wait_until_drawn()
    assert end - begin == pytest.approx(whole[1] / 2)


def test_searching_hovering_and_choosing_kinds(open_page: OpenPage) -> None:
    trace, analysis = make_example_trace()
    page = open_page(trace, analysis)
    whole = page.wait_until_drawn()
    page.send_keys("13\n", "#microbatch")
    begin, end = page.wait_until_drawn()
    assert page.read_text("#status").startswith("microbatch 13: 16 events")
    assert end - begin < 0.2 * whole[1]
    events = [e for e in trace.events.rows() if e.microbatch == 13 and e.kind != "update"]
    assert all(begin < e.start_ns and e.end_ns < end for e in events)
    (forward,) = [e for e in events if e.kind == "forward" and e.stage == 1]
    page.hover(((forward.start_ns + forward.end_ns) / 2 - begin) / (end - begin), row=1)
    wait_for_answer(lambda: page.find("#tip").is_displayed())
    assert page.read_text("#tip").split("\n") == [
        "forward of microbatch 13", "stage 1, device 1", "2.1 ms from 92.0 ms (measured)", "reads weights' version 3",
        "512 KiB handed on",
    ]  # fmt: skip
    page.send_keys("\ue00c")  # Escape
    colours = page.count_colours()
    button = page.find('#legend button[data-kind="wait"]')
    button.click()
    page.wait_until_drawn()
    assert button.get_attribute("aria-pressed") == "false" and page.count_colours() < colours
    page.find("#microbatch").clear()
    page.send_keys("9999\n", "#microbatch")
    wait_for_answer(lambda: page.read_text("#status") == "no events of microbatch 9999")


def test_halves_of_backwards_and_stages_of_a_device_are_distinguished(
    open_page: OpenPage,
) -> None:
    page = open_page(*make_split_example_trace())
    kinds = [button.get_attribute("data-kind") for button in page.find_all("#legend button")]
    assert {"backward", "input gradient", "weight gradient"} < set(kinds)
    swatches = page.find_all("#legend .swatch")
    inks = {swatch.value_of_css_property("background-color") for swatch in swatches}
    assert len(inks) == len(kinds)
    page.send_keys("3\n", "#microbatch")
    page.wait_until_drawn()
    page.find("#in-view summary").click()
    wait_for_answer(lambda: "weight gradient of microbatch" in page.read_text("#in-view"))
    device = page.read_text("#devices tbody tr")
    assert "0 (" in device and "3 (" in device
    # columns of which nothing is known are left out
    assert page.read_text("#stages thead").endswith(
        "forward backward input gradient weight gradient update"
    )


def test_without_a_mouse_and_as_tables(open_page: OpenPage) -> None:
    page = open_page(*make_example_trace())
    page.send_keys("\ue015n")  # down, next
    wait_for_answer(lambda: "device 0" in page.read_text("#status"))
    first = page.read_text("#status")
    page.send_keys("nn")
    wait_for_answer(lambda: page.read_text("#status") not in ("", first))
    assert page.find("#tip").is_displayed()
    page.find("#in-view summary").click()
    wait_for_answer(lambda: len(page.find_all("#in-view tbody tr")) == 200)
    page.send_keys("13\n", "#microbatch")
    page.wait_until_drawn()
    wait_for_answer(lambda: 16 <= len(page.find_all("#in-view tbody tr")) < 100)
    assert "forward of microbatch 13" in page.read_text("#in-view")


def test_memory_traffic_and_the_other_views(open_page: OpenPage) -> None:
    trace, analysis = make_example_trace()
    longest = [{"microbatch": 7, "at_ns": 60_000_000, "duration_ns": 3_500_000}]
    counts = {"count": 2, "lost_ns": 5_000_000, "median_ns": 9e5}
    row = {"stage": 3, "kind": "forward", **counts, "longest": longest}
    page = open_page(trace, {**analysis, "stragglers": [row]})
    assert len(page.find_all("#memory figure")) == len(page.find_all("#devices tbody tr")) == STAGES
    assert len(page.find_all("#memory figure path")) == 4 * STAGES
    texts = {
        "#memory": ["device 0: peak 8 MiB at 4 ms", "microbatches under way: 0, 1, 2, 3"],
        "#traffic": ["\n0 \u00b7 20 MiB \u00b7 \u00b7\n", "100 µs (least 100 µs)"],
        "#staleness": ["0 (at most 0)"],
        "#stragglers": ["3.5 ms (microbatch 7)"],
        "#stages": ["stage 1 (from blocks.1.0)"],
    }
    for section, parts in texts.items():
        assert all(part in page.read_text(section) for part in parts), section
    waits = page.read_text("#waits tbody").split("\n")
    assert len(waits) == STAGES and waits[0].split()[1] == "\u00b7"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_and_a_narrow_window(open_page: OpenPage, scheme: str) -> None:
    page = open_page(*make_example_trace())
    run_devtools_command = page.driver.execute_cdp_cmd
    run_devtools_command(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    grounds = []
    for width in (1400, 800):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        run_devtools_command("Emulation.setDeviceMetricsOverride", size)
        page.wait_until_drawn()
        # the page is not wider than the window
        assert page.run_script("return document.documentElement.scrollWidth") <= width
        assert page.count_colours() >= 5
        grounds.append(page.run_script("return getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(251, 251, 250)" if scheme == "light" else "rgb(20, 23, 26)"] * 2
    run_devtools_command("Emulation.clearDeviceMetricsOverride", {})


def test_names_are_only_ever_text(open_page: OpenPage) -> None:
    trace, analysis = make_example_trace(HOSTILE)
    analysis["bottleneck"].update(what="link", device=3, why=HOSTILE, do=HOSTILE)
    analysis["notes"] = [HOSTILE, "</script>" + HOSTILE]
    page = open_page(trace, analysis)
    assert page.read_text("h1") == page.driver.title == f"Trace of {HOSTILE}"
    assert page.run_script("return window.hostile === undefined && document.images.length === 0")
    assert page.read_text("#bottleneck").startswith(f"The link from device 3: {HOSTILE}")
    assert HOSTILE in page.read_text("#stages") and HOSTILE in page.read_text("#answer")


def test_an_injected_script_does_not_run(browser: Any, tmp_path: Path) -> None:
    """Insert HTML as if names were not escaped: the page draws itself, and foreign code neither
    runs nor is applied."""
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
    page = BrowserPage(browser, tmp_path / "page.html")
    page.wait_until_drawn()
    assert page.count_colours() >= 5 and page.find("h1").is_displayed()
    page.run_script("for (const id of ['attribute', 'link']) document.getElementById(id).click()")
    # any effect of the clicks is visible a frame later
    page.wait_until_drawn()
    assert page.run_script("return window.hostile === undefined")
    assert page.find("#attribute").value_of_css_property("position") == "static"
    assert page.run_script("return document.baseURI").startswith("file:")
    messages = [entry["message"] for entry in browser.get_log("browser")]
    assert messages and all("Content Security Policy" in message for message in messages)
    page.assert_quiet()


def test_missing_figures_are_left_out(
    open_page: OpenPage,
) -> None:
    trace, analysis = make_example_trace()
    without_lists = {k: [] if isinstance(v, list) else v for k, v in analysis.items()}
    for known in ({}, dict.fromkeys(analysis), without_lists):
        page = open_page(trace, known)
        answer = page.read_text("#answer")
        assert "Bottleneck" in answer and "not known" not in answer
        assert page.wait_until_drawn()[1] > 0
    empty = trace._replace(
        events=trace.events.select(slice(0)),
        counters=type(trace.counters).from_rows([]),
        metadata={},
    )
    assert "0 events" in open_page(empty, {}).read_text("#subtitle")


def test_a_page_with_too_many_events_shows_an_overview_and_a_window(
    open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "MOST_EVENTS", 200)
    page = open_page(*make_example_trace())
    assert page.read_text("#window").startswith("Of 740 events the page holds 200, from ")
    page.wait_until_drawn()
    assert page.count_colours() >= 5  # the overview
    page.find("#zoom-window").click()
    begin, end = page.wait_until_drawn()
    assert 0 < begin < end and page.count_colours() >= 5
    page.send_keys(f"{MICROBATCHES - 1}\n", "#microbatch")
    wait_for_answer(lambda: page.read_text("#status").endswith("in the window"))


def test_the_page_of_two_of_pytorchs_pipelines_shows_both(browser: Any, tmp_path: Path) -> None:
    """The page names one subject, draws both timelines, and shows the critical path."""
    ranks = [make_host_records(rank, NAMES["torch"]) for rank in (0, 1)]
    run = read_and_analyze(write_ranks(tmp_path / "run", ranks))
    trace, analysis = run
    write_page(tmp_path / "page.html", trace, analysis, run)
    page = BrowserPage(browser, tmp_path / "page.html")
    assert page.read_text("#bottleneck").startswith("Stage 1 on device 1: device 1 with")
    label = page.find("#canvas").get_attribute("aria-label")
    assert label.startswith("Timeline of 4 devices")
    assert len(page.find_all("#path i")) == len(analysis["critical_path"]["pieces"])
    assert "span" in page.read_text("#comparison")


def test_the_sites_search_works_from_a_folder(browser: Any, tmp_path: Path) -> None:
    """Story: a page that is opened from a folder showed no search at all."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--config-file"]
    config = str(ROOT / "docs" / "site" / "mkdocs.yml")
    subprocess.run([*command, config, "--site-dir", str(tmp_path)], check=True)
    browser.get((tmp_path / "compare.html").as_uri())
    field = browser.find_element("css selector", "input.md-search__input")
    field.click()
    field.send_keys("staleness")
    results = "a.md-search-result__link"
    wait_for_answer(lambda: browser.find_elements("css selector", results))
    assert not browser.get_log("browser")


def test_a_schedule_plays(browser: Any, tmp_path: Path) -> None:
    schedule = make_schedule("gpipe", 3, 4, 4)
    path = tmp_path / "schedule.html"
    path.write_text(
        f"<!doctype html><meta charset=utf-8>{schedule._repr_html_()}", encoding="utf-8"
    )
    browser.get(path.as_uri())

    def read_seen_slots() -> List[bool]:
        script = "return [...document.querySelector('tr').cells].map(cell => cell.style.opacity)"
        return [opacity != "0.15" for opacity in browser.execute_script(script)][1:]

    assert all(read_seen_slots())
    browser.execute_script("const s = document.querySelector('input'); s.value = 2; s.oninput()")
    assert read_seen_slots() == [slot <= 2 for slot in range(schedule.slot_count)]
    browser.execute_script("document.querySelector('button').click()")
    wait_for_answer(lambda: all(read_seen_slots()))
