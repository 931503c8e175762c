"""Find the experiments of tools/reproduce.py by name.

To add one that trains configurations by seeds, write a file in configs/experiments/
(`tools.experiments.training_grids`). To add one that compares learning rates on a known objective,
write a record in `tools.experiments.vector_grids`. To add a table of predictions, write a record
and add it here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Sequence

from ipu_pipe.errors import BadInput
from ipu_pipe.shipped import find_configs
from ipu_pipe.text import suggest
from tools.experiments.experiment import Experiment
from tools.experiments.history_delays import DELAYS
from tools.experiments.predicted_2bw import TABLE_2BW
from tools.experiments.predicted_local import MEMORY_TABLE, SPEEDUP_TABLE
from tools.experiments.predicted_pipemare import COLUMNS_TABLE
from tools.experiments.training_grids import load_experiment
from tools.experiments.vector_grids import VECTOR_GRIDS


def find_experiments(names: Sequence[str]) -> List[Experiment]:
    """Return the experiments with these names or in these files; without names all. Raise
    `BadInput` for other names.
    """
    vector_experiments = [grid.make_experiment() for grid in VECTOR_GRIDS.values()]
    tables = (SPEEDUP_TABLE, MEMORY_TABLE, TABLE_2BW, COLUMNS_TABLE, DELAYS)
    records = {experiment.name: experiment for experiment in (*tables, *vector_experiments)}
    files: Dict[str, Path] = {
        path.stem: path for path in sorted((find_configs() / "experiments").glob("*.yaml"))
    }
    experiments: List[Experiment] = []
    for name in names or [*files, *records]:
        path = files.get(name, Path(name))
        if name not in records and not path.is_file():
            known = [*files, *records]
            raise BadInput(
                f"EXPERIMENT: {name}: must be one of {', '.join(known)}, all, or a "
                f"file{suggest(name, known)}"
            )
        experiments.append(records[name] if name in records else load_experiment(path))
    return experiments
