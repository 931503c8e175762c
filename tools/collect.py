"""Compare methods on the same work: python tools/collect.py configs/resnet34_ipu4.yaml --out
runs/ipu4
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from ipu_pipe import cli  # noqa: E402

if __name__ == "__main__":
    cli.run("collect")
