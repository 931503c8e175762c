"""Build small language models with random weights whose head is the embedding, and tokens for
them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ipu_pipe.data.sources import TensorData
from ipu_pipe.model.stages import begin_stage
from models.transformer import transformer_lm

VOCABULARY, CONTEXT = 23, 6


def make_random_tokens(seed: int = 5) -> TensorData:
    """Return random tokens; the labels are the next tokens."""
    tokens = torch.randint(
        VOCABULARY, (80, CONTEXT + 1), generator=torch.Generator().manual_seed(seed)
    )
    x, y = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    return TensorData((x[:64], y[:64]), (x[64:], y[64:]), seed)


def make_language_model(**args: Any) -> nn.Module:
    """Return the repository's own transformer: embedding, block1, block2, norm and head."""
    return transformer_lm(VOCABULARY, 8, 2, 2, CONTEXT, **{"tied": True, **args})


class Gpt2(nn.Module):
    """Hugging Face's GPT-2 with logits in the layout that cross-entropy expects."""

    def __init__(self, dropout: float = 0.0, layers: int = 3, tied: bool = True) -> None:
        from tests.third_party import transformers

        super().__init__()
        self.lm = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=8, n_layer=layers, n_head=2, use_cache=False,
                resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, tie_word_embeddings=tied, bos_token_id=0,
                eos_token_id=0,
            )
        )  # fmt: skip
        for block in self.lm.transformer.h[1:]:
            begin_stage(block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (B, vocabulary, T) of tokens x (B, T)."""
        return self.lm(x).logits.transpose(1, 2)  # type: ignore[no-any-return]


class SharedBatchNormModel(nn.Sequential):
    """A model whose batch norm runs on two stages."""

    def __init__(self) -> None:
        norm = nn.BatchNorm1d(12)
        super().__init__(
            nn.Linear(12, 12), norm, begin_stage(nn.Linear(12, 12)), norm, nn.Linear(12, 4)
        )


class RenormedEmbeddingModel(nn.Sequential):
    """A model whose embedding rescales its weight in each forward; the head shares that weight."""

    def __init__(self) -> None:
        embedding, head = (
            nn.Embedding(VOCABULARY, 8, max_norm=0.5),
            nn.Linear(8, VOCABULARY, bias=False),
        )
        head.weight = embedding.weight
        super().__init__(embedding, begin_stage(nn.Linear(8, 8)), head)
