"""Microbatches of other lengths, or with and without a mask: processes train them as the emulator
does, bit for bit, and the emulator's `gpipe` as a plain loop; what cannot be trained is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from torch import nn

import ipu_pipe
from ipu_pipe.backends.processes.input_kinds import MAGIC, InputKinds
from ipu_pipe.cut.cutting import cut_model, list_crossings
from ipu_pipe.cut.verification import verify_pieces
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.model.batch import check_same_shapes
from tests.support.models import Composed
from tests.support.processes import end_rank, run_in_group
from tests.support.runs import assert_same, needs_processes

UPDATES = 6
LOSS = nn.functional.cross_entropy


class Reader(nn.Module):
    """Causal attention, whose mask depends on the length; `mask` weighs words on stages 0 and 1.

    Its last layers would compute something else if they ran the recording of other inputs: the shapes
    that enter them are the same with a mask and without one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(20, 8), nn.Dropout(0.3)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor, mask: Any = None) -> torch.Tensor:
        h = self.embed(ids)
        later = torch.ones(len(h[0]), len(h[0])).triu(1).bool()
        h = (self.a(h) @ h.transpose(1, 2)).masked_fill(later, -1e9).softmax(-1) @ h
        h = self.drop(h if mask is None else h * mask[..., None])
        # a gradient in another memory layout
        h = self.b(h).transpose(1, 2).contiguous().transpose(1, 2)
        return self.c(h if mask is None else h + 1).transpose(1, 2)  # type: ignore[no-any-return]

    def local_head(self, activation: Any, output: Any) -> nn.Module:
        return Composed(lambda m, h: m.out(h).transpose(1, 2), out=nn.Linear(8, 20))


def compute_forces(module: Any, h: torch.Tensor) -> torch.Tensor:
    """Return the energy of an input and its gradient: `autograd.grad` inside a module."""
    with torch.enable_grad():
        h = h if h.requires_grad else h.detach().requires_grad_()
        energy = module.last(torch.tanh(module.first(h)))
        (force,) = torch.autograd.grad(energy.sum(), h, create_graph=True)
    return torch.cat([energy, force], 1)


class Mixing(nn.Module):
    """Its first microbatch sends no gradient across the cut: without features nothing before it is
    trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.b = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor, mask: Any = None) -> torch.Tensor:
        h = torch.tanh(self.embed(ids))
        h = h.detach() if mask is None else h * mask[..., None]
        return self.b(h).transpose(1, 2)  # type: ignore[no-any-return]


MODELS = {
    "forces": lambda: nn.Sequential(
        nn.Linear(4, 6),
        nn.Tanh(),
        Composed(compute_forces, first=nn.Linear(6, 8), last=nn.Linear(8, 1)),
    ),
    "detached": Mixing,
}
# name -> method, microbatches, stages, arguments
CASES = {
    "pipedream": ("pipedream", 1, ["b"], {}),
    "recompute": ("pipemare", 2, ["b"], {"method_args": {"recompute": {"segments": 1}}}),
    "zbv": ("zbv", 4, ["a", "b", "c"], {}),
    "local_overlapping": ("local_overlapping", 1, ["b"], {}),
    "forces": ("gpipe", 2, ["2"], {}),
    "detached": ("gpipe", 1, ["b"], {}),
}


def draw_words(name: str, k: int, count: int) -> List[Tuple[Any, Any]]:
    """Return the microbatches of update k: words of 3 to 7 letters, some with a mask, or positions."""
    draw = torch.Generator().manual_seed(k)
    if name == "forces":
        return [(torch.randn(3, 4, generator=draw), torch.randn(3, 7, generator=draw)) for _ in range(count)]  # fmt: skip
    batch: List[Tuple[Any, Any]] = []
    for j in range(count):
        ids = torch.randint(0, 20, (2, 3 + (2 * k + 3 * j) % 5), generator=draw)
        # heads of blocks take one activation
        has_mask = (k + j) % 3 == 1 and not name.startswith("local")
        mask = torch.rand(ids.shape, generator=draw) if has_mask else None
        batch.append(({"ids": ids, "mask": mask}, ids))
    return batch


def make_training(name: str) -> Tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return the model of a case, its optimizer and its loss."""
    torch.manual_seed(0)
    model = MODELS.get(name, Reader)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, nn.functional.mse_loss if name == "forces" else LOSS


