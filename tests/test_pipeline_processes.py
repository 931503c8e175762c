"""Compare a loop of one's own over `Pipeline` on processes with the emulator: weights, losses
and the steps that return an update are equal bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ipu_pipe
from ipu_pipe.backends import world
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.schedule.methods import METHODS
from tests.support.loops import (
    EPOCH,
    STAGES,
    UPDATES,
    Case,
    Loop,
    make_case_pipeline,
    make_loop_batch,
    make_perceptron,
    make_sgd,
    take_share,
)
from tests.support.processes import end_rank, run_in_group, wait_for_file
from tests.support.runs import assert_same, needs_processes
from tests.support.slow import mark_slow
from tests.test_pipeline import CASES

pytestmark = needs_processes
# methods whose delays are drawn, so that processes refuse them
EMULATED = ("pipemare_hogwild", "randomized_pipedream", "randomized_nag")


def place_on_two_processes(name: str, case: Case) -> Case:
    """Return the case with as many stages or replicas as two processes need: blocks and orders
    of passes need one stage each, replicas are whole pipelines."""
    method = METHODS[case.method]
    has_one_stage = method.order is not None and method.order.stages_per_device == 1
    if method.structure is not None or has_one_stage:
        return case._replace(stages=["5"])
    return case._replace(replicas=2) if case.replicas > 1 else case


ON_PROCESSES = {
    name: place_on_two_processes(name, case) for name, case in CASES.items() if name not in EMULATED
}


def take_needed(pipe: ipu_pipe.Pipeline, x: torch.Tensor, y: torch.Tensor) -> Tuple[Any, Any]:
    """Return the inputs and labels that this rank needs, after a collective of the caller's own."""
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    x, y = take_share(pipe, x, y)
    return x if pipe.takes_inputs else None, y if pipe.takes_labels else None


def compare_loops(rank: int, folder: Path, names: List[str]) -> None:
    for name in names:
        case = ON_PROCESSES[name]
        keys: Dict[str, Any] = {"backend": "distributed", "backend_args": {"deadline": 60}}
        keys["example"] = tuple(part[:4] for part in make_loop_batch(case, 0))
        loop = Loop(case, share=take_needed, **keys)
        loop.run()
        state = loop.close().state_dict()
        expected = torch.load(folder / f"{name}.pt", weights_only=False)
        assert loop.left == expected["left"], name
        assert loop.losses == expected["losses"], name
        assert_same(expected["state"], state)


def write_expected(folder: Path, names: List[str]) -> None:
    for name in names:
        loop = Loop(ON_PROCESSES[name])
        loop.run()
        state = loop.close().state_dict()
        torch.save(
            {"state": state, "losses": loop.losses, "left": loop.left}, folder / f"{name}.pt"
        )


@pytest.mark.slow
def test_ranks_may_pass_only_what_they_need_and_use_collectives(tmp_path: Path) -> None:
    names = ["gpipe", "pipedream", "pipemare_t1_t2", "local_greedy", "zbv"]
    write_expected(tmp_path, names)
    run_in_group(2, compare_loops, tmp_path, names)


# ---- state, evaluation, prediction


def resume_and_measure(rank: int, folder: Path) -> None:
    for name in ("pipemare_t1_t2", "local_greedy", "diloco", "gpipe_replicas"):
        case = ON_PROCESSES[name]
        keys: Dict[str, Any] = {"backend": "distributed", "backend_args": {"deadline": 60}}
        loop = Loop(case, share=take_share, **keys)
        loop.run(0, EPOCH)
        state = loop.pipe.state_dict()
        assert bool(state) == (rank == 0)
        if rank == 0:
            torch.save(state, folder / f"{name}-processes.pt")
        dist.barrier()
        x, y = make_loop_batch(Case("gpipe", 3), 50)
        batches = [(x[:5], y[:5]), (x[5:], y[5:])]
        expected = torch.load(folder / f"{name}-emulator.pt", weights_only=False)
        right = {"right": lambda output, labels: (output.argmax(1) == labels).double().mean()}
        measured = loop.pipe.evaluate(batches, right)
        assert measured == pytest.approx(expected["measured"], rel=1e-12)
        assert torch.allclose(loop.pipe.predict(x), expected["predicted"], rtol=1e-12)
        with loop.pipe.whole_model(everywhere=True) as model:
            weights = {key: value.clone() for key, value in model.state_dict().items()}
        # running statistics are each replica's own until the end
        if loop.pipe.replica == 0:
            assert_same(expected["model"], weights)
        # the emulator's state on processes, from a new object and from one that was used
        for used in (False, True):
            again = loop if used else Loop(case, share=take_share, **keys)
            again.pipe.load_state_dict(expected["state"])
            again.scheduler.load_state_dict(expected["scheduler"])
            for group in again.optimizer.param_groups:
                group["lr"] = again.scheduler.get_last_lr()[0]
            again.run(EPOCH, UPDATES)
            assert_same(expected["end"], again.close().state_dict())


