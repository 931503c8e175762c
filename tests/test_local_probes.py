"""Probes of local-parallel training: gradient angles, chunks, random labels, filters, and their command line."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import pytest
import torch
from torch import nn

from ipu_pipe.config.load import load_config
from ipu_pipe.config.schema import Config
from ipu_pipe.data import TensorData, load_data, sets
from ipu_pipe.errors import BadInput
from ipu_pipe.local.blocks import BlockedModel, BlockOutputs, SumOfLosses, get_blocks
from ipu_pipe.local.structures import make_blocks
from ipu_pipe.run.build import build
from ipu_pipe.schedule.methods import Structure
from ipu_pipe.studies import local_probes as probes
from ipu_pipe.studies import probe_pictures
from ipu_pipe.studies.local_probes import GradientProbe, compute_angle
from tests.staged_models import whole
from tools import local_probes as tool

ROOT = Path(__file__).resolve().parents[1]
cross_entropy = nn.functional.cross_entropy
LOSS = SumOfLosses(cross_entropy)
STRUCTURES = {
    "greedy": Structure(), "overlapping": Structure(overlap=1), "twice": Structure(overlap=2),
    "chunked": Structure(blocks=("2",)),
}  # fmt: skip


class Drift(nn.Module):
    """Every training forward reads and changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.factor = self.factor * 1.5
        return x * self.factor


def layers(structure: Structure) -> List[nn.Module]:
    """Four blocks in a row, with running statistics, dropout and, where each runs once, a buffer that moves and is read."""
    torch.manual_seed(3)
    made = [
        nn.Sequential(nn.Linear(12, 10), nn.BatchNorm1d(10), nn.Tanh()),
        nn.Sequential(nn.Linear(10, 9), nn.Dropout(0.3), nn.Tanh()),
        nn.Sequential(
            nn.Linear(9, 8), nn.Identity() if structure.overlap else Drift(), nn.BatchNorm1d(8), nn.ReLU(inplace=True)
        ),
        nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 4)),
    ]
    return [layer.double() for layer in made]


def batch(size: int = 6) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(size, 12, generator=generator, dtype=torch.float64), torch.arange(size) % 4


def blocked(structure: Structure, stages: Sequence[nn.Module] = ()) -> BlockedModel:
    return make_blocks(whole(list(stages or layers(structure))), batch()[0], structure, None)[0]


# ---- angles


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_last_blocks_local_gradient_is_the_true_one_and_others_are_not(name: str) -> None:
    found = GradientProbe(blocked(STRUCTURES[name]), LOSS, *batch()).measure()
    assert found[-1] is not None and found[-1].degrees == 0.0 and found[-1].cosine == pytest.approx(1)
    for each in found[:-1]:
        assert each is not None and each.degrees > 1


def test_one_block_has_no_angle_to_the_whole_model() -> None:
    (found,) = GradientProbe(blocked(Structure(blocks=1)), LOSS, *batch()).measure()
    assert found is not None and found.degrees == 0.0


def plain() -> List[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh()).double() for a, b in ((12, 10), (10, 9), (9, 8), (8, 4))]


