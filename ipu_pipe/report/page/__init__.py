"""One HTML page that shows a trace and what its analysis says: nothing is fetched, so that it opens from a file anywhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Dict

from ipu_pipe.files import write
from ipu_pipe.report.page.embedding import embedded
from ipu_pipe.trace.events import Trace

_PARTS = ("page.css", "data.js", "timeline.js", "figures.js", "page.js")  # the page's style and scripts, in this order


def write_page(path: Path, trace: Trace, analysis: Dict[str, Any]) -> None:
    """Write the page, whole or not at all. `analysis`: as `tools/analyze.py --json` prints it; what it lacks or has as null, the
    page says is not known. Raises RunFault where the disk refuses."""
    data = json.dumps(_plain({"analysis": analysis, "trace": embedded(trace, analysis)}), allow_nan=False)
    # within a script's element nothing may begin a tag: what a run is called is not ours to trust
    data = data.replace("<", "\\u003c")
    here = Path(__file__).parent
    text = (here / "page.html").read_text(encoding="utf-8")
    for part in _PARTS:
        text = text.replace(f"/* {part} */", (here / part).read_text(encoding="utf-8"), 1)
    before, after = text.split("/* data */")
    write(path, before + data + after)


def _plain(value: Any) -> Any:
    """As JSON can hold it: not a number is null."""
    if isinstance(value, dict):
        return {str(key): _plain(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(held) for held in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
