"""Test the example's LightningModule: Lightning's limits, logs, checkpoints and resumes equal those
of an own loop."""

from __future__ import annotations

import copy
import importlib.util
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ipu_pipe
from ipu_pipe.errors import BadInput
from tests.support.runs import assert_same

# imported by the tests themselves, since it takes a second
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs lightning"
)

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "lightning_loop.py"
EPOCH = 5  # batches
generator = torch.Generator().manual_seed(1)
SAMPLES = TensorDataset(
    torch.randn(8 * EPOCH, 64, generator=generator), torch.arange(8 * EPOCH) % 10
)


@pytest.fixture(scope="module")
def module_class(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the example's module class, extended to collect its losses; its script has run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("example"))
        patch.setattr(sys, "argv", [str(EXAMPLE), "1"])
        Digits = runpy.run_path(str(EXAMPLE))["Digits"]

    class Recorded(Digits):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__()
            self.losses: List[float] = []

        def log(self, name: str, value: Any, **keys: Any) -> None:
            super().log(name, value, **keys)
            if name == "loss":
                self.losses.append(value)

    return Recorded


def fit_module(
    module: Any,
    folder: Path,
    steps: int,
    callbacks: Any = (),
    validate: bool = False,
    trainer: Any = None,
    **keys: Any,
) -> Any:
    """Train for a number of steps without shuffling. Return the trainer."""
    import lightning

    settings = {
        "default_root_dir": folder, "max_steps": steps, "accelerator": "cpu", "logger": False, "num_sanity_val_steps": 0,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": bool(callbacks),
    }  # fmt: skip
    lightning_trainer = lightning.Trainer(callbacks=list(callbacks), **settings, **(trainer or {}))
    loader = DataLoader(SAMPLES, batch_size=8)
    with warnings.catch_warnings():
        # of few workers and the like
        warnings.simplefilter("ignore")
        lightning_trainer.fit(module, loader, loader if validate else None, **keys)
    return lightning_trainer


def run_own_loop(module: Any, steps: int, drains: int, **keys: Any) -> Any:
    """Train the module's net by a loop without Lightning, with a drain after each `drains` steps.

    Return states and losses.
    """
    optimizer = torch.optim.SGD(module.net.parameters(), lr=0.02, momentum=0.9)
    pipe = ipu_pipe.Pipeline(module.net, cross_entropy, optimizer, stages=3, **keys)
    states: Dict[int, Any] = {}
    updates: List[Any] = []
    batches = list(DataLoader(SAMPLES, batch_size=8))
    for k in range(steps):
        updates += pipe.step(*batches[k % EPOCH])
        if (k + 1) % drains == 0:
            updates += pipe.drain()
            state = module.net.state_dict(), optimizer.state_dict()["state"]
            states[k + 1] = copy.deepcopy(state)
    updates += pipe.close()
    return states, [update.loss for update in updates]


def make_checkpoint_callback(folder: Path, **keys: Any) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **keys)


def patch_pipeline_arguments(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Replace arguments of the example's pipelines."""
    make = ipu_pipe.Pipeline

    def make_changed(*arguments: Any, **keys: Any) -> ipu_pipe.Pipeline:
        return make(*arguments, **{**keys, **changes})

    monkeypatch.setattr(ipu_pipe, "Pipeline", make_changed)


@pytest.mark.parametrize("method", ["pipedream", "local_sgd"])
def test_steps_and_checkpoints_are_those_of_an_own_loop(
    method: str, module_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are written in the middle of an epoch, with updates in flight.

    A drain changes the weights of LocalSGD, which averages its replicas early, in place: Lightning
    has read them before.
    """
    args = {"local_steps": 3, "replicas": 2} if method == "local_sgd" else None
    expected, module = module_class(), module_class()
    states, losses = run_own_loop(expected, 13, 4, method=method, method_args=args)
    patch_pipeline_arguments(monkeypatch, method=method, method_args=args)
    saving = make_checkpoint_callback(tmp_path, every_n_train_steps=4)
    trainer = fit_module(module, tmp_path, 13, [saving])
    assert trainer.global_step == module.pipe.updates == module.pipe.finished == 13
    # the last drain's are not logged
    assert module.losses == losses[: len(module.losses)] and len(module.losses) >= 11
    assert_same(expected.net.state_dict(), module.net.state_dict())
    assert [*states] == [4, 8, 12]
    for step, (weights, momenta) in states.items():
        saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert saved["global_step"] == saved["pipeline"]["updates"] == step
        assert_same({f"net.{n}": value for n, value in weights.items()}, saved["state_dict"])
        for number, momentum in momenta.items():
            assert_same(momentum, saved["optimizer_states"][0]["state"][number])


@pytest.mark.parametrize("method", ["pipedream", "pipemare", "local_greedy"])
def test_a_resumed_fit_equals_an_uninterrupted_one(
    method: str, module_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was written during validation, which Lightning runs in inference mode."""
    patch_pipeline_arguments(monkeypatch, method=method)
    whole, resumed = module_class(), module_class()
    best = make_checkpoint_callback(tmp_path, monitor="accuracy", mode="max")
    keys = {"validate": True, "trainer": {"check_val_every_n_epoch": 2}}
    fit_module(whole, tmp_path, 4 * EPOCH, [best], **keys)
    middle, end = (tmp_path / f"step={step}.ckpt" for step in (10, 20))
    resumed.net[0].weight.data.zero_()
    trainer = fit_module(resumed, tmp_path, 4 * EPOCH, ckpt_path=str(middle), **keys)
    assert trainer.global_step == resumed.pipe.updates == 4 * EPOCH
    assert_same(whole.state_dict(), resumed.state_dict())
    assert_same(torch.load(end, weights_only=True)["state_dict"], resumed.state_dict())


def test_incompatible_wrappers_are_refused(module_class: Any, tmp_path: Path) -> None:
    module = module_class()
    fit_module(module, tmp_path, 2)
    # Lightning's own wrapper, and the view, for another pipeline
    for optimizer, words in (
        (module.optimizers(), "a LightningOptimizerView: wraps an OptimizerView"),
        (module.pipe.optimizer, "an OptimizerView: wraps a SGD"),
    ):
        with pytest.raises(BadInput, match=f"^optimizer: {words}"):
            ipu_pipe.Pipeline(module.net, cross_entropy, optimizer)
