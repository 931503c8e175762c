"""Test the shipped loggers with the real packages, offline: they record what the run's files do."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from ipu_pipe.config.load import load_config
from ipu_pipe.run.callbacks import make_callbacks
from ipu_pipe.run.train import train
from tests.support.runs import DIGITS, list_faults, read_json, read_metrics, read_summary

SETS = [
    "method=pipedream", "stages=2", "gradient_accumulation=1", "micro_batch_size=8", "data.subset=256", "data.test_subset=64",
    "log.tensorboard=false", "log.trace=false", "backend.threads=1", "log.every=1", "checkpoint.every=2",
]  # fmt: skip


WANDB = {"project": "tests", "mode": "offline", "settings": {"silent": True, "console": "off"}}


@pytest.fixture(scope="module")
def logged_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a run of four updates, resumed for two more, with all installed loggers."""
    out = tmp_path_factory.mktemp("loggers") / "run"
    mlflow = {"experiment": "tests", "tracking_uri": (out.parent / "store").as_uri()}
    loggers: List[Any] = ["ipu_pipe:CSVLogger"]
    for name, args in (("Wandb", WANDB), ("MLflow", mlflow)):
        if importlib.util.find_spec(name.lower()) is not None:
            loggers.append({"entry": f"ipu_pipe:{name}Logger", "args": args})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "MLFLOW_ALLOW_FILE_STORE", "true"
        )  # a database would need packages that mlflow-skinny lacks
        for steps in (4, 6):
            sets = [*SETS, f"steps={steps}", f"callbacks={json.dumps(loggers)}"]
            train(load_config(DIGITS, sets), out, quiet=True, resume=steps == 6)
        yield out


def test_csv_has_the_lines_of_metrics_jsonl(logged_run: Path) -> None:
    with open(logged_run / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    expected_rows = [
        {key: repr(value) for key, value in line.items()} for line in read_metrics(logged_run)
    ]
    assert [{key: value for key, value in row.items() if value} for row in rows] == expected_rows
    assert len(rows) >= 8 and {"train_loss", "test_accuracy"} <= rows[0].keys()


def test_csv_gives_each_block_a_column_and_is_overwritten(tmp_path: Path) -> None:
    sets = [*SETS, "method=local_greedy", "steps=2", "callbacks=['ipu_pipe:CSVLogger']"]
    for _ in range(2):
        train(load_config(DIGITS, sets), tmp_path / "run", quiet=True, overwrite=True)
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [
        line["block_train_loss"] for line in read_metrics(tmp_path / "run") if "train_loss" in line
    ]
    assert [
        [float(row[f"block_train_loss/{i}"]) for i in (0, 1)] for row in rows if row["train_loss"]
    ] == losses


def test_wandb_has_config_lines_and_summary_in_one_run(logged_run: Path) -> None:
    pytest.importorskip("wandb")
    files = sorted((logged_run / "wandb").glob("offline-run-*/run-*.wandb"))
    identifier = read_json(logged_run / "checkpoints" / "step-6" / "manifest.json")["callbacks"][1][
        "state"
    ]
    # the second start continues the run of the first
    assert [file.name for file in files] == [f"run-{identifier}.wandb"] * 2
    logged = b"".join(file.read_bytes() for file in files)
    lines = [line for line in read_metrics(logged_run) if "train_loss" in line]
    assert len(lines) == 6 and all(repr(line["train_loss"]).encode() in logged for line in lines)
    final = read_summary(logged_run)["final"]["test_loss"]
    assert (
        b"micro_batch_size" in logged
        and b"planned_utilization" in logged
        and repr(final).encode() in logged
    )


def test_mlflow_has_config_lines_and_summary_in_one_run(logged_run: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    client = MlflowClient((logged_run.parent / "store").as_uri())
    (logged,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert logged.info.status == "FINISHED"
    for key in ("train_loss", "test_loss", "lr"):
        history = sorted(
            (one.step, one.value) for one in client.get_metric_history(logged.info.run_id, key)
        )
        lines: Dict[int, float] = {
            line["step"]: line[key] for line in read_metrics(logged_run) if key in line
        }
        assert history == sorted(lines.items())
    assert (
        logged.data.params["micro_batch_size"] == "8"
        and logged.data.params["data.name"] == "digits"
    )
    final = read_summary(logged_run)["final"]
    assert logged.data.metrics["summary.final.test_loss"] == final["test_loss"]


@pytest.mark.parametrize("name", ["Wandb", "MLflow"])
def test_a_missing_package_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / name.lower()).mkdir()  # W&B leaves such a folder behind: it is not the package
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, name.lower(), raising=False)
    config = load_config(DIGITS, [f"callbacks=['ipu_pipe:{name}Logger']"])
    (fault,) = list_faults(make_callbacks, config, None)
    assert (
        fault.startswith(f"callbacks.ipu_pipe:{name}Logger: ")
        and f"ipu_pipe[{name.lower()}]" in fault
    )


def test_arguments_of_loggers_are_checked() -> None:
    pytest.importorskip("mlflow")
    config = load_config(
        DIGITS, ["callbacks=[{entry: 'ipu_pipe:MLflowLogger', args: {project: x}}]"]
    )
    (fault,) = list_faults(make_callbacks, config, None)
    assert fault.startswith("callbacks.ipu_pipe:MLflowLogger.project: x: ")