@pytest.mark.parametrize("overlap", [0, 1])
def test_angles_are_those_of_gradients_written_out(overlap: int) -> None:
    stages, (x, y) = plain(), batch()
    model = blocked(Structure(overlap=overlap), stages)
    blocks = get_blocks(model)
    assert blocks is not None
    local: List[List[torch.Tensor]] = [
        [] for _ in stages
    ]  # of each layer's weights and biases, by the blocks that hold it
    entered = [x]
    for stage in stages:
        entered.append(stage(entered[-1]).detach())
    for j in range(4):
        first, head = max(0, j - overlap), blocks.head(j)
        own = [*stages[first : j + 1], *([head] if head else [])]
        loss = cross_entropy(nn.Sequential(*own)(entered[first]), y)
        for i in range(first, j + 1):
            grads = torch.autograd.grad(loss, list(stages[i].parameters()), retain_graph=True)
            local[i].append(torch.cat([g.flatten() for g in grads]))
    loss = cross_entropy(nn.Sequential(*stages)(x), y)
    for i, found in enumerate(GradientProbe(model, LOSS, x, y).measure()):
        true = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(stages[i].parameters()), retain_graph=True)]
        )
        mean = torch.stack(local[i]).mean(0)
        cosine = float(mean @ true / mean.norm() / true.norm())
        assert found is not None and found.cosine == pytest.approx(cosine, abs=1e-12)
        assert np.cos(np.radians(found.degrees)) == pytest.approx(cosine, abs=1e-12)


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_probe_leaves_everything_as_it_was(name: str) -> None:
    model, (x, y) = blocked(STRUCTURES[name]), batch()
    model.train()
    torch.autograd.backward([cross_entropy(output, y) for output in model(x)])
    blocks = get_blocks(model)
    assert blocks is not None
    blocks.average_duplicates()
    model.eval()
    next(model.children()).train()
    modes = [module.training for module in [*model.modules(), blocks.model]]
    state, gradients = copy.deepcopy(model.state_dict()), [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in gradients]
    random = torch.get_rng_state()
    probe, given = GradientProbe(model, LOSS, x, y), x.clone()
    first = probe.measure()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())
    for p, gradient, value in zip(model.parameters(), gradients, values):
        assert p.grad is gradient and (gradient is None or (value is not None and torch.equal(gradient, value)))
    assert modes == [module.training for module in [*model.modules(), blocks.model]]
    assert torch.equal(random, torch.get_rng_state()) and torch.equal(x, given)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    torch.rand(3)
    assert probe.measure() == first, "the draws are the probe's own"


def test_frozen_blocks_and_other_models_have_no_angle() -> None:
    found = GradientProbe(blocked(Structure(layers=1)), LOSS, *batch()).measure()
    assert found[0] is None and found[1] is not None and found[1].degrees == 0.0
    with pytest.raises(BadInput, match="no blocks that are trained by losses of their own"):
        GradientProbe(nn.Linear(2, 2), LOSS, *batch())


def test_angles_of_vectors() -> None:
    def degrees(a: List[float], b: List[float]) -> Any:
        found = compute_angle(torch.tensor(a).double(), torch.tensor(b).double())
        return None if found is None else found.degrees

    assert degrees([3.0, 0.0], [0.0, 2.0]) == pytest.approx(90)
    assert degrees([1.0, 0.0], [-5.0, 0.0]) == 180
    assert degrees([1.0, 0.0], [1.0, 3**0.5]) == pytest.approx(60)
    assert degrees([1.0, 0.0], [1.0, 1e-9]) == pytest.approx(np.degrees(1e-9))  # whose cosine is 1
    assert degrees([0.0, 0.0], [1.0, 0.0]) is None and degrees([float("nan"), 0.0], [1.0, 0.0]) is None


def digits(*changes: str) -> Config:
    short = [
        "steps=6",
        "stages=4",
        "backend.threads=1",
        "micro_batch_size=8",
        "data.subset=200",
        "data.test_subset=100",
    ]
    return load_config(ROOT / "configs" / "mlp_digits.yaml", [*short, *changes])


@pytest.mark.parametrize("method", ["local_greedy", "local_overlapping"])
def test_training_is_the_same_with_and_without_the_probe(method: str) -> None:
    often, seldom = (probes.run_angles(digits(), method, every, samples=32)["points"] for every in (1, 4))
    assert [point["update"] for point in often] == [0, 1, 2, 3, 4, 5, 6]
    assert [point["update"] for point in seldom] == [0, 4, 6]
    for point in seldom:
        assert point in often
    assert len(often[0]["degrees"]) == 4 and all(point["degrees"][-1] == 0 for point in often)


# ---- chunks and labels


def test_chunks_of_stages() -> None:
    begins = ["b", "c", "d", "e", "f"]  # of six stages
    blocks = {size: probes.make_chunk_keys(begins, size)["method_args"]["blocks"] for size in (1, 2, 3, 4, 6)}
    assert blocks == {1: begins, 2: ["c", "e"], 3: ["d"], 4: ["e"], 6: 1}
    begins = probes.find_stage_begins(digits())
    sizes = {size: probes.run_chunks(digits("steps=2"), begins, size, 0, 50)["blocks"] for size in (1, 2, 3, 4)}
    assert sizes == {1: 4, 2: 2, 3: 2, 4: 1}


