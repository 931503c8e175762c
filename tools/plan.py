"""Which configuration to run, and why: python tools/plan.py configs/resnet50_ipu4.yaml --hardware
pod16 --devices 8
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from ipu_pipe import cli  # noqa: E402

if __name__ == "__main__":
    cli.run("plan")
