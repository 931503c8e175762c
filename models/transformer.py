"""Transformers with annotated stages: a causal language model (Radford et al. 2019), a translation
model (Vaswani et al. 2017).

The language model has a norm before each sublayer and learned positions. Each block is a stage.

    embedding | block1 | ... | block4 | norm head                                                6 stages with 4 blocks

With attention residuals (Kimi Team 2026, arXiv 2603.15031) a sublayer's input is a mean of the
outputs so far, which it weighs itself. So the sums of earlier blocks cross all later stages.

    embedding | layer1 | layer2 | layer3 | layer4 | mix norm head            with 2 layers a block
    b0 ------------------------------------------>  b0: the embedding
                       b1 ----------------------->  b1: the sum of the sublayers in layers 1 and 2

The translation model has a norm after each sublayer and sinusoidal positions, with the sizes of
fairseq's model for IWSLT14. Each layer is a stage. One weight projects queries, keys and values,
and no weights are tied, which gives the 93 weights of PipeMare (Yang et al. 2021).

    source_embedding | encoder1 | ... | encoder6 | target_embedding | decoder1 | ... | decoder6 | head       15 stages

    an encoder layer's weights    projection output norm1, fc1 fc2 norm2                                     6
    a decoder layer's             projection output norm1, projection output norm2, fc1 fc2 norm3            9
    all                           6 x (6 + 9), two embeddings, head                                          finest 93
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, List, Optional, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from ipu_pipe.errors import BadInput
from ipu_pipe.model.stages import begin_stage

PADDING = 0


def _check(model: str, heads: int, width: int, dropout: float, **sizes: int) -> None:
    """Raise `BadInput` if an argument of `model` is out of range."""
    for name, value in (*sizes.items(), ("width", width), ("heads", heads)):
        if value < 1:
            raise BadInput(f"{model}: {name}: {value}: must be at least 1")
    if width % heads:
        raise BadInput(f"{model}: heads: {heads}: must divide the width, {width}")
    if not 0 <= dropout < 1:
        raise BadInput(f"{model}: dropout: {dropout}: must be at least 0 and below 1")


def _make_causal_mask(x: torch.Tensor) -> torch.Tensor:
    """Return the causal mask. x: (B, T, W) -> (T, T), true where the row's position attends to the
    column's.
    """
    # Comparing positions, since PopTorch has no tril, and a mask in a buffer would need a greatest
    # T.
    positions = torch.arange(x.shape[1], device=x.device)
    return positions[:, None] >= positions


class Projection(nn.Linear):
    """Linear layer whose weight (3 W, W) projects queries, keys and values, with a third of the
    rows each.
    """

    def forward(self, input: torch.Tensor, memory: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Return the queries of the input, then the keys and values of memory (default: of the
        input).

        input: (B, T, W), memory: (B, T, W) -> (B, T, 3 W).
        """
        if memory is None:
            return F.linear(input, self.weight, self.bias)
        width = self.in_features
        queries = F.linear(input, self.weight[:width], self.bias[:width])
        return torch.cat((queries, F.linear(memory, self.weight[width:], self.bias[width:])), -1)


class Attention(nn.Module):
    """Multi-head attention, written out so that it computes the same with every torch version and
    on every device.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.projection = Projection(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(
        self, x: torch.Tensor, keep: torch.Tensor, memory: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """Return the attention of x to memory (default: to x) where `keep` is true.

        x, memory: (B, T, W), keep: (T, T) or (B, 1, 1, T) -> (B, T, W). A row whose mask is false
        everywhere attends to all
        positions equally: there is no division by zero.
        """
        projected = self.projection(x) if memory is None else self.projection(x, memory)
        queries, keys, values = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in projected.chunk(3, -1)
        )
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
        return self.output((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))


class Logits(nn.Linear):
    """Linear layer without bias whose output has the classes in dimension 1, as `cross_entropy`
    expects.
    """

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the logits. input: (B, T, W) -> (B, vocabulary, T)."""
        return super().forward(input).transpose(1, 2)


# ---- language model


