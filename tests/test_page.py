"""Test the file of the analysis page: it loads nothing from outside, its data are complete, and
names in it are inert. tests/browser/ opens it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np
import pytest

from ipu_pipe.report import page as page_module
from ipu_pipe.report.page import write_page
from ipu_pipe.schedule.colours import COLOURS
from ipu_pipe.trace.events import KINDS, Counter, Counters, Event, Events, Trace
from tests.page_example import HOSTILE, make_example_trace


def write_and_read_page(path: Path, *args: Any) -> str:
    write_page(path, *args)
    return path.read_text(encoding="utf-8")


def parse_page_data(page: str) -> Dict[str, Any]:
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    return dict(json.loads(text))


def unpack_column(column: Dict[str, str]) -> List[Any]:
    content = zlib.decompress(base64.b64decode(column["base64"]))
    return list(np.frombuffer(content, "<" + column["type"]).tolist())


def make_trace(events: List[Event], counters: Sequence[Counter] = ()) -> Trace:
    return Trace(Events.from_rows(events), Counters.from_rows(counters), {})


def read_page_trace(path: Path, trace: Trace, analysis: Any = None) -> Dict[str, Any]:
    """Write the page of a trace and return its data of it."""
    return dict(parse_page_data(write_and_read_page(path, trace, analysis or {}))["trace"])


def test_the_page_holds_all_of_the_trace(tmp_path: Path) -> None:
    trace, analysis = make_example_trace()
    content = parse_page_data(write_and_read_page(tmp_path / "p.html", trace, analysis))
    assert content["analysis"] == json.loads(json.dumps(analysis))
    content = content["trace"]
    assert content["metadata"] == trace.metadata
    columns = {name: unpack_column(column) for name, column in content["columns"].items()}
    start = np.cumsum(columns["start"])
    order = np.lexsort((trace.events.end, trace.events.start))
    assert start.tolist() == trace.events.start[order].tolist()
    assert (start + columns["end"]).tolist() == trace.events.end[order].tolist()
    for name in set(columns) - {"start", "end"}:
        assert columns[name] == getattr(trace.events, name)[order].tolist(), name
    assert content["kinds"] == list(KINDS)
    curves = [curve for curve in content["curves"] if curve["device"] == 0]
    assert {curve["name"] for curve in curves} == {"memory"} and len(curves[0]["values"]) == 4


def test_times_of_a_wall_clock_count_from_the_begin_of_the_run(tmp_path: Path) -> None:
    begin = 1_765_000_000_123_456_789
    starts = [begin + 10 * m for m in range(3)]
    events = [Event(0, 0, "forward", 0, start, start + 9, 0, 1 << 40) for start in starts]
    trace = make_trace(events, [Counter(0, "loss", begin + 7, 1)])
    content = read_page_trace(tmp_path / "p", trace)
    columns = {name: unpack_column(column) for name, column in content["columns"].items()}
    assert (columns["start"], columns["end"]) == ([0, 10, 10], [9, 9, 9])
    assert columns["bytes"] == [1 << 40] * 3 and content["curves"][0]["times"] == [7]
    assert content["columns"]["microbatch"]["type"] == "u1"
    content = read_page_trace(tmp_path / "p", trace, {"begin_ns": begin - 5})
    assert unpack_column(content["columns"]["start"])[0] == 5


def test_the_page_requests_nothing_from_a_network(tmp_path: Path) -> None:
    page = write_and_read_page(tmp_path / "p", *make_example_trace())
    page = page.replace("http://www.w3.org/2000/svg", "")  # a name, which no browser opens
    assert not re.search(
        r"https?:|//[a-z]+\.|@import|url\(|\bsrc=|fetch\(|XMLHttpRequest|WebSocket", page
    )
    assert re.findall(r"<link[^>]*>", page) == ['<link rel="icon" href="data:,">']
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


def test_a_kind_of_event_has_a_light_and_a_dark_colour(tmp_path: Path) -> None:
    """Story: backwards were green in the picture and orange on the page, where sends were green."""
    page = write_and_read_page(tmp_path / "p", *make_example_trace())
    for number, part in enumerate(page.split("@media")[:2]):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part))
        kinds = {kind: colours[kind.replace(" ", "-")] for kind in KINDS}
        assert kinds == {kind: COLOURS[kind][number] for kind in KINDS}


def test_names_cannot_end_the_data(tmp_path: Path) -> None:
    trace, analysis = make_example_trace("</script>" + HOSTILE + "<!--")
    analysis.update(notes=["</SCRIPT >"], utilization=float("nan"), imbalance=float("inf"))
    page = write_and_read_page(tmp_path / "p", trace, analysis)
    content = parse_page_data(page)
    assert content["trace"]["metadata"]["run"] == trace.metadata["run"]
    assert content["analysis"]["notes"][0] == "</SCRIPT >"
    # no numbers are null
    assert content["analysis"]["utilization"] is content["analysis"]["imbalance"] is None
    assert "hostile = true</script>" not in page and "</SCRIPT >" not in page and "onerror" in page
    assert page.count("<script") == page.count("</script>") == 2


def test_a_page_of_many_events_has_a_window_and_an_overview(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(page_module, "OVERVIEW_BINS", 4)
    events = [Event(0, 0, "forward", m, 100 * m, 100 * m + 50, 0, None) for m in range(8)]
    events += [Event(0, 0, "wait", m, 100 * m + 50, 100 * m + 100, -1, None) for m in range(4)]
    monkeypatch.setattr(page_module, "MOST_EVENTS", 12)
    assert "overview" not in read_page_trace(tmp_path / "p", make_trace(events))
    monkeypatch.setattr(page_module, "MOST_EVENTS", 4)
    content = read_page_trace(tmp_path / "p", make_trace(events))
    assert content["count"] == 12 and len(unpack_column(content["columns"]["kind"])) == 4
    assert (content["window_ns"], content["span_ns"]) == ([200, 350], 750)
    (overview,) = content["overview"]
    exact = {"forward": [100] * 4, "wait": [87.5, 87.5, 25, 0]}  # of each 187.5 ns
    assert overview["shares"].keys() == exact.keys()
    for kind, share in overview["shares"].items():
        times = np.array(unpack_column(share)) * 187.5 / 255
        assert times.tolist() == pytest.approx(exact[kind], abs=0.6)


def test_a_long_curve_keeps_its_greatest_value(tmp_path: Path) -> None:
    counters = [Counter(0, "weights (bytes)", t, float(t == 1234)) for t in range(5000)]
    (curve,) = read_page_trace(tmp_path / "p", make_trace([], counters))["curves"]
    assert len(curve["times"]) == page_module.MOST_CURVE_POINTS and 1234 in curve["times"]
    assert sum(curve["values"]["weights (bytes)"]) == 1.0
