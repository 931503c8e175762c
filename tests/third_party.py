"""Other libraries' models, small and with random weights. Import `torchvision`, `timm` and `transformers` through here."""

from __future__ import annotations

import importlib.util

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # lives as long as its definitions


def _define_detection() -> None:
    """The two operators of torchvision that it looks for when it is imported, where its own library of them cannot be loaded:
    the registry's wheel has it for CUDA alone. No model here uses them."""
    signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None and spec.submodule_search_locations is not None
    try:
        torch.ops.load_library(f"{spec.submodule_search_locations[0]}/_C.so")
    except OSError:
        for name in ("nms", "qnms"):
            _LIBRARY.define(name + signature)


_define_detection()

import timm  # noqa: E402
import torchvision  # noqa: E402
import transformers  # noqa: E402

__all__ = ["timm", "torchvision", "transformers"]
