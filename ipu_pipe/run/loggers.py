"""Loggers of a run as callbacks: a CSV file, Weights & Biases, MLflow.

Each logs the config at the start, the lines of metrics.jsonl as they come, and the summary at the
end. A run that resumes from a checkpoint continues in the logger's same run.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import time
from pathlib import Path
from typing import Any

from ipu_pipe.config.compare import flatten
from ipu_pipe.errors import BadInput, guard_writing
from ipu_pipe.files import replace_nonfinite, write_text
from ipu_pipe.run.callbacks import Callback, Moment
from ipu_pipe.run.progress import flatten_line

CSV = "metrics.csv"
# MLflow's limits: parameters of a request, characters of a value
MOST_PARAMETERS = 100
MOST_LETTERS = 500


class CSVLogger(Callback):
    """Write the lines of metrics.jsonl into metrics.csv in the run's folder, a column for each
    name.
    """

    def on_start(self, now: Moment) -> None:
        """Write the lines up to the checkpoint that the run resumes from."""
        self._write_all(now.folder)

    def on_log(self, now: Moment) -> None:
        """Append a line; a name that is new adds a column to all lines."""
        values = flatten_line(replace_nonfinite(dict(now.line)))
        if values.keys() <= set(self._columns):
            with guard_writing(now.folder / CSV), open(
                now.folder / CSV, "a", newline="", encoding="utf-8"
            ) as file:
                csv.DictWriter(file, self._columns).writerow(values)
        else:
            self._write_all(now.folder)

    def _write_all(self, folder: Path) -> None:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [flatten_line(json.loads(line)) for line in lines]
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        write_text(folder / CSV, table.getvalue())


class WandbLogger(Callback):
    """Log into a run of Weights & Biases, whose files are in the folder `wandb` of the run's
    folder.

    `project` and `settings` are arguments of `wandb.init`: entity, name, tags, mode ("offline"),
    ...
    """

    def __init__(self, project: str = "ipu_pipe", **settings: Any) -> None:
        _require_package("wandb")
        self._settings = {"project": project, **settings}
        self._id: str | None = None

    def on_start(self, now: Moment) -> None:
        """Begin a run, or continue the one that the checkpoint names."""
        import wandb

        resume = {} if self._id is None else {"id": self._id, "resume": "allow"}
        settings = {"dir": str(now.folder), **resume, **self._settings}
        self._run = wandb.init(config=dict(now.config), allow_val_change=True, **settings)
        self._id = self._run.id

    def on_log(self, now: Moment) -> None:
        """Log a line under its step."""
        self._run.log(flatten_line(now.line), step=now.line["step"])

    def on_end(self, now: Moment) -> None:
        """Log the summary and finish the run."""
        self._run.summary.update(dict(now.summary or {}))
        self._run.finish()

    def state(self) -> Any:
        """Return the run's id."""
        return self._id

    def load(self, state: Any) -> None:
        """Continue the run with this id."""
        self._id = state


class MLflowLogger(Callback):
    """Log into a run of MLflow: the config as parameters, the lines as metrics, the summary's
    numbers as metrics `summary.*`.

    `tracking_uri`: a server or a database; None: MLflow's own default. `run_name` and `tags` are
    those of the run.
    """

    def __init__(
        self,
        experiment: str = "ipu_pipe",
        tracking_uri: str | None = None,
        run_name: str | None = None,
        tags: dict[str, str] | None = None,
    ) -> None:
        _require_package("mlflow")
        self._experiment = experiment
        self._uri = tracking_uri
        self._name = run_name
        self._tags = tags
        # empty until a run begins
        self._id = ""

    def on_start(self, now: Moment) -> None:
        """Begin a run, or continue the one that the checkpoint names."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient(self._uri)
        if self._id:
            client.update_run(self._id, "RUNNING")
            return
        experiment = client.get_experiment_by_name(self._experiment)
        number = (
            client.create_experiment(self._experiment)
            if experiment is None
            else experiment.experiment_id
        )
        self._id = client.create_run(number, run_name=self._name, tags=self._tags).info.run_id
        settings = {
            key: value for key, value in flatten(dict(now.config)).items() if value is not None
        }
        parameters = [Param(key, str(value)[:MOST_LETTERS]) for key, value in settings.items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            client.log_batch(self._id, params=parameters[first : first + MOST_PARAMETERS])

    def on_log(self, now: Moment) -> None:
        """Log a line under its step."""
        self._log(flatten_line(now.line), now.line["step"])

    def on_end(self, now: Moment) -> None:
        """Log the summary's numbers and finish the run."""
        self._log(flatten(dict(now.summary or {}), "summary"), now.step)
        self._client.set_terminated(self._id)

    def _log(self, values: dict[str, Any], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        numbers = {
            key: value
            for key, value in values.items()
            if type(value) in (int, float) and key != "step"
        }
        self._client.log_batch(
            self._id, [Metric(key, value, now_ms, step) for key, value in numbers.items()]
        )

    def state(self) -> Any:
        """Return the run's id."""
        return self._id

    def load(self, state: Any) -> None:
        """Continue the run with this id."""
        self._id = state


def _require_package(name: str) -> None:
    """Raise `BadInput` if a package is not installed; a folder `wandb` of an earlier run is not the
    package.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise BadInput(
            f"needs the package {name}, which is not installed: pip install 'ipu_pipe[{name}]'"
        )
