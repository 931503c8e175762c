"""Test Transformers: stages, sizes, torch's layers, what a token sees, refusals."""

from __future__ import annotations

import itertools
import math
from typing import Any, Callable, Dict, List

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_pipe.model.observation import observe_training
from ipu_pipe.model.stages import partition
from models import transformer
from tests.support.models import build_on_meta, count_weights, find_unreached_weights
from tests.support.runs import list_faults

LM: Dict[str, Any] = {"vocabulary": 11, "width": 16, "heads": 2, "blocks": 2, "context": 8}
TRANSLATION: Dict[str, Any] = {
    "source_vocabulary": 13, "target_vocabulary": 11, "width": 16, "heads": 2, "layers": 2, "feedforward": 24,
    "dropout": 0.0,
}  # fmt: skip


def make_seeded(make: Callable[..., nn.Module], **args: Any) -> Any:
    """Return a model from a fixed seed, with weights moved from special points such as zero."""
    torch.manual_seed(5)
    model = make(**args)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def make_translation_and_tokens(batch: int, tokens: int, padded: int = 0) -> Any:
    """Return a model, and source and target tokens (batch, 2, tokens), the last `padded` being padding."""
    x = torch.randint(1, 11, (batch, 2, tokens), generator=torch.Generator().manual_seed(0))
    x = F.pad(x[..., : tokens - padded], (0, padded))
    return make_seeded(transformer.transformer_translation, **TRANSLATION), x


# ---- stages and sizes


def test_the_language_model_is_a_stage_a_block() -> None:
    model = build_on_meta(transformer.transformer_lm)
    x = torch.zeros(2, 64, dtype=torch.int64, device="meta")
    part = partition(model, x)
    blocks = [f"block{n}.norm1" for n in (1, 2, 3, 4)]
    assert [stage.name for stage in part.stages] == ["embedding.tokens", *blocks, "norm"]
    assert model(x).shape == (2, 256, 64)
    residual = build_on_meta(transformer.attention_residual_lm)
    assert len(partition(residual, x[:, :8])) == 4 + 2


def test_the_translating_model_has_15_stages_and_93_weights() -> None:
    model = build_on_meta(transformer.transformer_translation)
    x = torch.zeros(2, 2, 9, dtype=torch.int64, device="meta")
    encoders, decoders = ([f"{kind}{n}" for n in range(1, 7)] for kind in ("encoder", "decoder"))
    children = ["source_embedding", *encoders, "target_embedding", *decoders, "head"]
    assert list(partition(model, x).begins) == children[1:] and model(x).shape == (2, 10000, 9)
    finest = partition(model, x, "finest").stages
    assert len(finest) == 93 == 6 * (6 + 9) + 3
    assert max(len(s.parameters) for s in finest) == 2  # a weight and its bias


def test_transformers_have_the_parameters_that_their_layers_add_up_to() -> None:
    w, v = 128, 256
    block = (3 + 1) * (w * w) + 4 * w + 2 * 4 * w * w + 5 * w + 2 * 2 * w
    untied = v * w + 64 * w + 4 * block + 2 * w + v * w
    assert count_weights(build_on_meta(transformer.transformer_lm)) == untied
    model = build_on_meta(transformer.transformer_lm, tied=True)
    assert count_weights(model) == untied - v * w
    assert model.head.weight is model.embedding.tokens.weight
    w, s, t = 512, 9000, 7000
    attention, linear, norm = 4 * w * w + 4 * w, 2 * w * 1024 + 1024 + w, 2 * w
    want = s * w + 2 * t * w + 6 * (3 * attention + 2 * linear + 5 * norm)
    sizes = {"source_vocabulary": s, "target_vocabulary": t}
    assert count_weights(build_on_meta(transformer.transformer_translation, **sizes)) == want


# ---- outputs


def test_depth_attention_weighs_normalized_sources_and_begins_as_their_mean() -> None:
    sources = [torch.randn(2, 3, 8, dtype=torch.float64) * size for size in (0.1, 1, 30)]
    mix = transformer.DepthAttention(8).double()
    torch.testing.assert_close(mix(sources), sum(sources) / 3)
    nn.init.normal_(mix.query)
    for b, t in itertools.product(range(2), range(3)):
        values = [source[b, t] for source in sources]
        keys = [v / (sum(e * e for e in v) / 8 + 1e-6) ** 0.5 for v in values]
        odds = [math.exp((mix.query @ key).item()) for key in keys]
        want = sum(v * odd for v, odd in zip(values, odds)) / sum(odds)
        torch.testing.assert_close(mix(sources)[b, t], want)


