"""The weights of the best evaluation, in the caller's model when a run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional

import pytest
import torch

import ipu_pipe
from ipu_pipe.errors import BadInput
from tests.support.processes import run_in_group
from tests.support.runs import needs_processes, read_summary, read_weights
from tests.test_going_on import OWN, make_counting_model
from tests.test_loop import OFTEN
from tests.test_train import config

# of a falling loss the greatest is the best: that of the first evaluation, after 4 updates, and the third ends the run
STOPS = "early_stopping={mode: max, patience: 2, restore_best: true}"
KEYS = [
    *OFTEN,
    'stages=["4"]',
    "log.tensorboard=false",
    "evaluate.subset=32",
    "data.subset=256",
    "backend.threads=1",
]


def went(
    out: Path, method: str, *over: str, model: Optional[torch.nn.Module] = None, **how: Any
) -> Dict[str, Any]:
    sets = [*KEYS, "optimizer.lr=0.01", f"method={method}", *OWN[method], *over]
    return ipu_pipe.train(
        config(*sets), out, model=make_counting_model() if model is None else model, **how
    )


def holds(model_state: Dict[str, Any], weights: Dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(value, weights[name].to(value.dtype)) for name, value in model_state.items()
    )


class Sees(ipu_pipe.Callback):
    def on_end(self, now: ipu_pipe.Moment) -> None:
        self.model = {name: value.clone() for name, value in now.model.state_dict().items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("method", OWN)
def test_the_model_has_the_best_weights_when_the_run_ends(
    method: str, tmp_path: Path, capsys: Any
) -> None:
    model, sees = make_counting_model(), Sees()
    report = went(tmp_path / "run", method, STOPS, model=model, callbacks=[sees])
    step, last = report["restored_step"], report["steps"]
    assert (step, last) == ((16, 24) if method == "local_greedy" else (4, 12))
    line = f"restored the best weights, of step {step}: {tmp_path}/run/checkpoints/step-{step}"
    assert capsys.readouterr().out.rstrip().splitlines()[-1] == line
    best, newest = read_weights(tmp_path / "run", step), read_weights(tmp_path / "run", last)
    assert holds(model.state_dict(), best) and not holds(model.state_dict(), newest)
    assert sees.model.keys() == best.keys() and holds({"1.weight": sees.model["1.weight"]}, best)
    assert read_summary(tmp_path / "run")["restored_step"] == step
    # all but the model is as without
    without = make_counting_model()
    other = went(
        tmp_path / "other", method, STOPS.replace("true", "false"), model=without, quiet=True
    )
    assert other["final"] == report["final"] and "restored_step" not in other
    assert holds(without.state_dict(), newest)


def test_the_newest_may_be_the_best_and_a_run_need_not_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_counting_model()
    report = went(
        tmp_path / "run", "pipedream", STOPS.replace("max", "min"), "steps=8", model=model
    )
    assert report["restored_step"] == 8 and report["stopped"] is None
    assert capsys.readouterr().out.rstrip().endswith("the newest weights are the best: step 8")
    assert holds(model.state_dict(), read_weights(tmp_path / "run", 8))
    first = make_counting_model()
    arguments = {"callbacks": [ipu_pipe.EarlyStopping(mode="max", patience=9, restore_best=True)]}
    assert (
        went(tmp_path / "whole", "pipedream", "steps=8", model=first, **arguments)["restored_step"]
        == 4
    )
    assert holds(first.state_dict(), read_weights(tmp_path / "whole", 4))
    # a run that goes on knows which was the best
    second = make_counting_model()
    arguments = {
        "callbacks": [ipu_pipe.EarlyStopping(mode="max", patience=9, restore_best=True)],
        "resume": True,
    }
    assert (
        went(tmp_path / "whole", "pipedream", "steps=12", model=second, **arguments)[
            "restored_step"
        ]
        == 4
    )
    assert holds(second.state_dict(), read_weights(tmp_path / "whole", 4))


def test_a_wrong_kind_is_reported() -> None:
    with pytest.raises(BadInput, match="early_stopping.restore_best"):
        config("early_stopping={restore_best: 3}")


def train_each_method(rank: int, folder: Path) -> None:
    """Train as a rank of a group of two, and save what the caller's model holds."""
    for method in OWN:
        model = make_counting_model()
        over = ["backend.name=distributed", "backend.deadline=20", STOPS]
        report = went(folder / method, method, *over, model=model, quiet=True)
        assert report["restored_step"] < report["steps"]
        torch.save(model.state_dict(), folder / f"{method}-{rank}.pt")


@pytest.mark.slow
@needs_processes
def test_every_process_has_the_best_weights(tmp_path: Path) -> None:
    run_in_group(2, train_each_method, tmp_path)
    for method in OWN:
        emulated = make_counting_model()
        step = went(tmp_path / f"{method}-emulated", method, STOPS, model=emulated, quiet=True)[
            "restored_step"
        ]
        best = read_weights(tmp_path / method, step)
        for rank in range(2):
            saved = torch.load(tmp_path / f"{method}-{rank}.pt")
            assert holds(saved, best) and holds(saved, emulated.state_dict()), (method, rank)
