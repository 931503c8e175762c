"""Run the papers' experiments: python tools/reproduce.py pb_resnet20"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.install_end_at_interrupt()  # before the imports that take time

from ipu_pipe.errors import run_command  # noqa: E402
from tools.experiments.reproduce import main  # noqa: E402

if __name__ == "__main__":
    run_command(main)
