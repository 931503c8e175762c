"""Print the schedule of a training method: python tools/schedule.py pipedream --stages 4
--microbatches 8
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from ipu_pipe import cli  # noqa: E402

if __name__ == "__main__":
    cli.run("schedule")
