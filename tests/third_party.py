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
            if not hasattr(torch.ops.torchvision, name):  # this module may be imported anew
                _LIBRARY.define(name + signature)


_define_detection()

import timm  # noqa: E402
import torchvision  # noqa: E402
import transformers  # noqa: E402

__all__ = ["timm", "torchvision", "transformers"]


# ---- Hugging Face models as people train them: batches that are mappings, outputs that are objects


def hugging_bert(classes: int = 3) -> torch.nn.Module:
    """Classification of sentences; nothing is left to chance."""
    config = transformers.BertConfig(  # type: ignore[call-arg]
        vocab_size=31, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=12, num_labels=classes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def hugging_gpt2() -> torch.nn.Module:
    """A language model whose embeddings are its own."""
    config = transformers.GPT2Config(
        vocab_size=31, n_embd=8, n_layer=2, n_head=2, n_positions=12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def hugging_vit(classes: int = 3) -> torch.nn.Module:
    """Classification of images (3, 8, 8)."""
    config = transformers.ViTConfig(  # type: ignore[call-arg]
        image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        num_labels=classes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)
