"""Callbacks: the user's own code, called after updates, evaluations and checkpoints and at the end;
it may end the run.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from pydantic import ValidationError
from torch import nn

from ipu_pipe.config.faults import format_faults
from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import EarlyStoppingConfig, Entry
from ipu_pipe.errors import BadInput, RunFault, raise_faults
from ipu_pipe.job.factories import (
    call_entry,
    check_arguments,
    collect_results,
    explain_wrong_call,
    resolve_listed,
)
from ipu_pipe.job.metrics import prefers_greater
from ipu_pipe.job.record import PlannedJob
from ipu_pipe.job.user_code import raise_attributed
from ipu_pipe.text import describe_kind, list_some, show, suggest


@dataclass(frozen=True)
class Stop:
    """A callback's return value that ends the run; `reason` appears in `summary.json` and in the
    closing lines.

    Microbatches in the pipeline are completed. Then the run is evaluated, saved and summarized like
    a run of that planned length.
    """

    reason: str = ""


@dataclass(frozen=True)
class Moment:
    """The state of a run that callbacks get.

    step: the number of updates done; epoch: the same in epochs (None for data without a length)
    losses: the mean training losses of the newest update, one for each block that has its own, the
        model's last; may be empty; None if the update's microbatches have no weight (`loss_weight`)
    rate: the learning rate of the newest update
    metrics: the newest evaluation by the names of `metrics.jsonl` (test_loss, test_accuracy, ...);
    empty before the first
    model: the whole model with the newest weights, None if its stages are in several processes or
    on other devices
    checkpoint: the folder of the newest checkpoint
    stopped: at the end, the reason why the run ended sooner than planned
    config: the keys of the resolved config; folder: the folder of the run
    line: the newest line of metrics.jsonl; summary: at the end, the content of `summary.json`
    gradients: the gradients of the newest update, only in `on_gradients`
    """

    step: int
    epoch: Optional[float]
    losses: Tuple[Optional[float], ...]
    rate: float
    samples_per_second: Optional[float]
    metrics: Mapping[str, Optional[float]]
    model: Optional[nn.Module]
    checkpoint: Optional[Path]
    stopped: Optional[str] = None
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    line: Mapping[str, Any] = field(default_factory=dict)
    summary: Optional[Mapping[str, Any]] = None
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> Optional[float]:
        """The loss of the whole model's output, None if it is not known."""
        return self.losses[-1] if self.losses else None


