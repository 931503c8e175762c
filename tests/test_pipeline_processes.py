"""Compare a loop of one's own over `Pipeline` on processes with the emulator: weights, losses
and the steps that return an update are equal bit for bit."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import ipu_pipe
from ipu_pipe.backends import world
from ipu_pipe.backends.processes import engine, lost_ranks
from ipu_pipe.backends.processes.layout import RankLayout
from ipu_pipe.backends.processes.mail import REPLICAS, Link
from ipu_pipe.backends.processes.nccl import list_links
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.replay.run import Run
from ipu_pipe.schedule.methods import METHODS
from tests.nccl_double import NcclDouble
from tests.support.loops import (
    EPOCH,
    UPDATES,
    Case,
    Loop,
    make_loop_batch,
    make_perceptron,
    make_sgd,
    take_share,
)
from tests.support.processes import end_rank, run_in_group, wait_for_file
from tests.support.runs import assert_same, needs_processes
from tests.test_pipeline import CASES
from tests.test_pipeline_state import MovingCenter

pytestmark = needs_processes
ON_TWO = {"backend": "distributed", "deadline": 60}
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


def save_end(loop: Loop, file: Path) -> None:
    """Close a loop, and save its losses and the model's state."""
    torch.save({"state": loop.close().state_dict(), "losses": loop.losses}, file)


def compare_end(loop: Loop, file: Path) -> None:
    """Close a loop, and assert that it ends as the one that was saved."""
    expected = torch.load(file)
    assert_same(expected["state"], loop.close().state_dict())
    assert loop.losses == expected["losses"], file


def compare_loops(rank: int, folder: Path, names: List[str]) -> None:
    for name in names:
        case = ON_PROCESSES[name]
        example = tuple(part[:4] for part in make_loop_batch(case, 0))
        loop = Loop(case, share=take_needed, example=example, **ON_TWO)
        loop.run()
        compare_end(loop, folder / f"{name}.pt")


def write_expected(folder: Path, names: List[str]) -> None:
    for name in names:
        loop = Loop(ON_PROCESSES[name])
        loop.run()
        save_end(loop, folder / f"{name}.pt")


@pytest.mark.slow
def test_ranks_may_pass_only_what_they_need_and_use_collectives(tmp_path: Path) -> None:
    names = ["pipedream", "local_greedy", "zbv"]
    write_expected(tmp_path, names)
    run_in_group(2, compare_loops, tmp_path, names)


# ---- state, evaluation, prediction


MEASURED = ("pipemare_t1_t2", "local_greedy", "diloco", "gpipe_replicas")


def measure(pipe: ipu_pipe.Pipeline) -> Dict[str, Any]:
    """Return the results of an evaluation and a prediction; the last batch is smaller: a mean over batches would differ."""
    x, y = make_loop_batch(Case("gpipe", 3), 50)
    right = {"right": lambda output, labels: (output.argmax(1) == labels).double().mean()}
    measured = pipe.evaluate(zip(x.split(5), y.split(5)), right)
    listed = pipe.evaluate([(x, y)], ["accuracy", "top2"])
    return {**measured, **listed, "output": pipe.predict(x)}


def resume(loop: Loop, state: Any, scheduler: Any) -> Any:
    """Load a state, and return the model's at the end."""
    loop.load(state, scheduler)
    loop.run(EPOCH, UPDATES)
    return loop.close().state_dict()


def resume_and_measure(rank: int, folder: Path) -> None:
    for name in MEASURED:
        case = ON_PROCESSES[name]
        loop = Loop(case, share=take_share, **ON_TWO)
        loop.run(0, EPOCH)
        state = loop.pipe.state_dict()
        assert bool(state) == (rank == 0)
        if rank == 0:
            torch.save(state, folder / f"{name}-processes.pt")
        dist.barrier()
        expected = torch.load(folder / f"{name}-emulator.pt", weights_only=False)
        torch.testing.assert_close(measure(loop.pipe), expected["measured"], rtol=1e-12, atol=1e-12)
        assert all(module.training for module in loop.model.modules())
        for everywhere in (False, True):
            with loop.pipe.whole_model(everywhere=everywhere) as model:
                assert (model is None) == (rank == 1 and not everywhere)
                # running statistics are each replica's own until the end
                if model is not None and loop.pipe.replica == 0:
                    assert_same(expected["model"], model.state_dict())
        # the emulator's state on processes, in a new object and in one that was used
        for again in (Loop(case, share=take_share, **ON_TWO), loop):
            assert_same(expected["end"], resume(again, expected["state"], expected["scheduler"]))


