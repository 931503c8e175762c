"""Train a config: `train`, `check` and `evaluate_checkpoint` for users, and the start or resumption
of a run.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from torch import nn

from ipu_pipe.backends.ranks import is_main, run_on_main
from ipu_pipe.backends.table import launch
from ipu_pipe.config.compare import classify_changes, keep_recorded_choices
from ipu_pipe.config.load import load_recorded
from ipu_pipe.config.schema import Config
from ipu_pipe.data import DataSource
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.files import parse_path
from ipu_pipe.job.evaluation import evaluate
from ipu_pipe.job.overrides import Overrides
from ipu_pipe.job.record import PlannedJob
from ipu_pipe.job.user_code import attribute_faults
from ipu_pipe.launcher import read_launch
from ipu_pipe.model.loss import Loss, LossWeight
from ipu_pipe.model.randomness import restore_random_states
from ipu_pipe.model.restoring import restore_modes
from ipu_pipe.pipeline.optimizer import OptimizerHandle
from ipu_pipe.report.provenance import fingerprint_data
from ipu_pipe.run.build import build
from ipu_pipe.run.callbacks import Callback, make_callbacks, require_supported_callbacks
from ipu_pipe.run.loop import TrainingLoop
from ipu_pipe.run.progress import Progress
from ipu_pipe.run.resume import check_run, choose_step, read_data_record
from ipu_pipe.run.setup import set_up
from ipu_pipe.store import checkpoint
from ipu_pipe.store.folder import (
    check_folder,
    is_restarted,
    is_to_go_on,
    lock_folder,
    parse_folder,
    read_summary,
)
from ipu_pipe.text import describe_kind
from ipu_pipe.update.optimizer import MODES, list_parts, make_factory_of
from ipu_pipe.update.rates import SchedulerFactory


def train(
    config: Config,
    out: str | Path,
    *,
    model: nn.Module | None = None,
    data: DataSource | None = None,
    loss: Loss | str | None = None,
    loss_weight: LossWeight | str | None = None,
    output: int | str | Callable[[Any], Any] | None = None,
    optimizer: Any = None,
    optimizer_args: Mapping[str, Any] | None = None,
    lr_scheduler: SchedulerFactory | None = None,
    metrics: None | Sequence[Any] | Mapping[str, Any] = None,
    callbacks: Sequence[Callback] | None = None,
    resume: bool = False,
    resume_from: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    keep_dtype: bool = False,
) -> dict[str, Any]:
    """Train by `config` and write the run into the folder `out`. Return the summary (as in
    `summary.json`).

    `model`, `data`, `loss`, `optimizer`, `lr_scheduler`, `metrics` and `callbacks` replace the
    config's entries (docs/loop.md describes each). `loss` may also be a name as in the config.
    `loss_weight` is the weight of a microbatch in the mean loss of
    its update: a function of the labels, or tokens. `output` selects the part of the model's output
    that the loss takes, if the output is an object, a mapping or a tuple: a name or an index as in
    `model.output`, or a function of the output. `resume` continues from the newest checkpoint, with
    the same numbers as without the interruption; `resume_from` continues from the checkpoint of
    that step and deletes later ones. If a launcher restarts its processes (`torchrun
    --max-restarts`), their run continues as with `resume`.

    Raise `BadInput` before anything is written if the job is not possible, `RunFault` if the loss
    is not finite. Exceptions of the model, loss, data source or optimizer pass unchanged, with the
    place (a UserFault) at the end of their chain of causes.

    On the distributed backend every process makes the same call; rank 0 writes, and all return the
    summary. A `model` is trained in place in the config's precision. At the end its modules have
    their modes and, unless `keep_dtype`, their dtypes again. On processes every rank has the whole
    model at the end; after a fault each rank has its own stage, and NaN elsewhere.
    """
    objects = Overrides(
        model, data, loss, output, optimizer, lr_scheduler, metrics, callbacks, loss_weight
    )
    if not isinstance(config, Config):
        raise BadInput(
            f"config: {describe_kind(config)}: must be the result of ipu_pipe.configure or "
            f"ipu_pipe.load_config"
        )
    _require_kinds(objects)
    objects.require_entries(config)
    if overwrite and (resume or resume_from is not None):
        raise BadInput(
            "overwrite: True: cannot be combined with resume, which keeps the existing run"
        )
    out = parse_folder(out)
    if model is not None:
        # an open pipeline would go on with weights that this run trains
        OptimizerHandle.require_unshared(model)
    # before anything asks which rank this is
    launch(
        config, {"out": out, "resume": resume, "resume_from": resume_from, "overwrite": overwrite}
    )
    if optimizer is not None:
        objects = objects._replace(optimizer=make_factory_of(optimizer, optimizer_args))
    elif optimizer_args is not None:
        raise BadInput("optimizer_args: need optimizer=..., the class to which they belong")
    with attribute_faults(lambda: "before training"):
        # before the folder is taken, which a fault in them must leave as it is
        run_callbacks = make_callbacks(config, callbacks)
    # config.yaml must say what Python gave, and not name an optimizer that was not used
    config = objects.describe_in(config)
    say = Progress(quiet or not is_main()).say
    attempt = read_launch().attempt
    # a launcher repeats the command as it was: an `overwrite` in it would delete what was trained
    # so far
    if attempt and run_on_main(lambda: is_restarted(out)):
        say(f"restart {attempt} by the launcher: {out}: the run continues")
        resume = True
        resume_from = None
        overwrite = False
    resume = resume or resume_from is not None
    # locked before the start is read from it, because another run may be writing there
    with reserve_folder(out, resume=resume, overwrite=overwrite, say=say), restore_modes(
        *filter(None, [model])
    ):
        start = run_on_main(
            lambda: _find_start(config, objects, out, resume, resume_from, overwrite, say)
        )
        # before the job is built: a finished run needs neither its model nor its data
        if start.ended is not None:
            why = start.ended.get("stopped")
            steps = start.ended.get("steps")
            # a run without checkpoints cannot go on
            has_last = run_on_main(lambda: steps in checkpoint.list_steps(out / "checkpoints"))
            remedy = f"; --resume-from {steps} continues it" if has_last else ""
            early = f" (it ended early: {why}{remedy})" if why else ""
            say(f"{out}: this run is finished: nothing to resume{early}")
            return start.ended
        job = _build(start, objects)
        try:
            require_supported_callbacks(job, run_callbacks)
            _require_one_set_of_weights(job)
            # only the main process reads the data here, so its random states must not change
            with restore_random_states():
                _fingerprint(job, out, start)
            return TrainingLoop(
                job, out, start.resumes, overwrite, quiet, run_callbacks, start.goes_on
            ).run_all()
        finally:
            # also after a fault: the model is the caller's
            job.precision.give_back(keep_dtype)


def _require_kinds(objects: Overrides) -> None:
    """Raise `BadInput` for each object that cannot be what its argument of `train` asks for."""
    kinds = {
        name: (value, *_KINDS[name])
        for name, value in objects._asdict().items()
        if value is not None and name in _KINDS
    }
    raise_faults(
        {
            f"{name}: {describe_kind(v)}: must be {allowed}": not fits(v)
            for name, (v, fits, allowed) in kinds.items()
        }
    )


def _require_one_set_of_weights(job: PlannedJob) -> None:
    """Raise `BadInput` for an optimizer that must be switched before an evaluation, which only a
    loop of the user's own does.
    """
    for part in list_parts(job.full_optimizer):
        if all(callable(getattr(part, mode, None)) for mode in MODES):
            raise BadInput(
                f"optimizer: {type(part).__name__}: evaluates other weights than it trains, and "
                f"`train` does not switch it (eval, train): use it in a loop of your own, over "
                f"ipu_pipe.Pipeline"
            )


def _fingerprint(job: PlannedJob, out: Path, start: _Start) -> None:
    """Put the fingerprints of the data into the job. Raise `BadInput` if a resumed run had other
    data.
    """
    with attribute_faults(lambda: "before training"):
        job.data_fingerprints = run_on_main(
            lambda: fingerprint_data(job, read_data_record(out) if start.resumes else {})
        )


@contextlib.contextmanager
def reserve_folder(
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> Iterator[None]:
    """Keep other runs out of the folder `out` inside the context; the main process holds the lock.

    Raise `BadInput`, on all processes, if another run writes there or the folder cannot be used.
    """
    with contextlib.ExitStack() as stack:

        def take() -> None:
            check_folder(out, resume, overwrite)
            stack.enter_context(lock_folder(out, say))

        run_on_main(take)
        yield


def check(config: Config, out: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Raise `BadInput` if `train` would for the config and the folder, without training or writing
    anything.
    """
    # as in `train`: what follows asks which rank this is
    launch(config, {"out": out, "resume": resume, "overwrite": overwrite})
    start = run_on_main(
        lambda: _find_start(config, Overrides(), out, resume, None, overwrite, lambda text: None)
    )
    with attribute_faults(lambda: "before training"):
        run_callbacks = make_callbacks(config, None)
    if start.ended is None:
        job = _build(start, Overrides())
        require_supported_callbacks(job, run_callbacks)
        _require_one_set_of_weights(job)
        _fingerprint(job, out, start)
        if start.done:
            saved = checkpoint.load(out / "checkpoints" / f"step-{start.done}")
            run_on_main(lambda: check_run(job, out, saved))


