"""XLA devices train to the emulator's weights; what the backend does not support is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest

from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.pipeline.flow import Flow
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from tests.staged_models import make_sorting
from tests.support.runs import DIGITS, ROOT

jax = pytest.importorskip("jax", reason="xla needs jax: pip install 'ipu_pipe[xla]'")

from ipu_pipe.backends.xla import devices as xla_devices  # noqa: E402
from ipu_pipe.backends.xla.slots import SlotPlayer  # noqa: E402

SLOT = ["backend.program=slot", "method=pipelined_backprop", "log.trace=null"]
# the methods whose old versions are those of the table; others hold corrected copies
UNCORRECTED = ("gpipe", "zb_h1", "pipedream", "pipedream_2bw", "pipelined_backprop")


def run_cases(work: str, *cases: str) -> Dict[str, Any]:
    """Return the results of tests/xla_runs.py, whose process begins jax with its own devices;
    without `cases` of all that it has.
    """
    command = [sys.executable, "-m", "tests.xla_runs", work, *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr
    results: Dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert results and (not cases or sorted(results) == sorted(cases))
    return results


def assert_within(results: Dict[str, Any], bound: float) -> None:
    """Assert that all differences are below a bound."""
    for case, result in results.items():
        assert max(result.values()) < bound, (case, result)


@pytest.mark.slow
def test_four_devices_train_to_the_emulators_weights_and_one_to_the_same_bits() -> None:
    for case, result in run_cases("compare").items():
        assert result.pop("one_device") is True, case
        assert max(result.values()) < 1e-12, (case, result)


@pytest.mark.slow
def test_all_slots_train_to_the_emulators_weights() -> None:
    assert_within(run_cases("compare_slots"), 1e-12)


@pytest.mark.slow
def test_four_devices_train_to_the_emulators_weights_in_single_precision() -> None:
    for case, result in run_cases("compare_float32", "pipelined_backprop").items():
        # beyond double precision's differences, so that it is single precision
        assert 1e-9 < result["weights"] < 2e-6, (case, result)


@pytest.mark.slow
def test_loops_train_to_the_emulators_weights() -> None:
    """Positions, masks, states and dropout; tests/test_families.py has more models of Hugging Face's."""
    assert_within(run_cases("compare_loop"), 1e-12)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_numbers_and_on_xla_with_the_same_bits() -> None:
    for case, result in run_cases("go_on").items():
        bound = 1e-12 if "emulator" in case else 0
        assert result["state"] <= bound and result["losses"] <= bound, (case, result)
        assert result["moved"] > 1e-6, (case, result)


@pytest.mark.slow
def test_slots_after_a_drain_need_no_other_program() -> None:
    for case, result in run_cases("drain_slots", "accumulated").items():
        assert result["links"] and result["programs"] == 1, (case, result)


@pytest.mark.slow
def test_another_process_compiles_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    programs = []
    for _ in range(2):
        run_cases("compare", "gpipe")
        programs.append({file.name for file in tmp_path.rglob("*-cache")})
    assert programs[0] and programs[0] == programs[1]


@pytest.mark.slow
def test_the_report_counts_the_old_versions_that_are_alive() -> None:
    for case, result in run_cases("count_versions").items():
        assert result["report"] == result["alive"], (case, result)
        if case in UNCORRECTED:
            assert result["report"] == result["table"], (case, result)


