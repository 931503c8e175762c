"""Language models whose head is the embedding, small and with random weights, and tokens for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ipu_pipe.data.sources import TensorData
from ipu_pipe.model.stages import begin_stage
from models.transformer import transformer_lm

VOCABULARY, CONTEXT = 23, 6


def make_random_tokens(seed: int = 5) -> TensorData:
    """Return random tokens, the labels those behind."""
    tokens = torch.randint(
        VOCABULARY, (80, CONTEXT + 1), generator=torch.Generator().manual_seed(seed)
    )
    x, y = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    return TensorData((x[:64], y[:64]), (x[64:], y[64:]), seed)


def make_language_model(**args: Any) -> nn.Module:
    """Return the library's own: embedding, block1, block2, norm and head."""
    return transformer_lm(VOCABULARY, 8, 2, 2, CONTEXT, **{"tied": True, **args})


class Gpt2(nn.Module):
    """Hugging Face's GPT-2, its logits as cross-entropy wants them."""

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
        """x: (B, T) -> (B, vocabulary, T)."""
        return self.lm(x).logits.transpose(1, 2)  # type: ignore[no-any-return]


class SharedBatchNormModel(nn.Sequential):
    """A batch norm that runs on two stages."""

    def __init__(self) -> None:
        norm = nn.BatchNorm1d(12)
        super().__init__(
            nn.Linear(12, 12), norm, begin_stage(nn.Linear(12, 12)), norm, nn.Linear(12, 4)
        )


class RenormedEmbeddingModel(nn.Sequential):
    """An embedding whose forward scales its weight, which the head has, too."""

    def __init__(self) -> None:
        embedding, head = (
            nn.Embedding(VOCABULARY, 8, max_norm=0.5),
            nn.Linear(8, VOCABULARY, bias=False),
        )
        head.weight = embedding.weight
        super().__init__(embedding, begin_stage(nn.Linear(8, 8)), head)
