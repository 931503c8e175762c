"""What a run leaves and goes on from: its checkpoints, and the files of its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence

from ipu_pipe.backends.interface import Engine, Report
from ipu_pipe.backends.ranks import are_joined, run_on_main
from ipu_pipe.backends.table import get_backend
from ipu_pipe.config.comparing import dump_config
from ipu_pipe.data.loaders import random_states_restored
from ipu_pipe.hardware.profiling import StageSeconds
from ipu_pipe.job.position import Measured, Position
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.plan.of_config import predict_rate
from ipu_pipe.report.memory import build_memory_record
from ipu_pipe.report.provenance import describe_start, get_timestamp
from ipu_pipe.report.run_text import format_closing
from ipu_pipe.report.run_trace import choose_stage_costs, write_measured_trace, write_modelled_trace
from ipu_pipe.report.summary import summarize
from ipu_pipe.run import checkpoint
from ipu_pipe.run.callbacks import Callbacks
from ipu_pipe.run.folder import RunDir, earlier_starts
from ipu_pipe.run.resume import origin, position_of, refuse_foreign_run, refuse_other_data, saved_state
from ipu_pipe.update.state import import_state


def begin(job: Job, run: RunDir, resumes: bool, position: Position, say: Callable[[str], None]) -> Dict[str, Any]:
    """Write what is known of a run before it trains; returns the record of this start, the last in `record.json`."""
    if resumes:
        run.forget_after(position.update, say)
    run.describe(dump_config(job.config), job.begun)
    record = {**describe_start(job.read), "first_update": position.update}
    run.write_json("record.json", [*(earlier_starts(run.path) if resumes else []), record])
    run.open_metrics(position.update)
    return record


def save(job: Job, engine: Engine, run: Optional[RunDir], position: Position, callbacks: Callbacks) -> Optional[Path]:
    """Take a checkpoint, for which every process gives its part; its folder, on the main one. Raises RunFault."""
    held = engine.state()
    if run is None or held is None:
        return None
    states = {"callbacks": callbacks.states()} if callbacks.own else {}
    state = {**saved_state(position, held.plain), **states}
    folder = checkpoint.save(run.checkpoints, position.update, held.model, held.optimizer, state, origin(job))
    checkpoint.prune(run.checkpoints, job.config.checkpoint.keep, position.best_step, callbacks.best_steps())
    return folder


def restore(job: Job, out: Path, say: Callable[[str], None], callbacks: Callbacks) -> Position:
    """Put the checkpoint that `job` goes on from into its model and optimizer, and into the callbacks; how far it had come.
    Raises BadInput where it is not this run's, or not whole."""
    path = out / "checkpoints" / f"step-{job.done}"
    if not job.done:
        say("the run ended before its first checkpoint: it starts from the beginning")
        return Position()
    held = checkpoint.load(path)
    run_on_main(lambda: refuse_foreign_run(job, held, path))
    with random_states_restored():
        run_on_main(lambda: refuse_other_data(job, out))
    if held.manifest is None:
        say(f"{path}: of the earlier layout, which does not say whose run it is: that is not checked")
    with job.numbers.whole(loads=True):
        checkpoint.load_weights(job.model, held.model, str(path))
    names = {parameter: name for name, parameter in job.trained().items()}
    import_state(job.optimizer, names, held.optimizer, held.state["optimizer"])
    callbacks.load(held.state.get("callbacks"))
    position = position_of(held)
    say(f"resuming after update {position.update} from {path}")
    return position


class Ended(NamedTuple):
    """How a run ended. `tested`: by block, at the last evaluation; `profile`: of the stages' passes; `stopped`: why sooner than
    planned; `record`: of how it began; `restored`: the step whose weights the model has afterwards, None: the newest."""

    position: Position
    final: Measured
    tested: Sequence[Measured]
    profile: Optional[StageSeconds]
    stopped: Optional[str]
    record: Dict[str, Any]
    restored: Optional[int]


def finish(job: Job, engine: Engine, run: Optional[RunDir], ended: Ended, say: Callable[[str], None]) -> Dict[str, Any]:
    """Write what a run that has ended leaves, and say it; its summary, on every process."""
    measured = engine.report()

    def written() -> Dict[str, Any]:
        assert run is not None and measured is not None
        report = _write(job, run, ended, measured)
        on_devices = not get_backend(job.config).emulates  # which in one process does the work of all
        say(format_closing(report, run.path, predict_rate(job) if on_devices else None))
        return report

    return run_on_main(written)


def _write(job: Job, run: RunDir, ended: Ended, measured: Report) -> Dict[str, Any]:
    has_clocks = measured.events is not None
    costs = None if has_clocks else choose_stage_costs(job, ended.profile, ended.position)
    report = summarize(job, ended.position, ended.final, measured, ended.tested, costs, ended.stopped)
    if ended.restored is not None:
        report["restored_step"] = ended.restored
    if measured.times is None:
        run.forget_trace()
    if costs is not None and job.traced:
        write_modelled_trace(job, run.path, costs)
    elif job.traced:
        write_measured_trace(job, run.path / "trace.json.gz", measured)
    for name, value in (measured.files or {}).items():
        run.write_json(name, value)
    run.write_json("memory.json", build_memory_record(job, measured))
    run.write_json("record.json", [*earlier_starts(run.path)[:-1], {**ended.record, "ended": get_timestamp()}])
    run.write_json("summary.json", report)  # last: a run with a summary is finished
    return report


def restore_best(job: Job, out: Path, step: int, newest: int, say: Callable[[str], None]) -> None:
    """Put the weights of the checkpoint of `step` into the model, on every process that holds a whole one, and say it.
    `newest`: the step whose weights it has. Raises BadInput where the checkpoint is not whole any more."""
    path = out / "checkpoints" / f"step-{step}"
    if step == newest:
        say(f"the newest weights are the best: step {step}")
        return
    if are_joined() and not job.numbers.is_given:  # each process has its stage's, and no one the model
        say(f"the best weights are those of step {step}: {path}")
        return
    weights, blocks = run_on_main(lambda: checkpoint.read_weights(path)), get_blocks(job.model)
    with job.numbers.whole(loads=True):
        checkpoint.load_weights(
            job.model if blocks is None else blocks.model, weights, str(path)
        )  # heads have done their work
    say(f"the model has the best weights again, those of step {step}: {path}")
