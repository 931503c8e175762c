"""Check that the caller's model has the weights of the best evaluation when a run ends."""

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
from tests.test_train import make_short_config

# the greatest value of a falling loss is the best: that of the first evaluation, after 4 updates; the third ends the run
STOPS = "early_stopping={mode: max, patience: 2, restore_best: true}"
KEYS = [
    *OFTEN,
    'stages=["4"]',
    "log.tensorboard=false",
    "evaluate.subset=32",
    "data.subset=256",
    "backend.threads=1",
]


def train_own_model(
    out: Path, method: str, *overrides: str, model: Optional[torch.nn.Module] = None, **keys: Any
) -> Dict[str, Any]:
    settings = [*KEYS, "optimizer.lr=0.01", f"method={method}", *OWN[method], *overrides]
    return ipu_pipe.train(
        make_short_config(*settings),
        out,
        model=make_counting_model() if model is None else model,
        **keys,
    )


def has_weights(model_state: Dict[str, Any], weights: Dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(value, weights[name].to(value.dtype)) for name, value in model_state.items()
    )


class FinalWeights(ipu_pipe.Callback):
    def on_end(self, now: ipu_pipe.Moment) -> None:
        self.model = {name: value.clone() for name, value in now.model.state_dict().items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("method", OWN)
def test_the_model_has_the_best_weights_when_the_run_ends(
    method: str, tmp_path: Path, capsys: Any
) -> None:
    model, final_weights = make_counting_model(), FinalWeights()
    report = train_own_model(
        tmp_path / "run", method, STOPS, model=model, callbacks=[final_weights]
    )
    best_step, last_step = report["restored_step"], report["steps"]
    assert (best_step, last_step) == ((16, 24) if method == "local_greedy" else (4, 12))
    line = f"restored the best weights, of step {best_step}: {tmp_path}/run/checkpoints/step-{best_step}"
    assert capsys.readouterr().out.rstrip().splitlines()[-1] == line
    best_weights, last_weights = (
        read_weights(tmp_path / "run", best_step),
        read_weights(tmp_path / "run", last_step),
    )
    assert has_weights(model.state_dict(), best_weights) and not has_weights(
        model.state_dict(), last_weights
    )
    assert final_weights.model.keys() == best_weights.keys() and has_weights(
        {"1.weight": final_weights.model["1.weight"]}, best_weights
    )
    assert read_summary(tmp_path / "run")["restored_step"] == best_step
    # everything except the model equals a run without it
    plain_model = make_counting_model()
    plain_report = train_own_model(
        tmp_path / "other", method, STOPS.replace("true", "false"), model=plain_model, quiet=True
    )
    assert plain_report["final"] == report["final"] and "restored_step" not in plain_report
    assert has_weights(plain_model.state_dict(), last_weights)


def test_the_newest_may_be_the_best_and_a_run_need_not_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_counting_model()
    report = train_own_model(
        tmp_path / "run", "pipedream", STOPS.replace("max", "min"), "steps=8", model=model
    )
    assert report["restored_step"] == 8 and report["stopped"] is None
    assert capsys.readouterr().out.rstrip().endswith("the newest weights are the best: step 8")
    assert has_weights(model.state_dict(), read_weights(tmp_path / "run", 8))
    first = make_counting_model()
    arguments = {"callbacks": [ipu_pipe.EarlyStopping(mode="max", patience=9, restore_best=True)]}
    assert (
        train_own_model(tmp_path / "whole", "pipedream", "steps=8", model=first, **arguments)[
            "restored_step"
        ]
        == 4
    )
    assert has_weights(first.state_dict(), read_weights(tmp_path / "whole", 4))
    # a resumed run remembers the best evaluation
    second = make_counting_model()
    arguments = {
        "callbacks": [ipu_pipe.EarlyStopping(mode="max", patience=9, restore_best=True)],
        "resume": True,
    }
    assert (
        train_own_model(tmp_path / "whole", "pipedream", "steps=12", model=second, **arguments)[
            "restored_step"
        ]
        == 4
    )
    assert has_weights(second.state_dict(), read_weights(tmp_path / "whole", 4))


def test_a_restore_best_of_another_type_is_reported() -> None:
    with pytest.raises(BadInput, match="early_stopping.restore_best"):
        make_short_config("early_stopping={restore_best: 3}")


def train_each_method(rank: int, folder: Path) -> None:
    """Train each method as a rank of a group of two, and save the weights of the caller's model."""
    for method in OWN:
        model = make_counting_model()
        overrides = ["backend.name=distributed", "backend.deadline=60", STOPS]
        report = train_own_model(folder / method, method, *overrides, model=model, quiet=True)
        assert report["restored_step"] < report["steps"]
        torch.save(model.state_dict(), folder / f"{method}-{rank}.pt")


@pytest.mark.slow
@needs_processes
def test_every_process_has_the_best_weights(tmp_path: Path) -> None:
    run_in_group(2, train_each_method, tmp_path)
    for method in OWN:
        emulated = make_counting_model()
        step = train_own_model(
            tmp_path / f"{method}-emulated", method, STOPS, model=emulated, quiet=True
        )["restored_step"]
        best = read_weights(tmp_path / method, step)
        for rank in range(2):
            saved = torch.load(tmp_path / f"{method}-{rank}.pt")
            assert has_weights(saved, best) and has_weights(saved, emulated.state_dict()), (
                method,
                rank,
            )