def test_attention_residuals_read_the_sums_of_blocks_and_of_their_own_so_far() -> None:
    sizes = {"vocabulary": 11, "width": 16, "heads": 2, "context": 8, "layers": 3}
    model = make_seeded(transformer.attention_residual_lm, **sizes).double()
    x = torch.randint(11, (2, 8))
    seen: List[Any] = []
    outputs: List[torch.Tensor] = []
    layers = [model.layer1, model.layer2, model.layer3]
    for mix in filter(None, [*(m for one in layers for m in (one.mix1, one.mix2)), model.mix]):
        mix.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    for layer in layers:
        for end in (layer.attention.output, layer.fc2):
            end.register_forward_hook(lambda m, args, out: outputs.append(out))
    model(x)
    first, second, embedded = sum(outputs[:4]), sum(outputs[4:]), model.embedding(x)
    assert [len(sources) for sources in seen] == [2, 2, 2, 2, 3, 3]
    torch.testing.assert_close(list(seen[2]), [embedded, sum(outputs[:3])])
    torch.testing.assert_close(list(seen[3]), [embedded, first])
    torch.testing.assert_close(list(seen[4]), [embedded, first, outputs[4]])
    torch.testing.assert_close(list(seen[5]), [embedded, first, second])


def copy_attention(mine: Any, torchs: nn.MultiheadAttention) -> None:
    """Copy the weights of torch's attention into ours."""
    mine.projection.weight.data = torchs.in_proj_weight.data
    mine.projection.bias.data = torchs.in_proj_bias.data
    mine.output.load_state_dict(torchs.out_proj.state_dict())


def copy_layer(mine: Any, torchs: Any) -> None:
    """Copy torch's layer into the same layer of ours, whose parts have other names."""
    copy_attention(mine.attention, torchs.self_attn)
    if hasattr(mine, "cross"):
        copy_attention(mine.cross, torchs.multihead_attn)
    for ours in ("fc1", "fc2", "norm1", "norm2", "norm3"):
        if hasattr(mine, ours):
            theirs = getattr(torchs, ours.replace("fc", "linear"))
            getattr(mine, ours).load_state_dict(theirs.state_dict())


def test_layers_equal_torchs() -> None:
    x, memory = torch.randn(3, 5, 16), torch.randn(3, 5, 16)
    padded = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]]).bool()
    keep, future = ~padded[:, None, None], ~torch.ones(5, 5).tril().bool()
    args: Dict[str, Any] = {
        "d_model": 16, "nhead": 2, "dim_feedforward": 64, "dropout": 0.0, "batch_first": True,
    }  # fmt: skip
    theirs: Any = make_seeded(nn.TransformerEncoderLayer, **args)
    encoder = transformer.EncoderLayer(16, 2, 64, 0.0)
    copy_layer(encoder, theirs)
    torch.testing.assert_close(encoder(x, keep), theirs(x, src_key_padding_mask=padded))

    theirs = make_seeded(nn.TransformerDecoderLayer, **args)
    decoder = transformer.DecoderLayer(16, 2, 64, 0.0)
    copy_layer(decoder, theirs)
    want = theirs(x, memory, tgt_mask=future, memory_key_padding_mask=padded)
    torch.testing.assert_close(decoder(x, memory, keep), want)

    theirs = make_seeded(nn.TransformerEncoderLayer, norm_first=True, activation="gelu", **args)
    block = transformer.Block(16, 2, 0.0)
    copy_layer(block, theirs)
    torch.testing.assert_close(block(x), theirs(x, src_mask=future))


def test_embeddings_add_positions() -> None:
    x = torch.tensor([[3, 1, 0, 3]])
    learned = transformer.LearnedEmbedding(5, 6, 8, 0.0)
    want = learned.tokens.weight[x[0]] + learned.positions.weight[:4]
    torch.testing.assert_close(learned(x)[0], want)
    fixed = transformer.SinusoidalEmbedding(5, 8, 0.0)
    angle = 3 / 10000 ** torch.tensor([0.0, 0.25, 0.5, 0.75])
    want = 8**0.5 * fixed.tokens.weight[3] + torch.cat((angle.sin(), angle.cos()))
    torch.testing.assert_close(fixed(x)[0, 3], want)


