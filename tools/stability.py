"""Which learning rates are stable under delay: python tools/stability.py configs/mlp_digits.yaml"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from ipu_pipe import cli  # noqa: E402

if __name__ == "__main__":
    cli.run("stability")
