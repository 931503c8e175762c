"""All experiments of tools/reproduce.py by name.

To add one that trains configurations by seeds, write a file in configs/experiments/ (ipu_pipe.studies.training_grid). To add one
that compares learning rates on a known objective, write a record in `ipu_pipe.studies.step_grids`. To add a table of predictions,
write a record and add it here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Sequence

from ipu_pipe.errors import BadInput
from ipu_pipe.shipped import find_configs
from ipu_pipe.studies.experiment import Experiment
from ipu_pipe.studies.history_delays import HistoryDelayStudy
from ipu_pipe.studies.predicted_2bw import TABLE_2BW
from ipu_pipe.studies.predicted_local import MEMORY_TABLE, SPEEDUP_TABLE
from ipu_pipe.studies.step_grids import STEP_GRIDS
from ipu_pipe.studies.training_grid import load_grid


def list_experiments() -> List[Experiment]:
    """Return all experiments; raise `BadInput` if one of the files is wrong."""
    return [*(load_grid(path) for path in list_files().values()), *list_records().values()]


def list_files() -> Dict[str, Path]:
    """Return the files in configs/experiments/ by name."""
    return {path.stem: path for path in sorted((find_configs() / "experiments").glob("*.yaml"))}


def list_records() -> Dict[str, Experiment]:
    """Return the experiments that are records in this folder, by name."""
    records: Sequence[Experiment] = (SPEEDUP_TABLE, MEMORY_TABLE, TABLE_2BW, HistoryDelayStudy(), *STEP_GRIDS.values())
    return {record.name: record for record in records}


def find_experiments(names: Sequence[str]) -> List[Experiment]:
    """Return the experiments with these names or in these files; "all" alone means all. Raise `BadInput` for other names."""
    if list(names) == ["all"]:
        return list_experiments()
    files, records = list_files(), list_records()
    experiments: List[Experiment] = []
    for name in names:
        path = files.get(name, Path(name))
        if name not in records and not path.is_file():
            raise BadInput(f"EXPERIMENT: {name}: must be one of {', '.join([*files, *records])}, all, or a file")
        experiments.append(records[name] if name in records else load_grid(path))
    return experiments
