"""Test the file of the analysis page: it loads nothing from outside, its data are complete, and
names in it are inert. tests/browser/ opens it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest

from ipu_pipe.report import page as page_module
from ipu_pipe.report.analysis import picture
from ipu_pipe.report.page import write_page
from ipu_pipe.trace.events import KINDS, Counter, Counters, Event, Events, Trace
from tests.page_example import HOSTILE, make_example_trace


def write_and_read_page(path: Path, *args: Any) -> str:
    write_page(path, *args)
    return path.read_text(encoding="utf-8")


def parse_page_data(page: str) -> Dict[str, Any]:
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    content: Dict[str, Any] = json.loads(text)
    return content


def unpack_column(column: Dict[str, str]) -> List[Any]:
    values: List[Any] = np.frombuffer(
        zlib.decompress(base64.b64decode(column["base64"])), "<" + column["type"]
    ).tolist()
    return values


def test_the_page_holds_all_of_the_trace(tmp_path: Path) -> None:
    trace, analysis = make_example_trace()
    content = parse_page_data(write_and_read_page(tmp_path / "p.html", trace, analysis))
    assert (
        content["analysis"] == json.loads(json.dumps(analysis))
        and content["trace"]["metadata"] == trace.metadata
    )
    columns = {name: unpack_column(column) for name, column in content["trace"]["columns"].items()}
    start = np.cumsum(columns["start"])
    order = np.lexsort((trace.events.end, trace.events.start))
    assert start.tolist() == trace.events.start[order].tolist()
    assert (start + columns["end"]).tolist() == trace.events.end[order].tolist()
    for name in set(columns) - {"start", "end"}:
        assert columns[name] == getattr(trace.events, name)[order].tolist(), name
    assert content["trace"]["kinds"] == list(KINDS)
    curves = [curve for curve in content["trace"]["curves"] if curve["device"] == 0]
    assert {curve["name"] for curve in curves} == {"memory"} and len(curves[0]["values"]) == 4


def test_times_of_a_wall_clock_count_from_the_begin_of_the_run(tmp_path: Path) -> None:
    begin = 1_765_000_000_123_456_789
    events = [
        Event(0, 0, "forward", m, begin + 10 * m, begin + 10 * m + 9, 0, 1 << 40) for m in range(3)
    ]
    content = parse_page_data(
        write_and_read_page(
            tmp_path / "p",
            Trace(
                Events.from_rows(events), Counters.from_rows([Counter(0, "loss", begin + 7, 1)]), {}
            ),
            {},
        )
    )
    columns = content["trace"]["columns"]
    assert (unpack_column(columns["start"]), unpack_column(columns["end"])) == (
        [0, 10, 10],
        [9, 9, 9],
    )
    assert (
        unpack_column(columns["bytes"]) == [1 << 40] * 3 and columns["microbatch"]["type"] == "u1"
    )
    assert content["trace"]["curves"][0]["times"] == [7]
    content = parse_page_data(
        write_and_read_page(
            tmp_path / "p",
            Trace(Events.from_rows(events), Counters.from_rows([]), {}),
            {"begin_ns": begin - 5},
        )
    )
    assert unpack_column(content["trace"]["columns"]["start"])[0] == 5


def test_the_page_requests_nothing_from_a_network(tmp_path: Path) -> None:
    page = write_and_read_page(tmp_path / "p", *make_example_trace())
    page = page.replace("http://www.w3.org/2000/svg", "")  # a name, which no browser opens
    assert not re.search(
        r"https?:|//[a-z]+\.|@import|url\(|\bsrc=|fetch\(|XMLHttpRequest|WebSocket", page
    )
    assert re.findall(r"<link[^>]*>", page) == ['<link rel="icon" href="data:,">']
    assert "default-src 'none'" in page and "/* " not in re.sub(
        r"<style>.*?</style>", "", page, flags=re.DOTALL
    )
    assert len(page) < 200_000


def test_the_policy_allows_the_one_script_and_the_one_style(tmp_path: Path) -> None:
    """The content security policy allows one script and one style by hash. With 'unsafe-inline'
    a script that a bug let into the page would run."""
    page = write_and_read_page(tmp_path / "p", *make_example_trace("</script>" + HOSTILE))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    allowed = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert "unsafe" not in policy and allowed["default-src"] == "'none'"
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode()
        assert allowed[f"{tag}-src"] == f"'sha256-{digest}'"
    # the policy stops styles in attributes
    assert not re.search(r"<[^>]* style=", page)


def test_the_picture_has_the_colours_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind of event has one color in picture and page. Story: backwards were green in the
    picture and orange on the page, where sends were green."""
    axes = pytest.importorskip("matplotlib.axes")
    page = write_and_read_page(tmp_path / "p", *make_example_trace())
    light, dark = (
        re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part) for part in page.split("@media")[:2]
    )
    assert {name for name, _ in light} >= {kind.replace(" ", "-") for kind in KINDS}
    assert [name for name, _ in light] == [name for name, _ in dark]
    color_by_label: Dict[str, str] = {}
    draw_bars = axes.Axes.broken_barh

    def record_bars(*args: Any, **keys: Any) -> Any:
        color_by_label.setdefault(str(keys["label"]), keys["facecolor"])
        return draw_bars(*args, **keys)

    monkeypatch.setattr(axes.Axes, "broken_barh", record_bars)
    trace, analysis = make_example_trace()
    events = [
        Event(0, 0, kind, 0, 10 * place, 10 * place + 9, 0, None)
        for place, kind in enumerate(KINDS)
    ]
    trace = trace._replace(events=Events.from_rows(events))
    picture.draw_timeline(tmp_path / "p.png", trace, {**analysis, "begin_ns": 0})
    assert color_by_label == {kind: dict(light)[kind.replace(" ", "-")] for kind in KINDS}