def test_states_go_from_backend_to_backend(tmp_path: Path) -> None:
    names = ("pipemare_t1_t2", "local_greedy", "diloco", "gpipe_replicas")
    x, y = make_loop_batch(Case("gpipe", 3), 50)
    for name in names:
        loop = Loop(ON_PROCESSES[name])
        loop.run(0, EPOCH)
        right = {"right": lambda output, labels: (output.argmax(1) == labels).double().mean()}
        stored = {
            "state": loop.pipe.state_dict(),
            "scheduler": loop.scheduler.state_dict(),
            "measured": loop.pipe.evaluate([(x[:5], y[:5]), (x[5:], y[5:])], right),
            "predicted": loop.pipe.predict(x),
            "model": {key: value.clone() for key, value in loop.model.state_dict().items()},
        }
        loop.run(EPOCH, UPDATES)
        stored["end"] = loop.close().state_dict()
        torch.save(stored, tmp_path / f"{name}-emulator.pt")
    run_in_group(2, resume_and_measure, tmp_path)
    for name in names:
        stored = torch.load(tmp_path / f"{name}-emulator.pt", weights_only=False)
        loop = Loop(ON_PROCESSES[name])
        loop.pipe.load_state_dict(torch.load(tmp_path / f"{name}-processes.pt", weights_only=True))
        loop.scheduler.load_state_dict(stored["scheduler"])
        for group in loop.optimizer.param_groups:
            group["lr"] = loop.scheduler.get_last_lr()[0]
        loop.run(EPOCH, UPDATES)
        assert_same(stored["end"], loop.close().state_dict())


# ---- the end within a round

WITHIN_ROUNDS = {
    "diloco": CASES["diloco"],
    "blocks": Case("local_greedy", 1, {"block_accumulation": [1, 3]}, stages=["5"]),
}


def close_within_round(name: str, steps: int, **keys: Any) -> Loop:
    loop = Loop(WITHIN_ROUNDS[name], share=take_share, **keys)
    loop.run(0, steps, drains=False)
    with pytest.warns(UserWarning, match="^close: .*without that step"):
        loop.close()
    return loop


def compare_ends(rank: int, folder: Path) -> None:
    for name in WITHIN_ROUNDS:
        for steps in (1, 5):
            expected = torch.load(folder / f"{name}-{steps}.pt")
            loop = close_within_round(
                name, steps, backend="distributed", backend_args={"deadline": 60}
            )
            assert_same(expected["state"], loop.model.state_dict())
            assert loop.losses == expected["losses"] and len(loop.losses) == steps


def test_a_pipeline_that_closes_within_a_round_finishes_its_batches(tmp_path: Path) -> None:
    for name in WITHIN_ROUNDS:
        for steps in (1, 5):
            loop = close_within_round(name, steps)
            torch.save(
                {"state": loop.model.state_dict(), "losses": loop.losses},
                tmp_path / f"{name}-{steps}.pt",
            )
    run_in_group(2, compare_ends, tmp_path)


# ---- functions that are called after updates

CALLED = ["gpipe", "pipedream", "local_greedy", "local_sgd_rounds", "diloco"]


def record_updates(name: str, **keys: Any) -> Dict[int, List[Any]]:
    """Return the arguments of the calls of an `on_update` function, by stage."""
    loop = Loop(ON_PROCESSES[name], share=take_share, **keys)
    calls: Dict[int, List[Any]] = {}

    def record_call(update: Any, stage: int, parameters: List[nn.Parameter]) -> None:
        weights = [p.detach().clone() for p in parameters]
        calls.setdefault(stage, []).append((int(update), update.averaged, weights))

    loop.pipe.on_update(record_call)
    loop.run()
    loop.close()
    return calls


