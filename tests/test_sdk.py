"""What a pod's SDK would refuse is foreseen: operations, tensors from outside, newer Python. Nothing ran on an IPU."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_pipe.backends.ipu.sdk import inspect_file, list_user_files, predict_refusals
from models.transformer import transformer_lm, transformer_translation
from tests.support.models import Composed, take_output
from tests.support.runs import ROOT

X = torch.rand(2, 4, 8, 8)


def foresee(model: nn.Module, x: Any = X, loss: Any = None, y: Any = None) -> List[str]:
    """Return the faults of a model that ends with one number, or of a loss."""
    loss = loss or (lambda output, labels: output.float().sum())
    job: Any = SimpleNamespace(
        model=model,
        loss=loss,
        example=(x, torch.zeros(2, dtype=torch.long) if y is None else y),
        partition=SimpleNamespace(begins={}),
        data=None,
    )
    return [fault for fault in predict_refusals(job) if not fault.startswith("/")]


@pytest.mark.parametrize("function, operation", [
    (lambda m, x: torch.fft.fft2(x).abs(), r"fft_fft2 \(aten::_fft"),
    (lambda m, x: torch.special.bessel_j0(x), r"special_bessel_j0 \(aten::special_bessel_j0\)"),
    (lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
     r"(scaled_dot_product_attention )?with is_causal \(aten::tril\)"),
])  # fmt: skip
def test_an_operation_without_a_handler_is_named_with_its_module_and_line(
    function: Any, operation: str
) -> None:
    faults = foresee(nn.Sequential(nn.ReLU(), Composed(function)))
    assert any(re.match(f"model: 1: {operation}", fault) for fault in faults), faults
    assert all(re.search(r"test_sdk\.py:\d+: PopTorch 3.4", fault) for fault in faults)
    if "bessel" in operation:  # shapes alone are enough
        assert len(foresee(Composed(function).to("meta"), X.to("meta"))) == 1


@pytest.mark.parametrize("layer", [
    # each is another way from a layer to operations
    nn.ConvTranspose2d(4, 4, 3), nn.AdaptiveAvgPool2d(2), nn.ReflectionPad2d(1), nn.ZeroPad2d(1), nn.GELU(), nn.Softsign(),
    nn.ReLU(inplace=True), nn.PReLU(), nn.RReLU(), nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True), nn.Dropout(0.5),
    nn.Upsample(scale_factor=2), nn.utils.weight_norm(nn.Linear(8, 4)), nn.PixelShuffle(2),
    nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, batch_first=True)),
    nn.Sequential(nn.Flatten(2), take_output(nn.LSTM(64, 4))),
    Composed(lambda m, x: F.one_hot((x > 0).long(), 2)),
    Composed(lambda m, x: x.half() + torch.rand_like(x.half()) + torch.tensor(2.0).half()),
    Composed(lambda m, x: torch.where(x > 0, x, torch.zeros(()))),
    Composed(lambda m, x: x.masked_fill((x > 0) & ~(x > 1), 0.0).cumsum(1).std(2)),
    Composed(lambda m, x: F.scaled_dot_product_attention(x, x, x)),
    Composed(lambda m, x: torch.einsum("bchw,bdhw->bcd", x, x).topk(2)[0].sort()[0]),
], ids=lambda layer: type(layer).__name__)  # fmt: skip
def test_an_operation_of_the_user_guide_is_accepted(layer: nn.Module) -> None:
    # in place on an input would be the user's own fault
    assert foresee(nn.Sequential(Composed(lambda m, x: x * 1), layer)) == []


def test_a_tensor_that_is_neither_weight_buffer_nor_input_is_named_with_the_remedy() -> None:
    scale = Composed(lambda m, x: x * m.scale + m.more[0], more=[torch.ones(8)])
    scale.scale = torch.ones(8)  # not a buffer
    faults = foresee(nn.Sequential(nn.ReLU(), scale))
    assert len(faults) == 2 and all("(register_buffer)" in fault for fault in faults)
    assert faults[0].startswith("model: 1.scale: read by 1: mul at ")
    assert faults[1].startswith("model: 1.more: read by 1: add at ")
    assert foresee(Composed(lambda m, x: x * m.scale, scale=torch.ones(8))) == []
    outside = torch.ones(8)
    (fault,) = foresee(Composed(lambda m, x: x + outside))
    assert "a tensor of shape (8,)" in fault


def test_a_loss_is_looked_at_too() -> None:
    classes = nn.Sequential(nn.Flatten(), nn.Linear(256, 3))
    assert foresee(classes, loss=F.cross_entropy) == []
    # torch 2.0.1 shows the operation itself, too
    fault, *_ = foresee(classes, loss=functools.partial(F.cross_entropy, label_smoothing=0.1))
    assert fault.startswith("loss: cross_entropy with label_smoothing (aten::masked_select)")
    # also as a buffer: PopTorch has no class weights
    (fault,) = foresee(classes, loss=nn.CrossEntropyLoss(weight=torch.ones(3)))
    assert fault.startswith("loss: cross_entropy with weight")
    faults = foresee(classes, loss=nn.HuberLoss(), y=torch.zeros(2, 3))
    assert any(fault.startswith("loss: huber_loss (aten::huber_loss)") for fault in faults)


def test_layers_are_named_where_they_are_several_and_transformers_are_accepted() -> None:
    deep = nn.Sequential(nn.Flatten(2), take_output(nn.LSTM(64, 4, bidirectional=True)))
    (fault,) = foresee(deep)
    assert fault.startswith("model: 1.inner: ")
    sizes: Any = {"width": 16, "heads": 2, "dropout": 0.0}
    tokens = torch.randint(1, 9, (2, 7), generator=torch.Generator().manual_seed(0))
    translation = transformer_translation(9, 9, layers=1, feedforward=8, **sizes)
    assert foresee(transformer_lm(9, blocks=1, context=8, **sizes), tokens) == []
    assert foresee(translation, torch.stack((tokens, tokens), 1)) == []


# ---- files


@pytest.mark.parametrize("text, fault", [
    ("match 1:\n    case 1: pass\n", ":"),
    ("def f(x):\n    return (y := x)\n", ""),
    ("from torch import nn\nnorm = nn.RMSNorm(4)\n", ":2: torch.nn.RMSNorm: "),
    ("from torch.nn import RMSNorm as Norm\n", ":1: torch.nn.RMSNorm: "),
    ("from torch.nn.attention import sdpa_kernel\n", ":1: torch.nn.attention: "),
    ("import torch\n@torch.compiler.disable\ndef f(): pass\n", ":2: torch.compiler: "),
    ("import torch.nn.functional as F\ny = F.rms_norm\n", ":2: torch.nn.functional.rms_norm: "),
    ("import torch\nif hasattr(torch, 'compiler'):\n    torch.compiler.disable\n", ""),
    ("import torch\ny = torch.nn.LayerNorm\nmine = torch.nn.functional.relu\n", ""),
    ("def f(x: list[int]): pass\n", ":1: list[X]"),
    ("def f() -> 'int' | None: pass\n", ":1: list[X] or X | Y"),
    ("from __future__ import annotations\ndef f(x: list[int]) -> int | None: pass\n", ""),
    ("count: int = 3\nlist[0]\n", ""),
])  # fmt: skip
def test_a_file_that_the_sdk_cannot_read_is_named_with_the_line(
    tmp_path: Path, text: str, fault: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    faults = inspect_file(file)
    assert [f"{file}{fault}" in one for one in faults] == ([True] if fault else [])


def test_the_files_of_a_model_and_those_that_they_import_are_read(
    tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "sdk_layers.py").write_text("from torch import nn\nclass Layer(nn.Module): pass\n")
    text = "import os\nimport sdk_layers\nfrom torch import nn\nclass Net(nn.Module): pass\n"
    (tmp_path / "sdk_net.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import sdk_net  # type: ignore[import-not-found]

    files = list_user_files([sdk_net.Net, len])
    assert files == [tmp_path / "sdk_layers.py", tmp_path / "sdk_net.py"]
    for name in ("sdk_net", "sdk_layers"):
        monkeypatch.delitem(sys.modules, name)


def test_our_own_models_are_readable_on_a_pod() -> None:
    files = [*(ROOT / "models").glob("*.py")]
    assert len(files) > 7 and not any(map(inspect_file, files))