def test_training_samples_are_evaluated_without_augmentation_and_as_many_as_test_samples() -> None:
    job = build(digits("data.augment=true", "method=local_greedy"))
    x, y = (torch.cat(parts) for parts in zip(*probes.read_training_batches(job, 150)))
    plain = load_data("digits", augment=False, subset=150)
    assert isinstance(plain, TensorData) and isinstance(job.data, TensorData) and job.data.augment
    own = dict(zip([bytes(image.numpy()) for image in x], y.tolist()))
    for k in range(3):
        for image, label in zip(*plain.train_batch(0, k, 50)):
            assert own.pop(bytes(image.numpy())) == int(label)
    assert not own
    assert probes.run_chunks(digits("steps=1"), [], 1, 0, 5000)["samples"] == 100
    synthetic = build(digits("data={name: synthetic, shape: [1, 8, 8], subset: 60}"))
    assert [len(part) for part, _ in probes.read_training_batches(synthetic, 20)] == [8, 8, 4]


def test_evaluation_is_by_final_output_and_leaves_modes() -> None:
    job = build(digits("method=local_greedy"))
    data = list(probes.read_training_batches(job, 64))
    modes = [module.training for module in job.model.modules()]
    loss, found = probes.evaluate(job, data)
    assert modes == [module.training for module in job.model.modules()]
    job.model.eval()
    with torch.no_grad():
        output = job.model(data[0][0])
    assert not isinstance(output, BlockOutputs) and loss == pytest.approx(float(cross_entropy(output, data[0][1])))
    assert found["accuracy"] == pytest.approx(float((output.argmax(1) == data[0][1]).float().mean()))


def test_labels_are_fitted_and_points_are_means() -> None:
    fine, coarse = (
        probes.run_labels(digits("data.subset=32", "steps=40", "optimizer.lr=0.1"), "b", {"method": "gpipe"}, every)
        for every in (1, 20)
    )
    losses = [point["train_loss"] for point in fine["points"]]
    assert [point["update"] for point in coarse["points"]] == [20, 40]
    assert coarse["points"][1]["train_loss"] == pytest.approx(sum(losses[20:]) / 20)
    assert losses[-1] < losses[0] and coarse["train_loss"] == fine["train_loss"] and coarse["epochs"] == 40


def data_of(**options: Any) -> TensorData:
    made = load_data("digits", **options)
    assert isinstance(made, TensorData)
    return made


def test_random_labels_are_drawn_by_the_seed_alone() -> None:
    own, drawn, again = data_of(), data_of(random_labels=True), data_of(random_labels=True)
    assert torch.equal(own.train[0], drawn.train[0]) and torch.equal(own.test[0], drawn.test[0])
    for part in ("train", "test"):
        real, labels = getattr(own, part)[1], getattr(drawn, part)[1]
        assert torch.equal(labels, getattr(again, part)[1]) and labels.dtype == real.dtype == torch.int64
        assert sorted(set(labels.tolist())) == list(range(10))
        assert 0.05 < float((labels == real).float().mean()) < 0.15  # chance: of 1437 and 360, 0.1 +- 0.008 and 0.016
    other = data_of(random_labels=True, seed=1)
    assert 0.05 < float((other.train[1] == drawn.train[1]).float().mean()) < 0.15
    assert 0.05 < float((drawn.train[1][:360] == drawn.test[1]).float().mean()) < 0.15
    few = data_of(random_labels=True, subset=50, test_subset=20)
    assert torch.equal(few.train[1], drawn.train[1][:50]) and torch.equal(few.test[1], drawn.test[1][:20])
    assert torch.equal(data_of(random_labels=False).train[1], own.train[1])
    # neither images nor labels matter
    x, y = own.train
    assert torch.equal(sets._relabelled((x.flip(0), y * 0), 0, "train")[1], drawn.train[1])


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("digits", 1, "data.random_labels: 1: must be true or false"),
        ("synthetic", True, "data.random_labels: True: "),
        ("shakespeare", True, "data.random_labels: True: unknown key for shakespeare"),
    ],
)
def test_random_labels_are_refused_where_they_have_no_meaning(name: str, value: Any, told: str) -> None:
    with pytest.raises(BadInput) as refused:
        load_data(name, random_labels=value)
    assert told in str(refused.value)