def compare_calls(rank: int, folder: Path) -> None:
    for name in CALLED:
        expected = torch.load(folder / f"{name}.pt")
        calls = record_updates(name, backend="distributed", backend_args={"deadline": 60})
        # two stages on each rank, or one
        assert sorted(calls) == [s for s in sorted(expected) if s * 2 // len(expected) == rank]
        for stage, calls_of_stage in calls.items():
            assert [call[:2] for call in calls_of_stage] == [call[:2] for call in expected[stage]]
            for (*_, weights), (*_, weights_of_emulator) in zip(calls_of_stage, expected[stage]):
                assert all(map(torch.equal, weights, weights_of_emulator))


@pytest.mark.slow
def test_functions_are_called_after_updates_as_on_the_emulator(tmp_path: Path) -> None:
    for name in CALLED:
        calls = record_updates(name)
        assert any(averaged for _, averaged, _ in calls[0]) == (
            METHODS[ON_PROCESSES[name].method].rounds is not None
        )
        torch.save(calls, tmp_path / f"{name}.pt")
    run_in_group(2, compare_calls, tmp_path)


# ---- errors: one line each, on every rank


def shuffle_on_each_rank(rank: int, folder: Path) -> None:
    loop = Loop(ON_PROCESSES["pipedream"], backend="distributed", backend_args={"deadline": 60})
    with pytest.raises(RunFault) as fault:
        for k in range(8):
            loop.pipe.step(*make_loop_batch(loop.case, k + 100 * rank))
    assert rank == 1 or "do not shard the loader by rank" in str(fault.value)
    assert loop.pipe.close() == []
    end_rank(folder, rank)


def fail_on_one_rank(rank: int, folder: Path) -> None:
    loop = Loop(ON_PROCESSES["pipedream"], backend="distributed", backend_args={"deadline": 60})
    loop.run(0, 3, drains=False)
    # labels that the loss refuses, on the rank that has it
    with pytest.raises(IndexError if rank else RunFault) as fault:
        for k in range(3, 8):
            x, y = make_loop_batch(loop.case, k)
            loop.pipe.step(x, y + 9 * rank)
    assert rank == 1 or "rank 1 is lost" in str(fault.value)
    for call in (loop.pipe.drain, loop.pipe.state_dict):
        with pytest.raises(RunFault, match="earlier call has failed"):
            call()
    assert loop.pipe.close() == []
    end_rank(folder, rank)


def call_differently(rank: int, folder: Path) -> None:
    loop = Loop(ON_PROCESSES["pipedream"], backend="distributed", backend_args={"deadline": 5})
    loop.run(0, 3, drains=False)
    if rank == 0:
        # as long as the other rank waits for step 3
        wait_for_file(folder / "1.waited")
    else:
        with pytest.raises(RunFault, match="rank 0 .* this rank waits in step 3"):
            loop.pipe.step(*make_loop_batch(loop.case, 3))
        (folder / "1.waited").touch()
    loop.pipe.abort()
    end_rank(folder, rank)


ERRORS = [shuffle_on_each_rank, fail_on_one_rank, call_differently]


@pytest.mark.parametrize("work", mark_slow(ERRORS, lambda work: work is not call_differently))
def test_an_error_ends_every_rank(work: Any, tmp_path: Path) -> None:
    run_in_group(2, work, tmp_path)
    assert all((tmp_path / f"{rank}.ended").exists() for rank in range(2))


def pass_different_arguments(rank: int, folder: Path) -> None:
    model = make_perceptron()
    case = ON_PROCESSES["pipedream"]._replace(microbatches=1 + rank)
    with pytest.raises(BadInput, match="gradient_accumulation|microbatches"):
        make_case_pipeline(
            case,
            model,
            make_sgd(model.parameters()),
            backend="distributed",
            backend_args={"deadline": 60},
        )


def test_ranks_with_other_arguments_are_refused(tmp_path: Path) -> None:
    run_in_group(2, pass_different_arguments, tmp_path)


def test_processes_need_a_launcher() -> None:
    model = make_perceptron()
    with pytest.raises(BadInput, match="^backend: distributed"):
        ipu_pipe.Pipeline(
            model,
            nn.functional.cross_entropy,
            make_sgd(model.parameters()),
            stages=STAGES,
            backend="distributed",
        )


def evaluate_by_two_pipelines(rank: int, folder: Path) -> None:
    """Evaluate by two pipelines, one after another."""
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.zeros(8, dtype=torch.long)
    for _ in range(2):
        model = make_perceptron()
        with ipu_pipe.Pipeline(
            model,
            nn.functional.cross_entropy,
            make_sgd(model.parameters()),
            "gpipe",
            stages=1,
            replicas=2,
            backend="distributed",
        ) as pipe:
            pipe.step(x, y)
            assert not is_evaluation_done()
            assert pipe.evaluate([(x, y)])["loss"] is not None


def is_evaluation_done() -> bool:
    """Return whether the first evaluation that a pipeline waits for counts as done."""
    dist.barrier()
    is_done = world.get_own_store().check(["ipu_pipe/evaluation-1/done"])
    # no rank begins to evaluate before all have looked
    dist.barrier()
    return bool(is_done)


def test_replicas_wait_for_the_evaluation_of_a_second_pipeline(tmp_path: Path) -> None:
    """Story: they found the first pipeline's evaluation done, and waited for its end no longer than the
    deadline."""
    run_in_group(2, evaluate_by_two_pipelines, tmp_path)