@pytest.mark.slow
def test_a_trace_says_when_each_action_ran(tmp_path: Path) -> None:
    settings = ["backend.name=xla", "backend.devices=4", "epochs=null", "steps=4"]
    run = str(tmp_path / "run")
    train = [sys.executable, "tools/train.py", DIGITS, "--out", run, "--set", *settings]
    subprocess.run(train, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (start,) = json.loads((tmp_path / "run" / "record.json").read_text())
    assert start["versions"]["jax"] == jax.__version__
    analyze = [sys.executable, "tools/analyze.py", run, "--json"]
    done = subprocess.run(analyze, cwd=ROOT, check=True, capture_output=True, text=True)
    figures = json.loads(done.stdout)
    devices = figures["devices"]
    assert [(row["index"], row["stages"]) for row in devices] == [(s, [s]) for s in range(4)]
    assert all(row["busy_ns"] for row in devices)
    # the host waits for each action, so that no two run at once
    busy = sum(row["busy_ns"] for row in devices)
    assert not figures["modelled"] and busy <= figures["span_ns"]
    assert any(note.startswith("xla: in updates that are traced") for note in figures["notes"])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["method=local_greedy"], "method: local_greedy: xla has one loss"),
        (["method=local_sgd"], "method: local_sgd: xla has one replica"),
        (["method=randomized_pipedream"], "method: randomized_pipedream: xla runs pipelines"),
        # Story: a second line proposed a scope of the clip, which xla refuses as well.
        (["clip={norm: 1.0}"], "clip.scope: global: xla does not clip: use backend.name: emulator"),
        (["replicas=2"], "replicas"),
        (["optimizer={name: torch.optim.RMSprop}"], "optimizer.name"),
        (["precision=bfloat16"], "precision"),
        (["backend.devices=64"], "backend.devices"),
        (["backend.platform=tpu"], "backend.platform: tpu: jax has no such platform here"),
        (["backend.program=slot"], "backend.program: slot: method: pipedream"),
        (["backend.program=slot"], "backend.program: slot: log.trace"),
        ([*SLOT, "method_args={warmup: {epochs: 1}}"], "backend.program: slot: method_args.warmup"),
        (
            [
                *SLOT,
                "method_args={weight_prediction: {form: difference}}",
                "optimizer.name=adamw",
                "optimizer.momentum=null",
            ],
            "backend.program: slot: method_args.weight_prediction",
        ),
    ],
)
def test_what_xla_does_not_support_is_refused(settings: list, key: str) -> None:
    jax.devices("cpu")  # jax has begun, so it makes no more devices
    with pytest.raises(BadInput) as caught:
        build(load_config(DIGITS, ["backend.name=xla", *settings]))
    assert any(fault.startswith(key) for fault in caught.value.faults), caught.value.faults
    assert "clip" not in key or len(caught.value.faults) == 1


def test_a_device_that_is_only_described_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenstorrent's mock returns zeros without a word."""
    devices = jax.devices("cpu")
    monkeypatch.setattr(jax, "devices", lambda platform: devices)
    settings = ["backend.name=xla", "backend.platform=tt", "precision=float64"]
    with pytest.raises(BadInput, match="precision: float64: tt devices have none"):
        build(load_config(DIGITS, settings))
    measure = xla_devices.measure_product_error.__wrapped__
    monkeypatch.setattr(xla_devices, "measure_product_error", measure)
    put = jax.device_put
    zeros = lambda tensors, device: put(jax.tree.map(np.zeros_like, tensors), device)  # noqa: E731
    monkeypatch.setattr(jax, "device_put", zeros)
    assert measure(devices[0]) > 0.1
    with pytest.raises(BadInput, match="backend.platform: tt: the first device multiplies wrong"):
        build(load_config(DIGITS, settings[:2]))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("__version__ = '0.4.30'", "error: backend.name: xla: jax 0.4.30 is too old: pip install"),
        ("raise ImportError('no jaxlib')", "error: backend.name: xla: needs jax (no jaxlib): pip"),
    ],
)
def test_a_jax_that_does_not_serve_is_one_line(source: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(source)
    out = tmp_path / "run"
    command = [sys.executable, "tools/train.py", DIGITS, "--out", str(out)]
    done = subprocess.run(
        [*command, "--set", "backend.name=xla"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1 and not out.exists()


def test_what_xla_does_not_support_leaves_a_run_alone(tmp_path: Path) -> None:
    """An operation without an entry is found before `--overwrite` removes the run that is there."""
    train(load_config(DIGITS, ["epochs=null", "steps=1"]), tmp_path / "run", quiet=True)
    before = (tmp_path / "run" / "summary.json").read_bytes()
    config = load_config(DIGITS, ["backend.name=xla", "stages=2"])
    with pytest.raises(BadInput, match=r"model: stage 1: xla has no 2 \(aten.sort"):
        train(config, tmp_path / "run", model=make_sorting(), quiet=True, overwrite=True)
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


@pytest.mark.parametrize(
    ("settings", "is_slot"),
    [
        ([], True),
        (["backend.program=action"], False),
        (["log.trace=null", "method=pipedream"], False),
        (["stages=4"], False),
    ],
)
def test_programs_of_slots_are_the_default_for_equal_blocks(settings: list, is_slot: bool) -> None:
    jax.devices("cpu")
    blocks = ["model.args={inputs: 64, width: 64, layers: 6, classes: 10}", "stages=6"]
    common = ["backend.name=xla", "method=pipelined_backprop", "log.trace=null"]
    job = build(load_config(DIGITS, [*common, *blocks, *settings]))
    assert isinstance(Flow(job).engine._player, SlotPlayer) is is_slot  # type: ignore[attr-defined]