# ---- filters


def test_filters_lie_in_a_grid_each_between_its_own_extremes(tmp_path: Path) -> None:
    weights = (
        torch.randn(5, 3, 2, 4, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1, 1e3, 1, 1e-3, 1])[:, None, None, None]
    )
    weights[2] = 7.0
    image = probe_pictures.make_filters_image(weights, enlarge=3, columns=2)
    assert image.shape == (3 * (6 + 2) + 2, 2 * (12 + 2) + 2, 3) and image.dtype == np.uint8
    expected = np.full_like(image, 255)
    for i, f in enumerate(weights.numpy()):
        for c in range(3):
            for row in range(6):
                for column in range(12):
                    share = 0.5 if i == 2 else (f[c, row // 3, column // 3] - f.min()) / (f.max() - f.min())
                    expected[i // 2 * 8 + 2 + row, i % 2 * 14 + 2 + column, c] = np.rint(share * 255)
    assert np.abs(expected.astype(int) - image.astype(int)).max() <= 1  # rounding of halves
    grey = probe_pictures.make_filters_image(torch.randn(3, 1, 5, 5))
    assert grey.shape == (2 * (40 + 2) + 2, 2 * (40 + 2) + 2, 3)  # 8 pixels a weight
    assert (grey[..., 0] == grey[..., 1]).all() and (grey[44:, 44:] == 255).all()

    from matplotlib.image import imread

    probe_pictures.draw_filters([("a", image), ("a longer title", grey), ("c", image)], tmp_path / "f.png")
    drawn = np.rint(imread(tmp_path / "f.png")[..., :3] * 255).astype(np.uint8)
    assert drawn.shape[:2] == (24 + 86, 30 + 16 + 98 + 16 + 30)
    for left, shown in ((0, image), (30 + 16, grey), (30 + 16 + 98 + 16, image)):
        assert (drawn[24 : 24 + shown.shape[0], left : left + shown.shape[1]] == shown).all()
    probe_pictures.draw_filters([("a", image), ("b", image)], tmp_path / "g.png", "Filters", "what they are of")
    told = np.rint(imread(tmp_path / "g.png")[..., :3] * 255).astype(np.uint8)
    assert told.shape[0] == 2 * 24 + image.shape[0] + 2 * 24  # of a title, titles, a note of two lines
    assert (told[48 : 48 + image.shape[0], : image.shape[1]] == image).all()
    assert (told[:24] < 128).any() and (told[-24:] < 200).any()


def test_the_first_layer_is_found_or_named() -> None:
    state = {
        "stem.weight": torch.randn(4, 3, 3, 3), "next.weight": torch.randn(4, 4, 3, 3),
        "local_heads.0.weight": torch.randn(2, 3, 1, 1), "fc.weight": torch.randn(5, 12),
    }  # fmt: skip
    assert probe_pictures.find_first_layer(state, "p")[0] == "stem.weight"
    name, rows = probe_pictures.find_first_layer(state, "p", shape=(3, 2, 2))
    assert name == "fc.weight" and rows.shape == (5, 3, 2, 2) and torch.equal(rows[1].flatten(), state["fc.weight"][1])
    cases: List[Tuple[Dict[str, Any], str]] = [
        ({"name": "next.weight"}, "p: next.weight: its shape is (4, 4, 3, 3), must be (n, 1 or 3, H, W)"),
        ({"name": "nothing"}, "p: nothing: not there"),
        ({"shape": (3, 5, 5)}, "p: no tensor of shape (n, 75)"),
        ({"shape": (2, 3, 2)}, "--shape: 2 3 2: must be C H W"),
    ]
    for how, told in cases:
        with pytest.raises(BadInput) as refused:
            probe_pictures.find_first_layer(state, "p", **how)
        assert told in str(refused.value)
    with pytest.raises(BadInput, match="2 tensors: stem.weight, other"):
        probe_pictures.find_first_layer({**state, "other": torch.randn(2, 1, 3, 3)}, "p")
    with pytest.raises(BadInput, match="stem.weight: holds values that are not finite"):
        probe_pictures.find_first_layer({"stem.weight": torch.full((1, 3, 2, 2), float("nan"))}, "p")


# ---- command line


def run_tool(monkeypatch: pytest.MonkeyPatch, *words: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["tools/local_probes.py", *map(str, words)])
    tool.main()


SHORT = ("--config", ROOT / "configs" / "mlp_digits.yaml", "--jobs", 1, "--updates", 4, "--set", "stages=4",
         "backend.threads=1", "data.subset=100", "data.test_subset=50")  # fmt: skip


@pytest.mark.parametrize(
    "words, runs",
    [
        (["angles", "--every", 2, "--samples", 16, "--method", "local_greedy", "last_layers"], 2),
        (["chunks", "--chunks", 1, 4, "--seeds", 0, 1, "--samples", 40], 4),
        (["labels", "--every", 2], 3),
    ],
)
def test_each_probe_writes_its_results(
    words: List[Any], runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_tool(monkeypatch, *words, *SHORT, "--out", tmp_path / "new" / "out", "--json")
    told = capsys.readouterr()
    name, found = words[0], json.loads(told.out)
    assert sorted(path.name for path in (tmp_path / "new" / "out").iterdir()) == [
        f"{name}.{e}" for e in ("json", "md", "png")
    ]
    assert json.loads((tmp_path / "new" / "out" / f"{name}.json").read_text()) == found
    assert len(found["runs"]) == runs and found["config"]["steps"] == 4 and f"[{runs}/{runs}]" in told.err
    assert found["table"] in (tmp_path / "new" / "out" / f"{name}.md").read_text()


def test_filters_of_runs_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ipu_pipe.run import checkpoint

    for step, values in ((3, torch.zeros(2, 3, 3, 3)), (12, torch.randn(2, 3, 3, 3))):
        checkpoint.save(tmp_path / "run" / "checkpoints", step, {"conv.weight": values}, {}, {})
    newest = tmp_path / "run" / "checkpoints" / "step-12"
    run_tool(
        monkeypatch,
        "filters",
        f"of the run={tmp_path / 'run'}",
        newest,
        newest / "model.safetensors",
        "--out",
        tmp_path,
    )
    found = json.loads((tmp_path / "filters.json").read_text())
    assert [each["title"] for each in found["shown"]] == ["of the run", "step-12", "model"]
    assert found["shown"][0]["weights"] == found["shown"][1]["weights"] == str(newest)
    assert (tmp_path / "filters.png").stat().st_size > 0


@pytest.mark.parametrize(
    "words, told",
    [
        (["angles", "--method", "gpipe"], "--method: gpipe: must be one of local_greedy"),
        (
            ["angles", "--method", "local_greedy", "local_greedy"],
            "--method: local_greedy local_greedy: must be different",
        ),
        (["angles", "--every", "0"], "0: "),
        (["angles", *SHORT, "--samples", 101], "--samples: 101: "),
        (["angles", "--set", "optimiser.lr=1"], "optimiser"),
        (["chunks", *SHORT, "--chunks", 5], "--chunks: 5: "),
        (["chunks", *SHORT, "backend.name=distributed"], "backend.name: distributed: "),
        (["labels", "--blocks", 1], "--blocks: 1: "),
        (
            ["labels", *SHORT, "data={name: synthetic, shape: [1, 8, 8]}"],
            "data.random_labels: True: ",
        ),
        (["filters", "nowhere"], "nowhere: "),
        (["filters", "."], "checkpoint: "),
        (["filters"], "TITLE=PATH"),
        ([], "PROBE"),
    ],
)
def test_bad_input_is_refused(words: List[Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = ["--out", tmp_path / "out"] if words else []
    with pytest.raises(BadInput) as refused:
        run_tool(monkeypatch, *words, *out)
    assert told in str(refused.value)


def test_a_fault_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "tools/local_probes.py", "filters", "x", "--out", str(tmp_path / "file")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: --out: ") and done.stderr.count("\n") == 1