def train_case(name: str, **backend: Any) -> Tuple[Any, List[float]]:
    """Return the trained weights, None on other ranks than 0, and the losses."""
    method, count, stages, settings = CASES[name]
    model, optimizer, loss = make_training(name)
    # Story: `whole_model` of a traced pipeline on processes ended in a KeyError
    keys = {"stages": stages, "microbatches": count, "trace": name == "zbv", **settings, **backend}
    pipe = ipu_pipe.Pipeline(model, loss, optimizer, method, **keys)
    losses = []
    with pipe:
        for k in range(UPDATES):
            # as documented: a rank gives what it needs, so that only stage 0 sees the lengths
            batch = [
                (x if pipe.takes_inputs else None, y if pipe.takes_labels else None)
                for x, y in draw_words(name, k, pipe.microbatches)
            ]
            losses += [update.loss for update in pipe.step(microbatches=batch)]
        losses += [update.loss for update in pipe.drain()]
        with pipe.whole_model() as whole:
            state = None if whole is None else {n: t.clone() for n, t in whole.state_dict().items()}
    return state, losses


def compare_kinds(rank: int, folder: Path) -> None:
    for name in CASES:
        state, losses = train_case(name, backend="distributed", deadline=60)
        expected = torch.load(folder / f"{name}.pt")
        if rank == 0:
            assert losses == expected["losses"], name
            assert_same(expected["state"], state)


def train_forces_plainly() -> Dict[str, torch.Tensor]:
    model, optimizer, loss = make_training("forces")
    for k in range(UPDATES):
        optimizer.zero_grad()
        for x, y in draw_words("forces", k, 2):
            (loss(model(x), y) / 2).backward()
        optimizer.step()
    return model.state_dict()


@needs_processes
def test_processes_train_other_lengths_as_the_emulator(tmp_path: Path) -> None:
    """Story: they asked for one length, though users of Megatron and DeepSpeed have many; a rank of
    overlapping blocks was told that it needs no inputs, and trained on the example; the gradient that
    `autograd.grad` left in a head was taken for the one to send."""
    for name in CASES:
        state, losses = train_case(name)
        torch.save({"state": state, "losses": losses}, tmp_path / f"{name}.pt")
    assert_same(train_forces_plainly(), torch.load(tmp_path / "forces.pt")["state"])
    run_in_group(2, compare_kinds, tmp_path)


def pass_unknown_words(rank: int, folder: Path) -> None:
    model, optimizer, loss = make_training("gpipe")
    pipe = ipu_pipe.Pipeline(
        model, loss, optimizer, "gpipe", stages=["b"], microbatches=1, backend="distributed", deadline=60
    )  # fmt: skip
    ids = torch.zeros(2, 3, dtype=torch.long)
    pipe.step(ids, ids)
    with pytest.raises(ValueError, match="microbatch 0 has 3 samples, those of the first step 2"):
        pipe.step(*[torch.zeros(3, 3, dtype=torch.long)] * 2)
    # words that the model does not know: its own error on rank 0, which is named on the other
    unknown = torch.full((2, 9), 50)
    with pytest.raises(IndexError if rank == 0 else RunFault) as fault:
        pipe.step(unknown, unknown)
    assert rank == 0 or "rank 0 is lost" in str(fault.value)
    end_rank(folder, rank)


@needs_processes
def test_a_new_length_that_fails_ends_every_rank(tmp_path: Path) -> None:
    run_in_group(2, pass_unknown_words, tmp_path)
    assert all((tmp_path / f"{rank}.ended").exists() for rank in range(2))


def draw_replica_words(k: int, replica: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * k + replica)
    return torch.randint(0, 20, (4, 4 + (k + 2 * replica) % 3), generator=draw)


def make_exact_reader() -> Tuple[Reader, torch.optim.Optimizer]:
    """Return the same model in float64, without dropout, and its optimizer for each call."""
    torch.manual_seed(0)
    net = Reader().double()
    net.drop.p = 0.0
    return net, torch.optim.SGD(net.parameters(), lr=0.05)