class Callback:
    """The base class of callbacks; each method may return a `Stop`, else None.

    A `Stop` from `on_step` or `on_gradients` ends the run after that update; from other methods, at
    the next evaluation or checkpoint. On processes only rank 0 calls callbacks, with the results of
    all ranks. `state` and `load` save and restore a callback for resumed runs. If a class has
    `wants_model = True`, `Moment.model` is the whole model with the newest weights also on
    processes, in `on_start`, `on_evaluation`, `on_checkpoint` and `on_end`.
    """

    wants_model = False

    def on_start(self, now: Moment) -> Optional[Stop]:
        """Handle the start of a run, new or resumed, before it trains or evaluates."""

    def on_log(self, now: Moment) -> Optional[Stop]:
        """Handle a line of metrics.jsonl that has been written."""

    def on_gradients(self, now: Moment) -> Optional[Stop]:
        """Handle the gradients with which the optimizer's update began; called before `on_step`,
        with the same moment.
        """

    def on_step(self, now: Moment) -> Optional[Stop]:
        """Handle the end of an update."""

    def on_evaluation(self, now: Moment) -> Optional[Stop]:
        """Handle the end of an evaluation, except the one before training."""

    def on_checkpoint(self, now: Moment) -> Optional[Stop]:
        """Handle a checkpoint that has been written."""

    def on_end(self, now: Moment) -> Optional[Stop]:
        """Handle the end of a run without a fault, when all its files are written."""

    def state(self) -> Any:
        """Return the state for checkpoints as JSON values, None for no state."""

    def load(self, state: Any) -> None:
        """Restore what `state` returned."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """The callbacks of a run, in order. `stop_reason`: why one of them asked to end the run, None
    if none did.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)
        self.stop_reason: Optional[str] = None

    @property
    def watches_updates(self) -> bool:
        """Whether any callback handles the end of an update."""
        # a hook that nobody overrides must not make each update's loss be read
        return self.watches_gradients or self._overrides("on_step")

    @property
    def watches_gradients(self) -> bool:
        """Whether any callback handles the gradients of an update."""
        return self._overrides("on_gradients")

    def _overrides(self, method: str) -> bool:
        # an object may have hooks among its attributes, too
        hooks = [getattr(callback, method) for callback in self.callbacks]
        return any(getattr(h, "__func__", None) is not getattr(Callback, method) for h in hooks)

    @property
    def wants_model(self) -> bool:
        """Whether any callback wants the whole model where the pipeline is empty."""
        return any(callback.wants_model for callback in self.callbacks)

    def call(self, method: str, now: Moment) -> None:
        """Call a method of all callbacks, even after one asks for the end; add the place to their
        exceptions.
        """
        for callback in self.callbacks:
            name = f"{type(callback).__qualname__}.{method}"
            result = _call(callback, method, now, where=f" after update {now.step}")
            # the class in place of an object is a likely slip, and what it means is clear
            if result is Stop or isinstance(result, Stop):
                # the first reason stays, whatever the callbacks after it say
                self.stop_reason = (
                    self.stop_reason or getattr(result, "reason", "") or f"{name} asked for it"
                )
            elif result is not None:
                raise RunFault(
                    f"callback {name}: returned a {type(result).__name__}: must return None or "
                    f"ipu_pipe.Stop(reason)"
                )

    def list_best_steps(self) -> List[int]:
        """List the steps whose checkpoints callbacks want to keep (their attribute `best_step`)."""
        # an attribute of any callback: the base class need not have it
        steps = (getattr(callback, "best_step", None) for callback in self.callbacks)
        return [step for step in steps if isinstance(step, int)]

    def get_restored_step(self) -> Optional[int]:
        """Return the best step of the first callback that wants its weights at the end, None for
        the newest weights.
        """
        restoring = Callbacks(
            [callback for callback in self.callbacks if getattr(callback, "restore_best", False)]
        )
        return next(iter(restoring.list_best_steps()), None)

    def collect_states(self) -> List[Any]:
        """Collect the states of all callbacks for a checkpoint. Raise `RunFault` if JSON cannot
        hold one.
        """
        states = []
        for callback in self.callbacks:
            name = type(callback).__qualname__
            state = _call(callback, "state")
            try:
                # tried here, where the callback can be named; the manifest is written later, with
                # all states in one
                json.dumps(state, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise RunFault(
                    f"callback {name}.state: cannot be put into a checkpoint as JSON: {error}"
                ) from error
            states.append({"name": name, "state": state})
        return states

    def load(self, saved: Any) -> None:
        """Load each saved state into the callback of the same class name; several of one name are
        matched in order.
        """
        # None stands for no state, which a `load` need not understand
        unmatched = [entry for entry in saved or () if entry["state"] is not None]
        for callback in self.callbacks:
            entry = next(
                (entry for entry in unmatched if entry["name"] == type(callback).__qualname__), None
            )
            if entry is not None:
                # so that the next callback of this name takes the next entry
                unmatched.remove(entry)
                _call(callback, "load", entry["state"])


def _call(callback: Callback, method: str, *args: Any, where: str = "") -> Any:
    try:
        return getattr(callback, method)(*args)
    # it comes from the user, not from the callback
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise_attributed(error, f"callback {type(callback).__qualname__}.{method}{where}")


def make_callbacks(
    config: Config, given: Optional[Sequence[Any]], empty: bool = False
) -> List[Callback]:
    """Return the callbacks `given` in Python, or make the config's, and add its early stopping.

    `empty`: make objects of the user's classes whose constructors do not run, for a dry run. Raise
    `BadInput`, with one line for each fault, also if `restore_best` cannot work.
    """

    def make(value: Union[str, Entry]) -> Tuple[Any, str]:
        function, args, place = resolve_listed(value, "callbacks")
        if not empty or function is EarlyStopping:
            return call_entry(function, args, place), place
        check_arguments(function, args, place)
        if isinstance(function, type) and issubclass(function, Callback):
            # a dry run asks only for the class's methods, and a constructor may open files or log
            # in
            return object.__new__(function), place
        # what a function would return is not known, so a callback that does nothing stands for it
        return Callback(), place

    results = (
        [(one, "callbacks") for one in given]
        if given is not None
        else collect_results(config.callbacks, make)
    )
    faults = []
    hooks = ", ".join(HOOKS)
    for callback, place in results:
        if not isinstance(callback, Callback):
            faults.append(
                f"{place}: {describe_kind(callback)}: must be an object of a class derived from "
                f"ipu_pipe.Callback"
            )
            continue
        unknown = [
            name
            # an object may have hooks among its attributes, too, which only the constructor sets
            for name in dir(type(callback) if empty else callback)
            if name.startswith("on_") and name not in HOOKS
        ]
        faults += [
            f"{place}: {type(callback).__qualname__}.{why}" for why in _list_wrong_methods(callback)
        ]
        if unknown:
            method = f"{type(callback).__qualname__}.{list_some(unknown)}"
            faults.append(f"{place}: {method}: unknown method: a run calls only {hooks}")
    raise_faults(faults)
    callbacks = [callback for callback, _ in results]
    if config.early_stopping is not None:
        callbacks.append(EarlyStopping(**config.early_stopping.model_dump()))
    # an object whose constructor did not run has no attributes
    constructed = [one for one in callbacks if not empty or isinstance(one, EarlyStopping)]
    if any(getattr(callback, "restore_best", False) for callback in constructed):
        if config.checkpoint is None:
            raise BadInput(
                "checkpoint: null: early_stopping.restore_best needs the checkpoint of the best "
                "evaluation"
            )
        if config.ema is not None:
            why = (
                "cannot be combined with ema, because evaluations use its averages: use "
                "ema.safetensors of the run's folder"
            )
            raise BadInput(f"early_stopping.restore_best: true: {why}")
    return callbacks


def _list_wrong_methods(callback: Callback) -> List[str]:
    """List the methods of a callback that cannot be called as a run calls them."""
    arguments = {**dict.fromkeys(HOOKS, ("now",)), "state": (), "load": ("state",)}
    # found before the run: a wrong signature would end it at its first evaluation
    reasons = {
        name: explain_wrong_call(getattr(callback, name), *names)
        for name, names in arguments.items()
    }
    return [f"{name}: {why}" for name, why in reasons.items() if why]


def require_supported_callbacks(job: PlannedJob, callbacks: Sequence[Callback]) -> None:
    """Raise `BadInput` with one line for each callback that cannot work in the job, and for a wrong
    `evaluate.best`.
    """
    metric_keys = [("evaluate.best", job.config.evaluate.best)]
    if job.plateau is not None:
        metric_keys.append(("lr_schedule.metric", job.config.lr_schedule.metric or "loss"))
    metric_keys += [
        ("early_stopping.metric", one.metric) for one in callbacks if isinstance(one, EarlyStopping)
    ]
    known = ["loss", *(metric.name for metric in job.metrics)]
    faults = [
        f"{key}: {metric}: no evaluation computes it: must be one of "
        f"{', '.join(known)}{suggest(metric, known)}"
        for key, metric in metric_keys
        if metric not in known
    ]
    if not job.evaluation_interval and any(isinstance(one, EarlyStopping) for one in callbacks):
        faults.append(
            "early_stopping: follows evaluations, and this run has no interval: set evaluate.every "
            "or evaluate.steps"
        )
    why = ""
    hidden = job.config.backend.facts.why_gradients_are_hidden
    if hidden:
        why = f"{hidden}: use another backend"
    elif job.method.rounds is not None or job.method.history is not None:
        why = f"{job.method.name} steps replicas or stages one by one: use another method"
    for one in callbacks if why else ():
        if Callbacks([one]).watches_gradients:
            faults.append(f"callbacks: {type(one).__qualname__}.on_gradients: {why}")
    raise_faults(faults)


class EarlyStopping(Callback):
    """End a run whose evaluations no longer improve.

    The run ends after `patience` evaluations in a row whose `metric` (loss, accuracy, ... as in
    `metrics.jsonl`, without test_) is not better than the best by more than `min_delta`. `mode`:
    min, max, or None to choose by the metric's name. The checkpoint of the best evaluation is kept.
    `restore_best`: load its weights into the model when the run ends.
    """

    # for objects whose constructor did not run
    metric = "loss"

    def __init__(
        self,
        metric: str = "loss",
        mode: Optional[str] = None,
        patience: int = 3,
        min_delta: float = 0.0,
        restore_best: bool = False,
    ) -> None:
        values = {
            "metric": metric,
            "mode": mode,
            "patience": patience,
            "min_delta": min_delta,
            "restore_best": restore_best,
        }
        try:
            # by the section of a config, so that Python and YAML have the same limits
            config = EarlyStoppingConfig.model_validate(values)
        except ValidationError as error:
            raise BadInput(
                format_faults(error.errors(), {}, "EarlyStopping", EarlyStoppingConfig, {})
            ) from None
        self.metric = config.metric
        self.patience = config.patience
        self.min_delta = config.min_delta
        self.restore_best = config.restore_best
        self.mode = mode or ("max" if prefers_greater(metric) else "min")
        self.best: Optional[float] = None
        self.best_step: Optional[int] = None
        self.waited = 0

    def on_evaluation(self, now: Moment) -> Optional[Stop]:
        """Compare with the best evaluation so far."""
        # the test set must not decide when to stop if there is another
        split = "validation" if "validation_loss" in now.metrics else "test"
        name = f"{split}_{self.metric}"
        if name not in now.metrics:
            # without test_ or validation_, as the key has it
            measured = ", ".join(
                name.partition("_")[2] for name, value in now.metrics.items() if value is not None
            )
            raise BadInput(
                f"early_stopping.metric: {self.metric}: no evaluation computes it: must be one of "
                f"{measured}"
            )
        value = now.metrics[name]
        # undefined for the samples of this evaluation, which then says nothing
        if value is None:
            return None
        sign = 1 if self.mode == "max" else -1
        # a value that is not finite would stay the best, and a checkpoint cannot hold it
        if math.isfinite(value) and (
            self.best is None or sign * (value - self.best) > self.min_delta
        ):
            self.best = value
            self.best_step = now.step
            self.waited = 0
            return None
        self.waited += 1
        if self.waited < self.patience:
            return None
        if self.best is None:
            return Stop(f"{name} is not finite, for {self.waited} evaluations")
        return Stop(
            f"{name} is not better than {self.best:.6g} at step {self.best_step} "
            f"for {self.waited} evaluations"
        )

    def state(self) -> Dict[str, Any]:
        """Return the best evaluation and the number of evaluations since."""
        return {
            "metric": self.metric,
            "best": self.best,
            "best_step": self.best_step,
            "waited": self.waited,
        }

    def load(self, state: Dict[str, Any]) -> None:
        """Continue from a saved state, if its metric is the same. Raise `BadInput` if it is none of
        `state`.
        """
        numbers = {
            "best": (float, int, type(None)),
            "best_step": (int, type(None)),
            "waited": (int,),
        }
        if not isinstance(state, Mapping) or not all(
            isinstance(state.get(key), kinds) for key, kinds in numbers.items()
        ):
            raise BadInput(
                f"checkpoint: the state of early stopping: {show(state)}: must have "
                f"{', '.join(numbers)}"
            )
        # the best value of another metric says nothing
        if state.get("metric") == self.metric:
            self.best = state["best"]
            self.best_step = state["best_step"]
            self.waited = int(state["waited"])