class LearnedEmbedding(nn.Module):
    """Embedding of tokens plus learned positions."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the embedded tokens. x: tokens (B, T) -> (B, T, W)."""
        context = self.positions.num_embeddings
        if x.dim() != 2 or x.shape[1] > context:
            raise BadInput(
                f"x: {tuple(x.shape)}: must be tokens (B, T), T at most the context, {context}"
            )
        positions = torch.arange(x.shape[1], device=x.device)
        return self.dropout(self.tokens(x) + self.positions(positions))


class Block(nn.Module):
    """Transformer block: causal attention, then two linear layers with a GELU, each after a norm
    and added to its input.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.dropout1 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.fc2 = nn.Linear(4 * width, width)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output. x: (B, T, W) -> (B, T, W)."""
        x = x + self.dropout1(self.attention(self.norm1(x), _make_causal_mask(x)))
        return x + self.dropout2(self.fc2(self.gelu(self.fc1(self.norm2(x)))))


def transformer_lm(
    vocabulary: int = 256,
    width: int = 128,
    heads: int = 4,
    blocks: int = 4,
    context: int = 64,
    dropout: float = 0.0,
    tied: bool = False,
    gpt2: bool = True,
) -> nn.Sequential:
    """Build a causal language model of `blocks` blocks: `blocks + 2` stages. The output at position
    t depends on tokens up to t.

    Input tokens (B, T), T at most `context`; output (B, vocabulary, T), for labels (B, T). 867,072
    parameters by default, 834,304 tied. `tied`: share one weight between head and embedding, for
    methods whose stages read one version of it. `gpt2`: initialize as GPT-2; otherwise as torch's
    layers, from which plain SGD makes faster progress. Raise `BadInput` if an argument is out of
    range.
    """
    _check(
        "transformer_lm",
        heads,
        width,
        dropout,
        vocabulary=vocabulary,
        blocks=blocks,
        context=context,
    )
    children: List[Any] = [("embedding", LearnedEmbedding(vocabulary, context, width, dropout))]
    for number in range(1, blocks + 1):
        children.append((f"block{number}", begin_stage(Block(width, heads, dropout))))
    children += [("norm", begin_stage(nn.LayerNorm(width))), ("head", Logits(width, vocabulary))]
    model = nn.Sequential(OrderedDict(children))
    if gpt2:
        _initialize_lm(model, blocks)
    if tied:
        model.head.weight = model.embedding.tokens.weight  # type: ignore[union-attr, assignment]
    return model


