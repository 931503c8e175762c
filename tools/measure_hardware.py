"""Measure this machine, for --hardware this: python tools/measure_hardware.py"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.end_at_once()  # before the imports that take time

from ipu_pipe.cli.measure_hardware import main  # noqa: E402
from ipu_pipe.errors import run_command  # noqa: E402

if __name__ == "__main__":
    run_command(main)
