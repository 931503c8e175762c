"""Build Hugging Face's models, small and with random weights. Nothing is patched: transformers
is imported as users import it."""

from __future__ import annotations

import torch
import transformers

__all__ = ["transformers"]


# ---- Hugging Face models as users train them: batches that are mappings, outputs that are objects


def make_hugging_bert(classes: int = 3) -> torch.nn.Module:
    """Return a classifier of sentences without dropout."""
    config = transformers.BertConfig(  # type: ignore[call-arg]
        vocab_size=31, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=12, num_labels=classes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def make_hugging_gpt2() -> torch.nn.Module:
    """Return a language model without dropout, whose head and embedding are separate weights."""
    config = transformers.GPT2Config(
        vocab_size=31, n_embd=8, n_layer=2, n_head=2, n_positions=12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def make_hugging_vit(classes: int = 3) -> torch.nn.Module:
    """Return a classifier of images (3, 8, 8) without dropout."""
    config = transformers.ViTConfig(  # type: ignore[call-arg]
        image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        num_labels=classes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)