def test_the_translating_model_looks_at_all_of_the_source_and_the_target_so_far() -> None:
    model, x = make_translation_and_tokens(2, 6)
    before = model(x)
    for t in range(6):
        changed = x.clone()
        changed[:, 1, t:] = changed[:, 1, t:] % 10 + 1
        after = model(changed)
        torch.testing.assert_close(after[..., :t], before[..., :t], rtol=0, atol=1e-5)
        assert (after[..., t] - before[..., t]).abs().amax(-1).min() > 1e-3
        changed = x.clone()
        changed[:, 0, t] = changed[:, 0, t] % 10 + 1
        assert (model(changed) - before).abs().amax((0, 1)).min() > 1e-4


def test_padding_does_not_leak_into_a_translation() -> None:
    model, x = make_translation_and_tokens(2, 9, padded=3)
    longer = model(x)
    torch.testing.assert_close(longer[..., :6], model(x[..., :6]))
    x[0, 0, 2] = transformer.PADDING  # in the middle of a source too
    before = model(x)[..., :6]
    for embedding in (model.source_embedding, model.target_embedding):
        embedding.tokens.weight.data[transformer.PADDING] += 7
    torch.testing.assert_close(model(x)[..., :6], before)


def test_a_source_that_is_all_padding_gives_numbers_and_gradients() -> None:
    model, x = make_translation_and_tokens(3, 5)
    x[1, 0] = x[2] = transformer.PADDING
    labels = torch.randint(1, 11, (3, 5))
    labels[2] = -100
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    assert bool(loss.isfinite()) and all(bool(p.grad.isfinite().all()) for p in model.parameters())
    # padding learns nothing
    assert not bool(model.source_embedding.tokens.weight.grad[transformer.PADDING].any())


# ---- all


SMALL: Dict[str, Callable[[], nn.Module]] = {
    "lm": lambda: transformer.transformer_lm(**LM, dropout=0.2),
    "lm, tied": lambda: transformer.transformer_lm(**LM, tied=True),
    "lm, residuals": lambda: transformer.attention_residual_lm(11, 16, 2, 3, 2, 8, 0.2),
    "translation": lambda: transformer.transformer_translation(**{**TRANSLATION, "dropout": 0.2}),
}


@pytest.mark.parametrize("name", SMALL)
def test_gradients_reach_every_weight_and_the_seed_decides_the_weights(name: str) -> None:
    """No weight is one that is derived from others and saved."""
    x, y = torch.randint(1, 11, (2, 8)), torch.randint(1, 11, (2, 8))
    if name == "translation":
        x, y[:, -1] = torch.stack([x, F.pad(x[:, :-1], (1, 0))], 1), -100
    assert find_unreached_weights(SMALL[name], x, y) == []
    model = SMALL[name]()
    assert observe_training(model, x, y, lambda x, y: F.cross_entropy(model(x), y)).derived == []


LANGUAGE, TRANSLATE = transformer.transformer_lm, transformer.transformer_translation


@pytest.mark.parametrize("make, args, message", [
    (LANGUAGE, {"blocks": 0}, "transformer_lm: blocks: 0: must be at least 1"),
    (LANGUAGE, {"heads": 3}, "transformer_lm: heads: 3: must divide the width, 128"),
    (transformer.attention_residual_lm, {"layers_per_block": 0},
     "attention_residual_lm: layers_per_block: 0: must be at least 1"),
    (TRANSLATE, {"source_vocabulary": -1}, "transformer_translation: source_vocabulary: -1: must be at least 1"),
    (TRANSLATE, {"width": 9, "heads": 3}, "transformer_translation: width: 9: must be even, half sines and half cosines"),
])  # fmt: skip
def test_impossible_arguments_are_refused(make: Any, args: Dict[str, Any], message: str) -> None:
    assert list_faults(make, **args) == [message]


@pytest.mark.parametrize("make, shape, message", [
    (LANGUAGE, (2, 65), "x: (2, 65): must be tokens (B, T), T at most the context, 64"),
    (TRANSLATE, (2, 8), "x: (2, 8): must be (B, 2, T), source and shifted target tokens"),
])  # fmt: skip
def test_inputs_of_another_shape_are_refused(make: Any, shape: Any, message: str) -> None:
    assert list_faults(build_on_meta(make), torch.ones(shape, dtype=torch.int64)) == [message]