def get_starting_config(
    config: Config, out: Path, *, resume: bool, resume_from: int | None, overwrite: bool
) -> Config:
    """Return the config of the job that `train` would build for the folder `out`. Raise `BadInput`
    if it cannot start there.
    """
    resume = resume or resume_from is not None
    start = run_on_main(
        lambda: _find_start(
            config, Overrides(), out, resume, resume_from, overwrite, lambda text: None
        )
    )
    # a checkpoint replaces the weights that the run began with
    return start.config.model_copy(update={"init_from": None}) if start.done else start.config


class _Start(NamedTuple):
    """The start of a run.

    `config`: the config to train by; `done`: the updates of its checkpoint (0: no checkpoint);
    `ended`: the summary of a finished run; `resumes`: whether there is a run to resume; `goes_on`:
    whether it trains on if it had ended early.
    """

    config: Config
    done: int = 0
    ended: dict[str, Any] | None = None
    resumes: bool = False
    goes_on: bool = False


def _build(start: _Start, objects: Overrides) -> PlannedJob:
    """Build the job of a start; its checkpoint, if any, replaces the run's initial weights."""
    began = start.config.init_from
    config = start.config.model_copy(update={"init_from": None if start.done else began})
    job = build(config, done=start.done, **objects._asdict())
    # the record must still say where the run began
    job.config = job.config.model_copy(update={"init_from": began})
    return job