def test_states_go_from_backend_to_backend(tmp_path: Path) -> None:
    for name in MEASURED:
        loop = Loop(ON_PROCESSES[name])
        loop.run(0, EPOCH)
        stored = {
            "state": loop.pipe.state_dict(),
            "scheduler": loop.scheduler.state_dict(),
            "measured": measure(loop.pipe),
            "model": {key: value.clone() for key, value in loop.model.state_dict().items()},
        }
        loop.run(EPOCH, UPDATES)
        stored["end"] = loop.close().state_dict()
        torch.save(stored, tmp_path / f"{name}-emulator.pt")
    run_in_group(2, resume_and_measure, tmp_path)
    for name in MEASURED:
        stored = torch.load(tmp_path / f"{name}-emulator.pt", weights_only=False)
        state = torch.load(tmp_path / f"{name}-processes.pt", weights_only=True)
        assert_same(stored["end"], resume(Loop(ON_PROCESSES[name]), state, stored["scheduler"]))


# ---- the end within a round

WITHIN_ROUNDS = {
    "diloco": CASES["diloco"],
    # whose heads have settings of their own
    "blocks": Case(
        "local_greedy", args={"block_accumulation": [1, 3]}, others={"heads": {"lr": 0.2, "momentum": 0.5}}, stages=["5"]
    ),
}  # fmt: skip


def close_within_rounds(
    rank: int, folder: Path, end: Callable[[Loop, Path], None], **keys: Any
) -> None:
    """Make 1 and 5 steps of each case, and let `end` close the loop."""
    for name, case in WITHIN_ROUNDS.items():
        for steps in (1, 5):
            loop = Loop(case, share=take_share, **keys)
            loop.run(0, steps, drains=False)
            with pytest.warns(UserWarning, match="^close: .*without that step"):
                end(loop, folder / f"{name}-{steps}.pt")
            assert len(loop.losses) == steps


def test_a_pipeline_that_closes_within_a_round_finishes_its_batches(tmp_path: Path) -> None:
    close_within_rounds(0, tmp_path, save_end)
    compare = functools.partial(close_within_rounds, end=compare_end, **ON_TWO)
    run_in_group(2, compare, tmp_path)


# ---- functions that are called after updates

CALLED = ["pipedream", "local_greedy", "local_sgd_rounds"]


def record_updates(name: str, **keys: Any) -> Dict[int, List[Any]]:
    """Return the arguments of the calls of an `on_update` function, by stage."""
    loop = Loop(ON_PROCESSES[name], share=take_share, **keys)
    calls: Dict[int, List[Any]] = {}

    def record_call(update: Any, stage: int, parameters: List[nn.Parameter]) -> None:
        weights = nn.utils.parameters_to_vector(parameters).tolist()
        calls.setdefault(stage, []).append((int(update), update.averaged, weights))

    loop.pipe.on_update(record_call)
    loop.run()
    loop.close()
    return calls


def compare_calls(rank: int, folder: Path) -> None:
    for name in CALLED:
        expected = torch.load(folder / f"{name}.pt")
        calls = record_updates(name, **ON_TWO)
        # two stages on each rank, or one
        assert sorted(calls) == [s for s in sorted(expected) if s * 2 // len(expected) == rank]
        assert calls.items() <= expected.items()


@pytest.mark.slow
def test_functions_are_called_after_updates_as_on_the_emulator(tmp_path: Path) -> None:
    for name in CALLED:
        calls = record_updates(name)
        assert any(averaged for _, averaged, _ in calls[0]) == (
            METHODS[ON_PROCESSES[name].method].rounds is not None
        )
        torch.save(calls, tmp_path / f"{name}.pt")
    run_in_group(2, compare_calls, tmp_path)


# ---- recomputation


class Watched(nn.Module):
    """Layers that draw, keep running statistics, or change what their own forward reads; a hook
    counts the forwards of the first layer of each stage."""

    def __init__(self, has_old_weights: bool) -> None:
        super().__init__()
        self.calls = [0, 0]
        self.a = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.3))
        middle = nn.Linear(32, 32)
        # a method whose backward reads newer weights refuses it
        if not has_old_weights:
            middle = nn.utils.parametrizations.spectral_norm(middle)
        self.b = nn.Sequential(middle, nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 4))
        for number, layer in enumerate((self.a[0], self.b[0])):
            layer.register_forward_hook(lambda *_, number=number: self.count(number))

    def count(self, number: int) -> None:
        self.calls[number] += self.training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


