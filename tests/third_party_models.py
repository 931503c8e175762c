"""Build small models of other libraries with random weights, and list where each is cut inside
its modules."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple

import torch
from torch import nn

from ipu_pipe.data.sources import TensorData
from tests import third_party_zoo as zoo
from tests import vision_libraries as vision
from tests.third_party import transformers
from tests.third_party_zoo import CLASSES, LENGTH, WORDS

_IMAGE: Dict[str, Any] = {
    "img_size": 16,
    "patch_size": 8,
    "embed_dim": 16,
    "depth": 4,
    "num_heads": 2,
    "num_classes": CLASSES,
}


class LogitsModel(nn.Module):
    """A wrapper that returns the logits of a model whose output is an object: (b, classes), or
    (b, classes, length) per word."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return zoo.take_scores(self.model(x))


make_resnet18 = zoo.TORCHVISION["resnet18"].build
# two more heads in training
make_googlenet = zoo.TORCHVISION["googlenet"].build
make_densenet = zoo.TORCHVISION["densenet"].build
# the memory layout of its gradients differs from that of its activations
make_convnext = zoo.TORCHVISION["convnext"].build


# with dropout in attention, too
make_vision_transformer = zoo.make_vision_row(
    "VisionTransformer", 16, 8, 4, 2, 16, 32, 0.1, 0.1
).build


def make_timm_resnet() -> nn.Module:
    block: Any = vision.timm.models.resnet.BasicBlock
    return vision.timm.models.ResNet(
        block, (1, 1, 1, 1), channels=(8, 8, 16, 16), num_classes=CLASSES
    )  # type: ignore[no-any-return]


def make_timm_vit() -> nn.Module:
    """Return a ViT with stochastic depth."""
    return vision.timm.models.VisionTransformer(**_IMAGE, drop_path_rate=0.2)  # type: ignore[no-any-return]


def make_timm_swin() -> nn.Module:
    return vision.timm.models.SwinTransformer(  # type: ignore[no-any-return]
        img_size=16, patch_size=2, embed_dim=8, depths=(2, 2), num_heads=(1, 2), window_size=4, num_classes=CLASSES
    )  # fmt: skip


def make_timm_convnext() -> nn.Module:
    return vision.timm.models.ConvNeXt(
        depths=(1, 1, 2, 1), dims=(8, 8, 16, 16), num_classes=CLASSES, drop_path_rate=0.1
    )  # type: ignore[no-any-return]


def make_timm_cait() -> nn.Module:
    return vision.timm.models.Cait(**_IMAGE)  # type: ignore[attr-defined,no-any-return]


def make_mixtral() -> nn.Module:
    """Return a Mixtral, whose experts keep their weights in one tensor."""
    return LogitsModel(zoo.TRANSFORMERS["mixtral"].build())


def make_hf_vit() -> nn.Module:
    return LogitsModel(zoo.make_image_row("ViT", zoo.IMAGE, image_size=16).build())


def make_bert() -> nn.Module:
    return LogitsModel(zoo.TRANSFORMERS["bert"].build())


def make_gpt2(**settings: Any) -> nn.Module:
    """Return a GPT-2 whose embedding and head are separate weights."""
    return LogitsModel(zoo.make_causal_row("GPT2", zoo.GPT, **settings).build())


def make_llama() -> nn.Module:
    """Return a Llama whose embedding and head are separate weights."""
    return LogitsModel(zoo.TRANSFORMERS["llama"].build())


def make_words(classes: bool) -> TensorData:
    """Return random words; the labels are the next words, or one of `CLASSES` classes per
    sample."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, WORDS, (96, LENGTH + 1), generator=generator)
    x, y = words[:, :-1], words[:, 0] % CLASSES if classes else words[:, 1:]
    return TensorData((x[:64], y[:64]), (x[64:], y[64:]))


class CutCase(NamedTuple):
    """A builder in this module, the modules at which its four stages begin (inside modules that
    the library cuts whole otherwise), and the data section of its config."""

    entry: str
    begins: List[str]
    data: Dict[str, Any]

    def list_stages(self, count: int) -> List[str]:
        """Return the modules at which 2 or 4 stages begin."""
        return self.begins if count == 4 else self.begins[1:2]


def _configure_images(size: int = 16) -> Dict[str, Any]:
    return {
        "name": "synthetic",
        "shape": [3, size, size],
        "classes": CLASSES,
        "subset": 64,
        "test_subset": 32,
    }


def _configure_words(classes: bool) -> Dict[str, Any]:
    return {"name": "tests.third_party_models:make_words", "classes": classes}


_VIT = (  # transformers 5 has other names of blocks than transformers 4, the last one for Python 3.9
    ("vit.layers.1", "vit.layers.2.mlp", "vit.layers.3.layernorm_after")
    if int(transformers.__version__.split(".")[0]) >= 5
    else (
        "vit.encoder.layer.1",
        "vit.encoder.layer.2.intermediate",
        "vit.encoder.layer.3.layernorm_after",
    )
)
CASES: Dict[str, CutCase] = {
    "torchvision-resnet18": CutCase("make_resnet18", ["layer1.0.conv2", "layer2.0.bn2", "layer3.1"], _configure_images(32)),
    "torchvision-vit": CutCase(
        "make_vision_transformer",
        [f"encoder.layers.encoder_layer_{where}" for where in ("1", "2.mlp", "3.ln_2")],
        _configure_images(),
    ),
    "timm-resnet": CutCase("make_timm_resnet", ["layer1.0.bn2", "layer2.0.conv2", "layer3"], _configure_images(32)),
    "timm-vit": CutCase("make_timm_vit", ["blocks.1", "blocks.2.mlp", "blocks.3.attn.proj"], _configure_images()),
    "timm-convnext": CutCase(
        "make_timm_convnext", ["stages.0.blocks.0.mlp", "stages.2.blocks.0.norm", "stages.3"], _configure_images(32)
    ),
    "torchvision-convnext": CutCase("make_convnext", ["features.1.1", "features.3", "features.3.1"], _configure_images(32)),
    "timm-cait": CutCase("make_timm_cait", ["blocks.1", "blocks.2", "blocks.3"], _configure_images()),
    "hf-mixtral": CutCase("make_mixtral", [f"model.model.layers.{where}" for where in (1, 2, 3)], _configure_words(False)),
    "hf-vit": CutCase("make_hf_vit", [f"model.{where}" for where in _VIT], _configure_images()),
    "hf-bert": CutCase(
        "make_bert", [f"model.bert.encoder.layer.{where}" for where in ("1", "2.attention.output", "3.output")],
        _configure_words(True),
    ),
    "hf-gpt2": CutCase("make_gpt2", [f"model.transformer.h.{where}" for where in ("1", "2.mlp", "3.ln_2")],
                       _configure_words(False)),
}  # fmt: skip