def _find_start(
    config: Config,
    objects: Overrides,
    out: Path,
    resume: bool,
    step: int | None,
    overwrite: bool,
    say: Callable[[str], None],
) -> _Start:
    """Return the start of the run, and print the config's changes since the last start. Raise
    `BadInput` if it cannot start.
    """
    outputs = check_folder(out, resume, overwrite)
    # a requeued job uses --resume even if its first start has written nothing
    if resume and not outputs and step is None:
        say(f"--resume: {out}: contains no run yet: it starts from the beginning")
    if not resume or (not outputs and step is None):
        return _Start(config)
    saved = out / "config.yaml"
    if not saved.is_file():
        option = "--resume" if step is None else f"--resume-from: {step}"
        raise BadInput(f"{option}: {out}: contains no run to resume")
    recorded = load_recorded(saved)
    # a run with objects of Python's needs them again
    objects.require_entries(recorded)
    config = keep_recorded_choices(recorded, config)
    changes = classify_changes(recorded, config)
    if changes.refused:
        raise BadInput([f"--resume: {saved}: {change}" for change in changes.refused])
    done = choose_step(out / "checkpoints", step)
    # a finished run goes on if it is to be longer, or from an older checkpoint
    goes_on = step is not None or changes.longer
    ended = None if goes_on else read_summary(out)
    goes_on |= is_to_go_on(out, done)
    # a finished run continues with nothing
    for change in changes.free if ended is None else ():
        say(f"the run continues with another {change}")
    return _Start(config, done, ended, True, goes_on)


def evaluate_checkpoint(config: Config, path: str | Path) -> dict[str, Any]:
    """Return test loss and metrics of the weights in a checkpoint folder or a plain state dict."""
    path = parse_path(path, "--evaluate")
    with attribute_faults(lambda: "before evaluation"):
        # the weights to evaluate replace those, whose file may be gone
        setup = set_up(config.model_copy(update={"init_from": None}))
    with setup.precision.put_masters_in_place(loads=True):
        checkpoint.load_weights(setup.model, checkpoint.read_weights(path), str(path))
    with attribute_faults(lambda: "evaluation"):
        # where blocks have losses of their own the whole model is last
        result = evaluate(setup)[-1]
    return {"weights": str(path), **result.to_record()}


# argument of `train` -> whether a value fits, and what is allowed; `make_factory_of` checks the
# optimizer
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda value: isinstance(value, nn.Module), "a torch.nn.Module"),
    "data": (
        # a protocol's isinstance looks for attributes alone, and a class has them as its objects do
        lambda value: isinstance(value, DataSource) and not isinstance(value, type),
        "a DataSource, such as the result of ipu_pipe.from_loader(train, test)",
    ),
    "loss": (
        lambda value: isinstance(value, str) or (callable(value) and not isinstance(value, type)),
        "a function of outputs and labels, or the name of one",
    ),
    "loss_weight": (
        lambda value: isinstance(value, str) or (callable(value) and not isinstance(value, type)),
        "a function of the labels, or tokens",
    ),
    "output": (
        lambda value: isinstance(value, (str, int)) or callable(value),
        "a field's name, an index, or a function of it",
    ),
    "lr_scheduler": (callable, "a function of an optimizer that makes a torch.optim.lr_scheduler"),
    "metrics": (
        lambda value: isinstance(value, (list, tuple, Mapping)),
        "a list, or a mapping, of names, functions and objects",
    ),
    "callbacks": (
        lambda value: isinstance(value, (list, tuple)),
        "a list of objects of classes derived from ipu_pipe.Callback",
    ),
}