def train_watched(method: str, **where: Any) -> Tuple[Dict[str, Any], Any, Watched]:
    torch.manual_seed(0)
    net = Watched(method == "pipemare").double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    pipe = ipu_pipe.Pipeline(
        net, MovingCenter(), optimizer, method, stages=["b"], microbatches=4, **where
    )
    draw = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(32, 6, generator=draw, dtype=torch.float64)
        pipe.step(x, torch.randint(4, (32,), generator=draw))
        pipe.drain()
    memory = pipe.memory()
    state = pipe.state_dict()
    pipe.close()
    return state, memory, net


def compare_states(state: Any, file: Path) -> None:
    """Assert that a state of a pipeline has the tensors of the one in a file."""
    expected = torch.load(file)
    for part in ("model", "optimizer", "loss"):
        assert_same(expected[part], state[part])


def recompute_on_ranks(rank: int, folder: Path) -> None:
    for method in RECOMPUTED:
        peaks, calls = [], []
        for recompute in (False, True):
            state, memory, net = train_watched(method, recompute=recompute, **ON_TWO)
            calls.append(net.calls[rank])
            if rank == 0:
                peaks.append(sum(peak["activations"] for peak in memory["peak_memory"]))
                planned = sum(row["activation_bytes"] for row in memory["stages"])
                compare_states(state, folder / f"{method}.pt")
        # the build runs the model, too
        assert calls[1] == calls[0] + 16
        if rank == 0:
            assert peaks[1] < peaks[0] and peaks[1] < 1.1 * planned
    # by segments a pass of its own recomputes, and the loss keeps what it sees there
    state, *_ = train_watched("pipemare", method_args=BY_SEGMENTS, **ON_TWO)
    if rank == 0:
        compare_states(state, folder / "segments.pt")


BY_SEGMENTS = {"recompute": {"segments": 1}}
RECOMPUTED = ("gpipe", "zb_h1", "pipedream_2bw")


@pytest.mark.slow
def test_processes_recompute_activations_and_keep_the_bits(tmp_path: Path) -> None:
    """Story: `recompute=True` changed the planned memory alone."""
    for method in RECOMPUTED:
        torch.save(train_watched(method)[0], tmp_path / f"{method}.pt")
    torch.save(train_watched("pipemare", method_args=BY_SEGMENTS)[0], tmp_path / "segments.pt")
    run_in_group(2, recompute_on_ranks, tmp_path)


# ---- errors: one line each, on every rank


def begin(method: str, **keys: Any) -> Loop:
    """Return a loop whose third batch is in flight."""
    loop = Loop(ON_PROCESSES[method], **{**ON_TWO, **keys})
    loop.run(0, 3, drains=False)
    return loop


def fail_on_one_rank(rank: int, folder: Path) -> None:
    """Story: the other rank waited for the deadline, though the reason was in the store."""
    loop = begin("pipedream", deadline=10_000)
    # labels that the loss refuses, on the rank that has it
    with pytest.raises(IndexError if rank else RunFault) as fault:
        for k in range(3, 8):
            x, y = make_loop_batch(loop.case, k)
            loop.pipe.step(x, y + 9 * rank)
    assert rank == 1 or re.search("rank 1 has left step . with an error", str(fault.value))
    for call in (loop.pipe.drain, loop.pipe.state_dict):
        with pytest.raises(RunFault, match="earlier call has failed"):
            call()
    assert loop.pipe.close() == []
    # a metric's fault, which the last stage alone finds
    loop = begin("pipedream", deadline=10_000)
    with pytest.raises(BadInput if rank else RunFault) as fault:
        loop.pipe.evaluate([make_loop_batch(loop.case, 3)], {"hits": lambda output, y: y})
    assert rank == 1 or "rank 1 has left evaluate with an error" in str(fault.value)
    loop.pipe.abort()
    begin("pipedream").close()


