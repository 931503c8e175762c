"""A shell's completion of ipu-pipe: python tools/completion.py bash"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from ipu_pipe import cli  # noqa: E402

if __name__ == "__main__":
    cli.run("completion")
