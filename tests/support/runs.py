"""Help tests of whole runs: a small config, a run's files, comparisons of weights, faults."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

import pytest
import torch
from safetensors.torch import load_file

from ipu_pipe.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
DIGITS = str(ROOT / "configs" / "mlp_digits.yaml")
needs_processes = pytest.mark.skipif(
    not torch.distributed.is_available()
    or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4),
    reason="processes need torch 2.4",
)


def list_faults(call: Callable[..., Any], *arguments: Any, **keys: Any) -> List[str]:
    """Return the faults of the `BadInput` that `call` raises, one line each."""
    with pytest.raises(BadInput) as error:
        call(*arguments, **keys)
    return error.value.faults


def read_json(path: Path) -> Any:
    """Return the value in a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_trace_file(run: Path) -> Any:
    """Return the Chrome trace that a run writes."""
    return json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))


def read_summary(run: Path) -> Any:
    """Return a run's summary."""
    return read_json(run / "summary.json")


def read_metrics(run: Path) -> List[Dict[str, Any]]:
    """Return the lines of a run's metrics."""
    return [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def read_numbers(run: Path) -> List[Dict[str, Any]]:
    """Return the lines of a run's metrics without speeds, which differ from run to run."""
    return [
        {key: value for key, value in line.items() if key != "samples_per_second"}
        for line in read_metrics(run)
    ]


def read_column(run: Path, key: str) -> List[Any]:
    """Return the values of one key of a run's metrics, from the lines that have it."""
    return [line[key] for line in read_metrics(run) if key in line]


def find_checkpoint(run: Path, step: Optional[int] = None) -> Path:
    """Return the folder of the checkpoint after `step` updates, or of the newest checkpoint."""
    folder = run / "checkpoints"
    newest = max(folder.iterdir(), key=lambda path: int(path.name.split("-")[1]))
    return newest if step is None else folder / f"step-{step}"


def read_weights(run: Path, step: Optional[int] = None) -> Dict[str, torch.Tensor]:
    """Return the weights of a run's checkpoint."""
    return load_file(find_checkpoint(run, step) / "model.safetensors")


def read_state(run: Path, step: Optional[int] = None) -> Dict[str, torch.Tensor]:
    """Return the weights and the optimizer state of a run's checkpoint."""
    files = {
        name: load_file(find_checkpoint(run, step) / f"{name}.safetensors")
        for name in ("model", "optimizer")
    }
    return {
        f"{name}/{key}": value for name, tensors in files.items() for key, value in tensors.items()
    }


def assert_same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> None:
    """Assert that two state dicts are bitwise equal."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def assert_states_close(
    a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], atol: float
) -> None:
    """Assert that two state dicts are equal within `atol`."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=0, atol=atol), name


def assert_same_weights(a: Path, b: Path) -> None:
    """Assert that the newest checkpoints of two runs have bitwise equal weights."""
    assert_same(read_weights(a), read_weights(b))


def assert_same_state(a: Path, b: Path, step: Optional[int] = None) -> None:
    """Assert that two runs' checkpoints have bitwise equal weights and optimizer state."""
    assert_same(read_state(a, step), read_state(b, step))


def assert_close_losses(a: Path, b: Path, rel: float) -> None:
    """Assert that the training losses of two runs are equal within `rel`."""
    assert read_column(a, "train_loss") == pytest.approx(read_column(b, "train_loss"), rel=rel)
