"""Analysis of a run's trace: python tools/analyze.py runs/digits --png timeline.png"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from ipu_pipe import cli  # noqa: E402

if __name__ == "__main__":
    cli.run("analyze")