def call_late(rank: int, folder: Path) -> None:
    loop = begin("pipedream", deadline=5)
    if rank == 0:
        # as long as the other rank waits for step 3
        wait_for_file(folder / "1.waited")
    else:
        line = "rank 0 has not called step 3 .*this rank waits in step 3"
        with pytest.raises(RunFault, match=line):
            loop.pipe.step(*make_loop_batch(loop.case, 3))
        (folder / "1.waited").touch()
    loop.pipe.abort()


def call_another_method(rank: int, folder: Path) -> None:
    loop = begin("pipedream", deadline=5)
    line = "rank 0 is in state_dict" if rank else "rank 1 is in evaluate"
    with pytest.raises(RunFault, match=line):
        loop.pipe.evaluate([make_loop_batch(loop.case, 3)]) if rank else loop.pipe.state_dict()
    loop.pipe.abort()


def make_other_numbers_of_steps(rank: int, folder: Path) -> None:
    """Close on one rank while the other goes on. Story: the next pipeline's first message met this one's last, and gloo
    ended the process."""
    loop = begin("pipedream", deadline=2)
    with pytest.raises(RunFault, match="all ranks must call the same methods"):
        loop.run(3, 6 + 2 * rank, drains=False)
        loop.pipe.close()
    loop.pipe.close()
    compare_loops(rank, folder, ["pipedream"])


def hang_on_one_rank(rank: int, folder: Path) -> None:
    """Hang in a loss, on rank 1, until rank 0 has given up its wait for the gradients."""
    prefix, given_up = folder / "record_", folder / "given up"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lost_ranks, "WARM_UP", 0.1)
        patch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(prefix))
        loop = Loop(ON_PROCESSES["pipedream"], **{**ON_TWO, "deadline": 1})
        loop.model[8].register_forward_hook(
            lambda *_: wait_for_file(given_up) if rank and loop.pipe.updates > 3 else None
        )
        with pytest.raises(RunFault) as fault:
            loop.run(0, 11, drains=False)
        given_up.touch()
        loop.pipe.close()
    if rank == 0:
        line = "stage [01] waits for gradients of microbatch [0-9]+ from stage [12]"
        assert re.search(line, str(fault.value))
        dump = folder / "record_0"
        # torch 2.13 records the collectives of gloo, and no messages
        if hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
            assert str(dump) in str(fault.value)
        assert dump.exists() == (str(dump) in str(fault.value))


def pass_other_arguments_by_rank(rank: int, folder: Path) -> None:
    # stories: rows of a prediction had no values; gloo ended the process of shorter batches, and of other metrics
    x, y = make_loop_batch(ON_PROCESSES["pipedream"], 3)
    for call in (
        lambda pipe: pipe.predict(x[: 3 + rank]),
        lambda pipe: pipe.evaluate([(x[: 3 - rank], y[: 3 - rank])]),
        lambda pipe: pipe.evaluate([(x + rank, y)]),
        lambda pipe: pipe.evaluate([(x, y)] * (1 + rank)),
        lambda pipe: pipe.evaluate([(x, y)] * (2 - rank)),
        lambda pipe: pipe.evaluate([(x, y)], ["accuracy"] * rank),
    ):
        loop = begin("pipedream", deadline=60)
        with pytest.raises(RunFault) as fault:
            call(loop.pipe)
        if rank:
            assert re.search("different batches or metrics: pass the same", str(fault.value))
        loop.pipe.abort()


def hook_the_model_later(rank: int, folder: Path) -> None:
    """Register a hook of a module that is cut. Story: it was refused before the first step, and never called after it."""
    loop = begin("gpipe")
    loop.pipe.drain()
    loop.model.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(BadInput, match="has hooks, but stages begin inside it"):
        loop.pipe.step(*make_loop_batch(loop.case, 3))
    loop.pipe.abort()


ERRORS = [
    hook_the_model_later,
    pass_other_arguments_by_rank,
    fail_on_one_rank,
    call_late,
    call_another_method,
    make_other_numbers_of_steps,
    hang_on_one_rank,
]