class DepthAttention(nn.Module):
    """Attention over sources from earlier depths, for each token by itself: a learned query weighs
    the sources by their keys, which are the normalized sources. It begins as their plain mean.

    The norm has no gain of its own: the query's entries would be multiplied by it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width))

    def forward(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return sum_s softmax_s(q . RMSNorm(v_s)) v_s. sources v: each (B, T, W) -> (B, T, W)."""
        values = torch.stack(list(sources))
        # written out, since torch 2.0 has no RMSNorm
        scale = (values.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        scores = (values * scale) @ self.query
        return (scores.softmax(0).unsqueeze(-1) * values).sum(0)


class DepthLayer(Block):
    """Transformer layer with attention residuals: each sublayer's input is mixed from the sums of
    the blocks before it and from the sum of its own block so far.
    """

    def __init__(self, width: int, heads: int, dropout: float, is_first: bool) -> None:
        super().__init__(width, heads, dropout)
        # the first sublayer of a model has the embedding alone
        self.mix1 = None if is_first else DepthAttention(width)
        self.mix2 = DepthAttention(width)

    def forward(  # type: ignore[override]
        self, blocks: Sequence[torch.Tensor], partial: Optional[torch.Tensor]
    ) -> torch.Tensor:
        """Return the sum of the sublayers of this block so far. blocks: the sums of those before it,
        each (B, T, W); partial: the sum so far, None at the beginning of a block.
        """
        sources = blocks if partial is None else [*blocks, partial]
        x = self.norm1(blocks[0] if self.mix1 is None else self.mix1(sources))
        x = self.dropout1(self.attention(x, _make_causal_mask(x)))
        partial = x if partial is None else partial + x
        x = self.norm2(self.mix2([*blocks, partial]))
        return partial + self.dropout2(self.fc2(self.gelu(self.fc1(x))))


class AttentionResidualLM(nn.Module):
    """Causal language model with attention residuals over blocks of layers."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        heads: int,
        layers: int,
        layers_per_block: int,
        context: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self._layers = [f"layer{number}" for number in range(1, layers + 1)]
        self._layers_per_block = layers_per_block
        self.embedding = LearnedEmbedding(vocabulary, context, width, dropout)
        for name in self._layers:
            layer = DepthLayer(width, heads, dropout, is_first=name == "layer1")
            self.add_module(name, begin_stage(layer))
        self.mix = begin_stage(DepthAttention(width))
        self.norm = nn.LayerNorm(width)
        self.head = Logits(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits. x: tokens (B, T) -> (B, vocabulary, T)."""
        blocks = [self.embedding(x)]
        partial = None
        for number, name in enumerate(self._layers, 1):
            partial = getattr(self, name)(blocks, partial)
            if number % self._layers_per_block == 0:
                blocks = [*blocks, partial]
                partial = None
        return self.head(self.norm(self.mix(blocks if partial is None else [*blocks, partial])))


def attention_residual_lm(
    vocabulary: int = 256,
    width: int = 128,
    heads: int = 4,
    layers: int = 4,
    layers_per_block: int = 2,
    context: int = 64,
    dropout: float = 0.0,
) -> AttentionResidualLM:
    """Build a causal language model with block attention residuals: `layers + 2` stages.

    Input tokens (B, T), T at most `context`; output (B, vocabulary, T), for labels (B, T). Weights
    begin as GPT-2's. Raise `BadInput` if an argument is out of range.
    """
    _check(
        "attention_residual_lm",
        heads,
        width,
        dropout,
        vocabulary=vocabulary,
        layers=layers,
        layers_per_block=layers_per_block,
        context=context,
    )
    model = AttentionResidualLM(
        vocabulary, width, heads, layers, layers_per_block, context, dropout
    )
    _initialize_lm(model, layers)
    return model


def _initialize_lm(model: nn.Module, blocks: int) -> None:
    """Initialize as GPT-2: normal with deviation 0.02, divided by sqrt(2 blocks) where a sublayer
    ends; zero biases.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            summed = name.endswith(("attention.output", "fc2"))
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * blocks) if summed else 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


# ---- translation


class SinusoidalEmbedding(nn.Module):
    """Embedding of tokens times sqrt(width), plus sines and cosines of the position with
    wavelengths from 2 pi to 20,000 pi.
    """

    def __init__(self, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the embedded tokens. x: tokens (B, T) -> (B, T, W)."""
        width = self.tokens.embedding_dim
        positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        rates = 10000.0 ** (
            -torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / width
        )
        angles = positions[:, None] * rates  # (T, W / 2)
        embedded = self.tokens(x)
        waves = torch.cat((angles.sin(), angles.cos()), -1).to(embedded.dtype)  # (T, W)
        return self.dropout(embedded * math.sqrt(width) + waves)


class EncoderLayer(nn.Module):
    """Encoder layer: attention, then two linear layers with a ReLU, each added to its input before
    a norm.
    """

    def __init__(self, width: int, heads: int, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.dropout1 = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, feedforward)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(feedforward, width)
        self.dropout2 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Return the layer's output. x: (B, T, W), keep: (B, 1, 1, T), true at source tokens -> (B,
        T, W).
        """
        x = self.norm1(x + self.dropout1(self.attention(x, keep)))
        return self.norm2(x + self.dropout2(self.fc2(self.relu(self.fc1(x)))))


class DecoderLayer(nn.Module):
    """Decoder layer: causal attention, attention to the encoder, two linear layers, each added to
    its input before a norm.
    """

    def __init__(self, width: int, heads: int, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.dropout1 = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(width)
        self.cross = Attention(width, heads)
        self.dropout2 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, feedforward)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(feedforward, width)
        self.dropout3 = nn.Dropout(dropout)
        self.norm3 = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Return the layer's output.

        x: (B, T, W), memory: the encoder's output (B, T, W), keep: (B, 1, 1, T), true at source
        tokens -> (B, T, W).
        """
        x = self.norm1(x + self.dropout1(self.attention(x, _make_causal_mask(x))))
        x = self.norm2(x + self.dropout2(self.cross(x, keep, memory)))
        return self.norm3(x + self.dropout3(self.fc2(self.relu(self.fc1(x)))))