def train_on_all_replicas_words() -> Dict[str, torch.Tensor]:
    net, optimizer = make_exact_reader()
    for k in range(3):
        optimizer.zero_grad()
        batches = [draw_replica_words(k, replica) for replica in range(2)]
        assert len({ids.shape for ids in batches}) == 2
        for ids in batches:
            (LOSS(net(ids), ids) / 2).backward()
        optimizer.step()
    return net.state_dict()


def read_lengths_by_replica(rank: int, folder: Path) -> None:
    net, optimizer = make_exact_reader()
    pipe = ipu_pipe.Pipeline(
        net, LOSS, optimizer, "gpipe", stages=["b"], microbatches=2, replicas=2, backend="distributed", deadline=60
    )  # fmt: skip
    for k in range(3):
        ids = draw_replica_words(k, pipe.replica)
        pipe.step(ids, ids)
    state = pipe.state_dict()
    if rank == 0:
        expected = train_on_all_replicas_words()
        torch.testing.assert_close(state["model"], expected, rtol=0, atol=1e-12)


@pytest.mark.slow
@needs_processes
def test_replicas_read_batches_of_other_lengths(tmp_path: Path) -> None:
    """Story: the first batches of all replicas had to have one length, though each is padded to its
    own longest sample."""
    run_in_group(4, read_lengths_by_replica, tmp_path)


# ---- one process


def make_kinds(model: nn.Module, begins: List[str], x: Any, draws: Any = ()) -> InputKinds:
    pieces = cut_model(model, begins, x)
    verify_pieces(model, pieces, x)
    return InputKinds(
        pieces,
        x,
        list_crossings(pieces),
        dict.fromkeys(draws, 1),
        lambda crossings: [None, *crossings],
        lambda effects: None,
        is_fixed=False,
    )


def test_a_notice_takes_the_place_of_the_usual_tensors_and_the_inputs_follow_once() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    sender, receiver = (make_kinds(Reader(), ["b"], ids, ["drop"]) for _ in range(2))
    sender.note(0, ids)
    assert sender.list_placeholders("F", 0, 1) == [] and not sender.of_microbatch
    for m in (1, 2):
        sender.note(m, torch.zeros(2, 7, dtype=torch.long))
    usual, inputs = sender.list_placeholders("F", 1, 1)
    assert usual.shape == (2, 3, 8) and usual.numpy().tobytes()[:16] == MAGIC
    notice = receiver.read_notice(1, [usual])
    assert notice is not None and notice == (1, len(inputs))
    receiver.learn(notice.number, inputs, torch.device("cpu"))
    assert [spec.shape for spec in receiver.find_shapes("F", 1, 1)] == [(2, 7, 8)]
    assert len(sender.list_placeholders("F", 2, 1)) == 1
    assert receiver.read_notice(3, [torch.randn(2, 3, 8)]) is None
    assert receiver.of_microbatch == {1: 1}
    receiver.forget(2)
    assert not receiver.of_microbatch


def test_inputs_with_other_draws_or_small_messages_are_refused() -> None:
    """Draws are keyed by module and call as the first forward counted them."""
    model = Composed(
        lambda m, x: m.b(m.a(x) if x.shape[1] == 4 else m.drop(m.a(x[:, :4]))),
        a=nn.Linear(4, 4), b=nn.Linear(4, 2), drop=nn.Dropout(0.5),
    )  # fmt: skip
    kinds = make_kinds(model, ["b"], torch.randn(2, 4))
    with pytest.raises(BadInput, match=r"modules that draw random numbers \(drop\) not as often"):
        kinds.note(1, torch.randn(2, 5))
    small = make_kinds(nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4)), ["1"], torch.randn(2, 4))
    with pytest.raises(BadInput, match=r"microbatch 1: inputs: \(3, 4\), .* have one shape"):
        small.note(1, torch.randn(3, 4))


def test_backends_that_compile_name_the_part_that_differs() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(BadInput, match=r"inputs: mask: None, of the first microbatch \(2, 3\)"):
        check_same_shapes({"x": x, "mask": None}, {"x": x, "mask": x}, 1, "inputs")