def test_names_cannot_end_the_data(tmp_path: Path) -> None:
    trace, analysis = make_example_trace("</script>" + HOSTILE + "<!--")
    analysis["notes"] = ["</SCRIPT >", "\u2028"]
    page = write_and_read_page(tmp_path / "p", trace, analysis)
    assert parse_page_data(page)["trace"]["metadata"]["run"] == trace.metadata["run"]
    assert parse_page_data(page)["analysis"]["notes"][0] == "</SCRIPT >"
    assert "hostile = true</script>" not in page and "</SCRIPT >" not in page and "onerror" in page
    assert page.count("<script") == page.count("</script>") == 2


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    trace, analysis = make_example_trace()
    analysis.update(utilization=float("nan"), imbalance=float("inf"))
    content = parse_page_data(write_and_read_page(tmp_path / "p", trace, analysis))["analysis"]
    assert content["utilization"] is None and content["imbalance"] is None


def test_a_page_of_many_events_has_a_window_and_an_overview(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(page_module, "MOST_EVENTS", 4)
    monkeypatch.setattr(page_module, "OVERVIEW_BINS", 4)
    events = [Event(0, 0, "forward", m, 100 * m, 100 * m + 50, 0, None) for m in range(8)]
    events += [Event(0, 0, "wait", m, 100 * m + 50, 100 * m + 100, -1, None) for m in range(4)]
    content = parse_page_data(
        write_and_read_page(
            tmp_path / "p", Trace(Events.from_rows(events), Counters.from_rows([]), {}), {}
        )
    )["trace"]
    assert content["count"] == 12 and len(unpack_column(content["columns"]["kind"])) == 4
    assert content["window_ns"] == [200, 350]
    (overview,) = content["overview"]
    shares = {
        kind: np.array(unpack_column(share)) / 255 for kind, share in overview["shares"].items()
    }
    assert content["span_ns"] == 750
    exact = {"forward": [100] * 4, "wait": [87.5, 87.5, 25, 0]}  # of each 187.5 ns
    assert shares.keys() == exact.keys()
    for kind, expected in exact.items():
        assert shares[kind].tolist() == pytest.approx(
            [time / 187.5 for time in expected], abs=0.003
        )
    monkeypatch.setattr(page_module, "MOST_EVENTS", 12)
    assert (
        "overview"
        not in parse_page_data(
            write_and_read_page(
                tmp_path / "p", Trace(Events.from_rows(events), Counters.from_rows([]), {}), {}
            )
        )["trace"]
    )


def test_a_long_curve_keeps_its_greatest_value(tmp_path: Path) -> None:
    counters = [Counter(0, "weights (bytes)", t, float(t == 1234)) for t in range(5000)]
    trace = Trace(Events.from_rows([]), Counters.from_rows(counters), {})
    (curve,) = parse_page_data(write_and_read_page(tmp_path / "p", trace, {}))["trace"]["curves"]
    assert len(curve["times"]) == page_module.MOST_CURVE_POINTS and 1234 in curve["times"]
    assert sum(curve["values"]["weights (bytes)"]) == 1.0