class Translation(nn.Module):
    """Encoder and decoder. The children are registered in the order in which they run."""

    def __init__(
        self,
        source_vocabulary: int,
        target_vocabulary: int,
        width: int,
        heads: int,
        layers: int,
        feedforward: int,
        dropout: float,
    ) -> None:
        super().__init__()
        names = [
            f"{kind}{number}" for kind in ("encoder", "decoder") for number in range(1, layers + 1)
        ]
        self._encoders, self._decoders = names[:layers], names[layers:]
        self.source_embedding = SinusoidalEmbedding(source_vocabulary, width, dropout)
        for name in self._encoders:
            self.add_module(name, begin_stage(EncoderLayer(width, heads, feedforward, dropout)))
        self.target_embedding = begin_stage(SinusoidalEmbedding(target_vocabulary, width, dropout))
        for name in self._decoders:
            self.add_module(name, begin_stage(DecoderLayer(width, heads, feedforward, dropout)))
        self.head = begin_stage(Logits(width, target_vocabulary))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits. x: (B, 2, T), source and shifted target tokens, 0 is padding -> (B,
        target_vocabulary, T).
        """
        if x.dim() != 3 or x.shape[1] != 2:
            raise BadInput(
                f"x: {tuple(x.shape)}: must be (B, 2, T), source and shifted target tokens"
            )
        keep = (x[:, 0] != PADDING)[:, None, None]
        memory = self.source_embedding(x[:, 0])
        for name in self._encoders:
            memory = getattr(self, name)(memory, keep)
        out = self.target_embedding(x[:, 1])
        for name in self._decoders:
            out = getattr(self, name)(out, memory, keep)
        return self.head(out)


def transformer_translation(
    source_vocabulary: int = 10000,
    target_vocabulary: int = 10000,
    width: int = 512,
    heads: int = 4,
    layers: int = 6,
    feedforward: int = 1024,
    dropout: float = 0.3,
) -> Translation:
    """Build a Transformer for translation of `layers` encoder and `layers` decoder layers: with 6,
    15 stages and 93 weights.

    Input tokens (B, 2, T): source, and target shifted right; 0 is padding, in a target only at its
    end. Output (B, target_vocabulary, T), for labels (B, T) with -100 where padded. 46,903,296
    parameters by default. Raise `BadInput` if an argument is out of range.
    """
    sizes = {"source_vocabulary": source_vocabulary, "target_vocabulary": target_vocabulary}
    _check(
        "transformer_translation",
        heads,
        width,
        dropout,
        **sizes,
        layers=layers,
        feedforward=feedforward,
    )
    if width % 2:
        raise BadInput(
            f"transformer_translation: width: {width}: must be even, half sines and half cosines"
        )
    model = Translation(
        source_vocabulary, target_vocabulary, width, heads, layers, feedforward, dropout
    )
    _initialize_translation(model, width)
    return model


def _initialize_translation(model: nn.Module, width: int) -> None:
    """Initialize as fairseq: Glorot uniform, zero biases; embeddings and head normal with variance
    1 / width, padding zero.
    """
    for module in model.modules():
        if isinstance(module, (nn.Embedding, Logits)):
            nn.init.normal_(module.weight, std=width**-0.5)
        elif isinstance(module, nn.Linear):
            # a projection (3 W, W) begins with Glorot's bound of its thirds, divided by sqrt(2)
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding):
            with torch.no_grad():
                module.weight[PADDING].zero_()