def end_after(rank: int, folder: Path, work: Any) -> None:
    work(rank, folder)
    end_rank(folder, rank)


@pytest.mark.parametrize("work", ERRORS)
def test_an_error_ends_every_rank_with_its_own_line(work: Any, tmp_path: Path) -> None:
    write_expected(tmp_path, ["pipedream"])
    run_in_group(2, end_after, tmp_path, work)
    assert all((tmp_path / f"{rank}.ended").exists() for rank in range(2))


def pass_different_arguments(rank: int, folder: Path) -> None:
    case = ON_PROCESSES["pipedream"]._replace(microbatches=1 + rank)
    with pytest.raises(BadInput, match="gradient_accumulation|microbatches"):
        Loop(case, **ON_TWO)
    # stories: the first step waited for the deadline; or a trace had one rank's events alone
    model = make_perceptron()
    keys = {"model": model, "optimizer": make_sgd(model.parameters()), **ON_TWO}
    for key, value in {"trace": range(2), "loss": cross_entropy}.items():
        arguments = {"loss": cross_entropy, **keys, key: value if rank else None}
        with pytest.raises(BadInput, match=f"^{key}: rank 0 has null, rank 1 has "):
            ipu_pipe.Pipeline(**arguments)


def test_ranks_with_other_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="^backend: distributed"):
        Loop(ON_PROCESSES["pipedream"], **ON_TWO)
    run_in_group(2, pass_different_arguments, tmp_path)


def evaluate_by_two_pipelines(rank: int, folder: Path) -> None:
    """Evaluate by two pipelines, one after another."""
    case = Case("gpipe", replicas=2, stages=1)
    batch = make_loop_batch(case, 0)
    for _ in range(2):
        with Loop(case, **ON_TWO).pipe as pipe:
            pipe.step(*batch)
            assert not is_evaluation_done()
            assert pipe.evaluate([batch])["loss"] is not None


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


# ---- channels of nccl: a double enforces its restrictions

ON_CHANNELS = (
    "pipedream",
    "pipedream_2bw",
    "pipemare_t1_t2",
    "local_greedy",
    "zbv",
    "gpipe_replicas",
)


def make_channel_factory(doubles: List[NcclDouble]) -> Any:
    """Return a function that makes gloo groups in place of nccl's, and appends their double to
    `doubles`."""

    def make_double_channels(
        run: Run, layout: RankLayout, tied: Sequence[Link]
    ) -> Optional[Dict[Link, Any]]:
        channels: Dict[Link, Any] = {}
        for replica in range(layout.replicas):
            for link in list_links(layout.stages, run.method, tied):
                pair = sorted(
                    layout.list_ranks(layout.placement[stage])[replica] for stage in link[:2]
                )
                if pair[0] != pair[1]:
                    group = dist.new_group(pair)
                    if replica == layout.replica:
                        channels[link] = group
        if layout.replicas > 1:
            channels[REPLICAS] = dist.new_group(layout.list_ranks(0))
        double = NcclDouble(list(channels.values()))
        double.__enter__()
        doubles.append(double)
        for piece in run.options.pieces:
            double.watch(piece, run.optimizer)
        return channels

    return make_double_channels


def compare_over_channels(rank: int, folder: Path) -> None:
    for name in ON_CHANNELS:
        case = ON_PROCESSES[name]
        doubles: List[NcclDouble] = []
        engine.make_channels = make_channel_factory(doubles)
        # the pipeline is built from a microbatch that is not in the first batch
        example = tuple(part[:4] for part in make_loop_batch(case, 90))
        loop = Loop(case, share=take_share, example=example, **ON_TWO)
        loop.pipe.evaluate([make_loop_batch(case, 80)])
        loop.run(0, EPOCH)
        assert not doubles[0].count_pending(), "receives are posted while the pipeline is empty"
        loop.pipe.evaluate([make_loop_batch(case, 80)])
        loop.run(EPOCH, UPDATES)
        compare_end(loop, folder / f"{name}.pt")
        doubles[0].__exit__()


def test_channels_give_the_emulators_bits(tmp_path: Path) -> None:
    write_expected(tmp_path, [*ON_CHANNELS])
    run_in_group(2, compare_over_channels, tmp_path)
