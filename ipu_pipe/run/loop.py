"""The training loop of a process: updates, evaluations, checkpoints and callbacks, and the files of
the run.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Mapping, Sequence

import torch

from ipu_pipe.backends.interface import Report, StepResult
from ipu_pipe.backends.ranks import are_joined, gather_objects, is_main, run_on_main
from ipu_pipe.config.compare import dump_config
from ipu_pipe.errors import RunFault, find_user_fault
from ipu_pipe.files import atomic_file, write_json, write_text
from ipu_pipe.job.evaluation import EvaluationResult, collect_by_block, load_test_batches
from ipu_pipe.job.metrics import ACCURACY
from ipu_pipe.job.record import PlannedJob
from ipu_pipe.job.user_code import raise_attributed, save_traceback
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.frames import find_user_frame
from ipu_pipe.model.modes import find_changed_mode
from ipu_pipe.model.timing import StageSeconds
from ipu_pipe.pipeline.flow import Flow
from ipu_pipe.pipeline.optimizer import NOT_WRITTEN, is_same_setting
from ipu_pipe.pipeline.state import select_averages
from ipu_pipe.plan.config_cut import predict_rate
from ipu_pipe.replay.work import require_finite
from ipu_pipe.report.memory import build_memory_record
from ipu_pipe.report.position import LossTrend, Position
from ipu_pipe.report.provenance import describe_start, get_timestamp
from ipu_pipe.report.run_text import format_closing, format_opening
from ipu_pipe.report.run_trace import choose_stage_costs, write_measured_trace, write_modelled_trace
from ipu_pipe.report.summary import summarize
from ipu_pipe.run.callbacks import Callback, Callbacks, Moment
from ipu_pipe.run.progress import Bar, Log, Progress, log_nothing, open_log
from ipu_pipe.run.resume import join_loss, make_manifest, restore
from ipu_pipe.store import checkpoint
from ipu_pipe.store.folder import RunFolder, read_starts
from ipu_pipe.store.saving import Saver
from ipu_pipe.text import list_some
from ipu_pipe.update.optimizer import ELEMENTWISE, list_parts
from ipu_pipe.update.rates import export_plateau


class TrainingLoop:
    """One process's training loop; only the main process has a folder to write into."""

    def __init__(
        self,
        job: PlannedJob,
        out: Path,
        resume: bool,
        overwrite: bool,
        quiet: bool,
        callbacks: Sequence[Callback] = (),
        goes_on: bool = False,
    ) -> None:
        self.job = job
        # after an early end, which a resumed run otherwise keeps
        self.goes_on = goes_on
        self.run: RunFolder | None = None

        def open_folder() -> None:
            self.run = RunFolder(out, resume=resume, overwrite=overwrite)

        # on main alone, but awaited: all ranks fail together if the folder cannot be used
        run_on_main(open_folder)
        job.folder = out
        self.out = out
        self.resume = resume
        self.progress = Progress(quiet or not is_main())
        self.log: Log = log_nothing
        self.bar: Bar | None = None
        self.position = Position()
        # training time since a loss was last read, and the time of an update in the newest call
        self.unread_seconds = 0.0
        self.update_seconds = 0.0
        # planned, or sooner if a callback asks for it
        self.end = job.updates
        # the newest update's line of metrics.jsonl, if it is not written yet
        self.unwritten_line: dict[str, Any] = {}
        # by block, of the last evaluation on the test set
        self.test_results: list[EvaluationResult] = []
        # None of a resumed run, whose start is not known
        self.loss_trend: LossTrend | None = None
        self.callbacks = Callbacks(callbacks if is_main() else ())
        # in its groups, which checkpoints do not have
        self.written_settings: set[str] = set()
        if not all(type(part) in ELEMENTWISE for part in list_parts(job.optimizer)):
            job.rules.after_step = self._note_written_settings
        main = self.callbacks
        # all processes must know what rank 0's callbacks do: whether they may stop the run, whether
        # after any update, ...
        self.has_callbacks, self.watches_updates, self.watches_gradients, job.keeps_whole = (
            run_on_main(
                lambda: (
                    bool(main.callbacks),
                    main.watches_updates,
                    main.watches_gradients,
                    main.wants_model,
                )
            )
        )
        self.moment = Moment(
            0,
            0.0,
            (),
            job.rate(0),
            None,
            {},
            None,
            None,
            config=job.config.to_dict(),
            folder=out,
        )

    def run_all(self) -> dict[str, Any]:
        """Train from the start or the checkpoint to the end, and return the summary."""
        job = self.job
        self.flow = Flow(job, job.done)
        self.engine = engine = self.flow.engine
        if self.resume:
            self.position = restore(job, self.flow, self.out, self.progress.say, self.callbacks)
            # killed after its early end, before its summary was written
            if self.position.stopped is not None and not self.goes_on:
                self.end = self.position.update
                self.moment = replace(self.moment, stopped=self.position.stopped)
        position = self.position
        if not position.update:
            self.loss_trend = LossTrend(job.updates)
        # after `restore`: a checkpoint that is refused must leave the folder as it was
        run_on_main(self._write_start)
        self.progress.say(format_opening(job, position.update))
        if self.watches_gradients:
            engine.watch_gradients()
        settings = job.config.checkpoint
        # the process with the folder deletes old checkpoints; others write their parts alone
        keep = settings.keep if settings is not None and self.run is not None else None
        self.saver = Saver(self.out / "checkpoints", engine.checkpoint_group, keep)
        try:
            with save_traceback(self.out), open_log(
                self.run, job.config.log.tensorboard, position.update
            ) as self.log:
                self._begin()
                self._train()
                self._finish_saving()
                self._complete_metrics()
                if job.rules.decay is not None:
                    self._write_averages()
                # before the engine closes, since on the emulator passes are run to be timed
                profile = engine.profile()
            engine.close()
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            if self.run:
                self.run.close()
        # every process must know it, as each one loads the weights
        restored = run_on_main(self.callbacks.get_restored_step)
        measured = engine.report()
        # after the report, for which all ranks meet: the main process writes alone
        engine.disconnect()
        report = run_on_main(lambda: self._write_end(measured, profile, restored))
        if restored is not None:
            self._restore_weights(restored)
        self.moment = replace(self.moment, summary=report)
        with save_traceback(self.out):
            self._call_back("on_end")
        return report

    def _begin(self) -> None:
        """Call the callbacks at the start of the process, and evaluate the initial weights of a new
        run.
        """
        job = self.job
        done = self.position.update
        self.moment = replace(
            self.moment,
            step=done,
            epoch=job.count_epochs(done),
            # of the newest update, since updates are counted from 0
            rate=job.rate(max(done - 1, 0)),
            checkpoint=self.out / "checkpoints" / f"step-{done}" if done else None,
        )
        self._call_back("on_start")
        if not done:
            self.position.initial = self._evaluate("test")
            if job.validation is not None:
                self._evaluate("validation")

    def _complete_metrics(self) -> None:
        """Evaluate at the end of the run what its updates have not evaluated."""
        job = self.job
        # a run that was killed after its last update, before its summary was written, has no
        # metrics yet
        if not self.moment.metrics:
            # the killed process has written the lines already
            self.log, log = log_nothing, self.log
            self._evaluate(job.watched_split)
            self.log = log
        if job.watched_split != "test":
            self._evaluate("test")

    def _abort(self, error: BaseException) -> None:
        """End the engine after an error, and name the update in one of the user's code."""
        # suppress later errors, so that the error that ended the run is reported
        with contextlib.suppress(Exception):
            self.saver.wait()
        with contextlib.suppress(Exception):
            # rank 0 alone has callbacks and writes lines
            self.flow.leave(error)
        with contextlib.suppress(Exception):
            self.engine.abort()
        if isinstance(error, KeyboardInterrupt):
            steps = checkpoint.list_steps(self.out / "checkpoints")
            known = f"--resume continues after update {steps[-1]}" if steps else "no checkpoint yet"
            self.progress.say(f"{self.out}: {known}")
        # user code may exit with status 0, which would mean that the run is finished
        is_users = find_user_fault(error) is None and find_user_frame(error) is not None
        if isinstance(error, SystemExit) or (is_users and not isinstance(error, KeyboardInterrupt)):
            raise_attributed(error, f"after update {self.position.update}")

    def _write_start(self) -> None:
        """Write the files that describe the start of the run, on the main process."""
        job = self.job
        run = self.run
        done = self.position.update
        if run is None:
            return
        if self.resume:
            run.forget_after(done, self.progress.say)
        # written first: a restarted process recognizes its run by this file
        start = {**describe_start(job.data_fingerprints), "first_update": done}
        if job.advice:
            start["advice"] = job.advice
        if self.goes_on:
            start["goes_on"] = True
        write_json(
            self.out / "record.json", [*(read_starts(self.out) if self.resume else []), start]
        )
        write_text(self.out / "config.yaml", dump_config(job.config))
        if job.initial_weights is not None:
            write_json(self.out / "init_from.json", job.initial_weights._asdict())
        run.open_metrics(done, job.watched_split != "test")

    def _write_end(
        self, measured: Report | None, profile: StageSeconds | None, restored: int | None
    ) -> dict[str, Any]:
        """Write the final files, print the closing lines and return the summary, on the main
        process.
        """
        job = self.job
        position = self.position
        out = self.out
        assert self.run is not None and measured is not None
        costs = None if measured.events is not None else choose_stage_costs(job, profile, position)
        report = summarize(
            job,
            position,
            self.moment.metrics,
            measured,
            self.test_results,
            costs,
            self.moment.stopped,
            self.loss_trend,
        )
        if restored is not None:
            report["restored_step"] = restored
        if measured.times is None:
            # the trace of an earlier start
            self.run.forget("trace")
        if costs is not None and job.traced_updates:
            write_modelled_trace(job, out, costs)
        elif job.traced_updates:
            write_measured_trace(job, out / "trace.json.gz", measured)
        *earlier, start = read_starts(out) or [{}]
        files = {**(measured.files or {}), "memory.json": build_memory_record(job, measured)}
        files["record.json"] = [*earlier, {**start, "ended": get_timestamp()}]
        # written last: a run with a summary is finished
        files["summary.json"] = report
        for name, value in files.items():
            write_json(out / name, value)
        # an emulator does the work of all devices in one process, so its rate is not comparable
        # with a prediction
        predicted = None if job.config.backend.facts.emulates else predict_rate(job)
        self.progress.say(format_closing(job, report, out, predicted))
        return report

    def _write_averages(self) -> None:
        """Write the averaged weights, with the newest buffers, into the run's folder."""
        state = self.engine.collect_state()

        def write() -> None:
            assert state is not None
            averages = select_averages(state, self.job.model)
            with atomic_file(self.out / "ema.safetensors") as file:
                checkpoint.save_tensors(file, {**state.model, **averages})

        run_on_main(write)

    def _restore_weights(self, step: int) -> None:
        """Load the weights of the checkpoint of `step` into the model, on every process that has a
        whole model.

        Raise `BadInput` if the checkpoint is damaged.
        """
        job = self.job
        say = self.progress.say
        path = self.out / "checkpoints" / f"step-{step}"
        if step == self.position.update:
            say(f"the newest weights are the best: step {step}")
        # no process holds the whole model
        elif are_joined() and not job.precision.is_given and not job.keeps_whole:
            say(f"the best weights are at step {step}: {path}")
        else:
            weights = run_on_main(lambda: checkpoint.read_weights(path))
            blocks = get_blocks(job.model)
            with job.precision.put_masters_in_place(loads=True):
                # auxiliary heads stay as they are
                checkpoint.load_weights(
                    job.model if blocks is None else blocks.model, weights, str(path)
                )
            say(f"restored the best weights, of step {step}: {path}")

    def _train(self) -> None:
        """Carry out all remaining updates."""
        job = self.job
        flow = self.flow
        position = self.position
        with self.progress.show_bar(job.updates, flow.given, job.updates_per_epoch) as self.bar:
            while flow.given < self.end:
                # asked before the step, which drains the pipeline for them
                evaluates, saves = job.plan_pauses(flow.given + 1)
                self._step(drains=evaluates or saves)
                # what is written in the background may be complete by now
                if self.saver.is_saving:
                    self._finish_saving(waits=False)
                self._pause(evaluates, saves)
                if self.has_callbacks and (evaluates or saves or self.watches_updates):
                    self._agree_on_end()
            # after an early stop evaluate and save as at a planned end, unless an earlier start has
            if self.end < job.updates and self.progress.steps:
                start = time.perf_counter()
                results = flow.drain()
                # the updates that the drain completes also took its time
                self.unread_seconds += time.perf_counter() - start
                self._record(results)
                self.moment = replace(self.moment, stopped=self.callbacks.stop_reason)
                # the last update has a line, however rare lines are
                if self.unwritten_line:
                    self._log(self.unwritten_line)
                evaluated, saved = job.plan_pauses(self.end)
                # what was planned for this update is done already; but a checkpoint whose own
                # callback asked for the end does not say so, and a killed run would go on from it
                self._pause(not evaluated, not saved or position.stopped is None)
        self.bar = None

    def _agree_on_end(self) -> None:
        """End the run sooner if a callback has asked for it; every process calls this after the
        same update.

        The batches that have entered are finished: those given when the update's loss is known, on
        every backend.
        """

        def find_end() -> int:
            if self.callbacks.stop_reason is None:
                return self.end
            return (
                self.flow.given if self.flow.is_empty else self.flow.find_end(self.moment.step - 1)
            )

        self.end = min(self.end, run_on_main(find_end))

    def _pause(self, evaluates: bool, saves: bool) -> None:
        """Evaluate or save a checkpoint, or both, and call the callbacks."""
        if evaluates:
            self._evaluate(self.job.watched_split)
            self._call_back("on_evaluation")
        if saves:
            self._save()

    def _step(self, drains: bool) -> None:
        """Give the next batch, and record the updates that leave the pipeline, which runs empty if
        it `drains`.
        """
        flow = self.flow
        position = self.position
        k = flow.given
        per_call = self.engine.updates_per_call
        start = time.perf_counter()
        flow.give()
        # to read a loss is to wait for its device, so it is left where nobody asks
        results = list(flow.take()) if drains or self._needs_results(flow.given) else []
        if drains:
            results += flow.drain()
        # the first update of a call waits for all of them, so they share its time
        if k % per_call == 0:
            self.update_seconds = (time.perf_counter() - start) / per_call
        # the first call of a process warms up, so its time does not count
        if self.progress.steps >= per_call:
            position.seconds += self.update_seconds
            position.timed_updates += 1
        self.progress.steps += 1
        self.unread_seconds += self.update_seconds
        self._record(results)

    def _record(self, results: Sequence[tuple[int, StepResult]]) -> None:
        """Record the results of updates in order: count them, write their lines and call the
        callbacks.
        """
        if not results:
            return
        job = self.job
        position = self.position
        samples_per_second = sum(result.samples for _, result in results) / self.unread_seconds
        self.unread_seconds = 0.0
        shows_accuracy = any(metric.name == ACCURACY for metric in job.metrics)
        assert self.bar is not None
        for k, result in results:
            # where the results are in one process, that one judges them
            if self.engine.has_results:
                require_finite(job, k, result.losses)
            position.update = k + 1
            # the training loss is averaged over an epoch, or over 100 updates of data without a
            # length
            position.add_update(result.loss, begins_epoch=k % (job.updates_per_epoch or 100) == 0)
            if self.loss_trend is not None:
                self.loss_trend.add(result.loss)
            self.bar.advance(
                result.loss, result.accuracy if shows_accuracy else None, samples_per_second
            )
            self.moment = replace(
                self.moment,
                step=k + 1,
                epoch=job.count_epochs(k + 1),
                losses=result.losses,
                rate=job.rate(k),
                samples_per_second=samples_per_second,
            )
            self.unwritten_line = {
                "step": k + 1,
                "epoch": self.moment.epoch,
                "train_loss": result.loss,
                "lr": self.moment.rate,
                "samples_per_second": samples_per_second,
            }
            if result.blocks:
                self.unwritten_line["block_train_loss"] = list(result.losses)
            if (k + 1) % job.config.log.every == 0 or k + 1 == job.updates:
                self._log(self.unwritten_line)
                self.unwritten_line = {}
            if self.watches_gradients:
                before = self.moment
                self.moment = replace(before, gradients=self.engine.collect_gradients(k))
                self._call_back("on_gradients")
                # gradients are as large as the model, and stay in no other moment
                self.moment = before
            if self.watches_updates:
                self._call_back("on_step")

    def _log(self, line: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl and call the callbacks."""
        self.log(**line)
        # `_complete_metrics` logs nothing where a killed process has written the line
        if self.log is not log_nothing:
            self.moment = replace(self.moment, line=line)
            self._call_back("on_log")

    def _call_back(self, method: str) -> None:
        """Call `method` of the user's callbacks, with the whole model if they want it."""
        gathers = self.job.keeps_whole and method in ("on_start", "on_evaluation", "on_checkpoint")
        # on every process: each has stages of the model, and the main one alone the callbacks
        with self.engine.hold_whole_model() if gathers else contextlib.nullcontext():
            if self.callbacks.callbacks:
                self.moment = replace(self.moment, model=self.engine.newest_model)
                modes = {module: module.training for module in self.job.model.modules()}
                self.callbacks.call(method, self.moment)
                changed = find_changed_mode(self.job.model, modes)
                # after the last update the modes no longer matter
                if changed and method != "on_end":
                    raise RunFault(
                        f"callbacks: {method} after update {self.moment.step}: changed the mode "
                        f"(train, eval) of {changed}: give"
                        " each module its own mode back"
                    )

    def _needs_results(self, done: int) -> bool:
        """Return whether the losses must be read after `done` updates, for a line, an evaluation, a
        checkpoint or a callback.

        Those of the first call are read too, because its time does not count for throughput.
        """
        if self.watches_updates or not self.progress.steps:
            return True
        return done % self.job.config.log.every == 0 or any(self.job.plan_pauses(done))

    def _evaluate(self, split: str) -> EvaluationResult:
        """Evaluate on the test or validation set, log the results and return the whole model's
        result.
        """
        job = self.job
        position = self.position
        results = self.engine.evaluate(partial(load_test_batches, job, split), job.metrics)
        result = results[-1]
        epoch = job.count_epochs(position.update)
        if split == "test":
            self.test_results = results
        if self.bar is not None:
            self.bar.show_evaluation(result, split)
        by_block = collect_by_block(results, split) if len(results) > 1 else {}
        record = result.to_record(f"{split}_")
        if split == job.watched_split:
            best = f"{split}_{job.config.evaluate.best}"
            position.add_evaluation(best, record.get(best))
            # the evaluation before training is not one that the rate follows
            if job.plateau is not None and position.update:
                value = record.get(f"{split}_{job.config.lr_schedule.metric or 'loss'}")
                if value is not None:
                    job.plateau.step(value)
                position.plateau = export_plateau(job.plateau)
        # keep the last validation beside the test at the end
        validated = self.moment.metrics if split == "test" and position.update else {}
        self.moment = replace(
            self.moment, step=position.update, epoch=epoch, metrics={**validated, **record}
        )
        self._log({"step": position.update, "epoch": epoch, **record, **by_block})
        return result

    def _save(self) -> None:
        """Write a checkpoint, or begin to write it in the background; every process calls this.
        Raise `RunFault` on failure.
        """
        engine = self.engine
        position = self.position
        settings = self.job.config.checkpoint
        # wait for the previous checkpoint
        self._finish_saving()
        if settings is None:
            return
        state = engine.collect_state() if engine.checkpoint_group is None else engine.collect_part()
        # rank 0 alone has callbacks; after one has asked for the end this is the last checkpoint
        states, position.stopped = run_on_main(
            lambda: (self.callbacks.collect_states(), self.callbacks.stop_reason)
        )
        # entries of its state that are no parameter's
        self.written_settings |= {
            str(key) for key in self.job.optimizer.state if not isinstance(key, torch.Tensor)
        }
        if are_joined():
            # an optimizer by groups may write into those of another rank's stages alone
            self.written_settings.update(*gather_objects(self.written_settings))
        manifest = {}
        if state is not None:
            state = join_loss(state)
            manifest = make_manifest(self.job, position, state.plain, states)
            manifest["written_settings"] = sorted(self.written_settings)
            if self.written_settings and self.saver.newest is None:
                self.progress.say(
                    f"optimizer: keeps {list_some(sorted(self.written_settings))} outside of its "
                    f"parameters' entries, which checkpoints lack: this run cannot be resumed"
                )
        best_steps = [position.best_step, *self.callbacks.list_best_steps()]
        self.saver.start(position.update, state, manifest, best_steps, settings.background)
        self._finish_saving(waits=not settings.background)

    def _note_written_settings(self, group: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        """Note the settings of a group that the optimizer itself has changed in a step."""
        self.written_settings |= {
            key
            for key, value in group.items()
            if key not in NOT_WRITTEN and not is_same_setting(value, before.get(key))
        }

    def _finish_saving(self, waits: bool = True) -> None:
        """Call the callbacks if the begun checkpoint is complete now; every process waits at the
        same places. Raise `RunFault` if writing failed.
        """
        if waits:
            # where rank 0 writes for all, its full disk ends the others, too
            run_on_main(self.saver.wait)
        # a callback may want the whole model, which can be gathered only when the pipeline is empty
        if self.job.keeps_whole and not waits:
            return
        if self.saver.finish(waits):
            self.moment = replace(self.moment, checkpoint=self.saver.newest)
            self._call_back("on_checkpoint")
