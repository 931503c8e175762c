"""Test VGG, the pre-activation ResNet-50 and Transformers: stages, sizes, outputs, refusals."""

from __future__ import annotations

import itertools
import math
from typing import Any, Callable, Dict, List

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_pipe import Pipeline
from ipu_pipe.model.observation import observe_effects, observe_training
from ipu_pipe.model.stages import partition
from models import resnet as resnets
from models import transformer, vgg
from tests.support.models import build_on_meta, count_weights, find_unreached_weights
from tests.support.runs import list_faults

VGGS = {
    "vgg11": ((1, 1, 2, 2, 2), 29),
    "vgg13": ((2, 2, 2, 2, 2), 33),
    "vgg16": ((2, 2, 3, 3, 3), 39),
}
LM: Dict[str, Any] = {"vocabulary": 11, "width": 16, "heads": 2, "blocks": 2, "context": 8}
RESIDUAL_LM: Dict[str, Any] = {"vocabulary": 11, "width": 16, "heads": 2, "context": 8}
TRANSLATION: Dict[str, Any] = {
    "source_vocabulary": 13,
    "target_vocabulary": 11,
    "width": 16,
    "heads": 2,
    "layers": 2,
}
TRANSLATION.update(feedforward=24, dropout=0.0)


def list_stage_names(model: nn.Module, x: torch.Tensor) -> List[str]:
    """Return the modules at which stages begin."""
    return [stage.name for stage in partition(model, x).stages]


def count_linear_weights(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def make_seeded(make: Callable[..., nn.Module], **args: Any) -> Any:
    """Return a model from a fixed seed, with weights moved from special points such as zero."""
    torch.manual_seed(5)
    model = make(**args)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def make_token_pairs(batch: int, tokens: int, padded: int = 0) -> torch.Tensor:
    """Return source and target tokens (batch, 2, tokens), the last `padded` being padding."""
    x = torch.randint(1, 11, (batch, 2, tokens), generator=torch.Generator().manual_seed(0))
    return F.pad(x[..., : tokens - padded], (0, padded))


# ---- VGG


@pytest.mark.parametrize("norm", ["none", "group"])
@pytest.mark.parametrize("name", VGGS)
def test_vggs_have_the_papers_stages_each_at_a_top_level_child(name: str, norm: str) -> None:
    depths, stages = VGGS[name]
    model, images = (
        build_on_meta(getattr(vgg, name), norm=norm),
        torch.empty(2, 3, 32, 32, device="meta"),
    )
    begins = list_stage_names(model, images)
    assert len(begins) == stages == 2 * sum(depths) + 5 + 7 + 1
    children = [n for n, _ in model.named_children() if not n.startswith(("norm", "flatten"))]
    assert (
        begins == children
    )  # a norm belongs to its convolution's stage, the flattening to the last pool's
    assert model(images).shape == (2, 10)


@pytest.mark.parametrize("name", VGGS)
@pytest.mark.parametrize("width", [64, 6])
def test_vggs_have_the_parameters_that_their_convolutions_add_up_to(name: str, width: int) -> None:
    widths = [w for w, depth in zip((1, 2, 4, 8, 8), VGGS[name][0]) for _ in range(depth)]
    channels = [3, *(width * w for w in widths)]
    convolutions = sum(count_linear_weights(9 * a, b) for a, b in zip(channels, channels[1:]))
    want = (
        convolutions
        + 2 * count_linear_weights(8 * width, 8 * width)
        + count_linear_weights(8 * width, 7)
    )
    assert count_weights(build_on_meta(getattr(vgg, name), width=width, classes=7)) == want
    grouped = build_on_meta(getattr(vgg, name), width=width, classes=7, norm="group")
    assert count_weights(grouped) == want + 2 * sum(channels[1:])
    assert {m.num_groups for m in grouped.modules() if isinstance(m, nn.GroupNorm)} == {width // 2}


def test_vgg11_computes_convolutions_pools_and_a_classifier() -> None:
    model = make_seeded(vgg.vgg11, width=2, dropout=0.4).eval()
    weights, x = model.state_dict(), torch.randn(2, 3, 32, 32)
    want = x
    for block, depth in enumerate(VGGS["vgg11"][0], 1):
        for index in range(1, depth + 1):
            at = f"conv{block}_{index}"
            want = F.conv2d(want, weights[f"{at}.weight"], weights[f"{at}.bias"], padding=1).relu()
        want = F.max_pool2d(want, 2)
    want = want.flatten(1)
    for at in ("fc6", "fc7", "fc8"):
        want = F.linear(want, weights[f"{at}.weight"], weights[f"{at}.bias"])
        want = want if at == "fc8" else want.relu()
    torch.testing.assert_close(model(x), want)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.4, 0.4]
    assert list(observe_effects(model, x).draws) == ["dropout6", "dropout7"]


def test_vggs_start_with_he_initialization_by_fan_out_and_without_bias() -> None:
    torch.manual_seed(0)
    model = vgg.vgg11(width=32)
    weight = model.get_parameter(
        "conv4_1.weight"
    )  # (256, 128, 3, 3): fan-out 256 * 9, fan-in 128 * 9
    assert weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.02)
    assert not any(
        bool(p.any())
        for n, p in model.named_parameters()
        if n.startswith("conv") and n.endswith("bias")
    )


# ---- pre-activation ResNet-50


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_preact_resnet50_has_the_papers_stages_at_any_image_size(norm: str) -> None:
    model = build_on_meta(resnets.preact_resnet50, norm=norm)
    for side in (32, 224):
        images = torch.empty(2, 3, side, side, device="meta")
        assert len(partition(model, images)) == 78 == 1 + 1 + 16 * (3 + 1) + 4 * 2 + 1 + 1 + 1 + 1
        assert model(images).shape == (2, 1000)
        begins = list_stage_names(model, images)
        first_block = [
            f"layer1.0.{name}" for name in ("norm1", "shortcut", "conv1", "norm2", "norm3", "add")
        ]
        assert begins[:8] == ["conv1", "maxpool", *first_block] and begins[-4:] == [
            "norm",
            "avgpool",
            "fc",
            "loss",
        ]
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 1 + 16 * 3 + 4
    assert not any(m.inplace for m in model.modules() if isinstance(m, nn.ReLU))


def test_preact_resnet50_has_the_parameters_that_its_blocks_add_up_to() -> None:
    want, inputs = 3 * 64 * 49, 64
    for width, depth in zip((64, 128, 256, 512), (3, 4, 6, 3)):
        for index in range(depth):
            want += (
                2 * (inputs + width + width)
                + inputs * width
                + 9 * width * width
                + 4 * width * width
            )
            want += inputs * 4 * width if index == 0 else 0
            inputs = 4 * width
    want += 2 * 2048 + count_linear_weights(2048, 1000)
    assert {
        count_weights(build_on_meta(resnets.preact_resnet50, norm=norm))
        for norm in ("batch", "group")
    } == {want}
    norms = [
        m for m in build_on_meta(resnets.preact_resnet50).modules() if isinstance(m, nn.GroupNorm)
    ]
    assert (
        {m.num_groups for m in norms} == {32}
        and norms[0].num_channels == 64
        and len(norms) == 16 * 3 + 1
    )


@pytest.mark.parametrize("stride", [1, 2])
def test_a_preactivation_bottleneck_projects_the_shared_preactivation(stride: int) -> None:
    norm = lambda channels: nn.GroupNorm(2, channels)  # noqa: E731
    block = make_seeded(
        resnets.PreActivationBottleneck, inputs=4, width=2, stride=stride, norm=norm
    )
    x = torch.randn(2, 4, 8, 8)
    pre = lambda x, n: F.group_norm(x, 2, getattr(block, n).weight, getattr(block, n).bias).relu()  # noqa: E731
    shared = pre(x, "norm1")
    inner = pre(F.conv2d(shared, block.conv1.weight), "norm2")
    inner = pre(F.conv2d(inner, block.conv2.weight, stride=stride, padding=1), "norm3")
    want = F.conv2d(inner, block.conv3.weight) + F.conv2d(
        shared, block.shortcut.weight, stride=stride
    )
    torch.testing.assert_close(block(x), want)
    ordinary = resnets.PreActivationBottleneck(8, 2, 1, norm)
    nn.init.zeros_(ordinary.conv3.weight)
    assert ordinary.shortcut is None and torch.equal(ordinary(want), want)


# ---- Transformers: stages and sizes


def test_the_language_model_is_a_stage_a_block() -> None:
    model, x = (
        build_on_meta(transformer.transformer_lm),
        torch.zeros(2, 64, dtype=torch.int64, device="meta"),
    )
    begins = ["embedding.tokens", *(f"block{n}.norm1" for n in (1, 2, 3, 4)), "norm"]
    assert list_stage_names(model, x) == begins and len(begins) == 4 + 2
    assert model(x).shape == (2, 256, 64)
    assert isinstance(model, nn.Sequential)
    assert set(partition(model, x).begins) == {"block1", "block2", "block3", "block4", "norm"}


def test_the_translating_model_has_15_stages_and_93_weights() -> None:
    model, x = (
        build_on_meta(transformer.transformer_translation),
        torch.zeros(2, 2, 9, dtype=torch.int64, device="meta"),
    )
    numbers = range(1, 7)
    encoders, decoders = [f"encoder{n}" for n in numbers], [f"decoder{n}" for n in numbers]
    children = ["source_embedding", *encoders, "target_embedding", *decoders, "head"]
    assert [name for name, _ in model.named_children()] == children
    assert len(partition(model, x)) == 15 and list(partition(model, x).begins) == children[1:]
    assert model(x).shape == (2, 10000, 9)
    finest = partition(model, x, "finest").stages
    assert len(finest) == 93 == 6 * (6 + 9) + 3
    assert max(len(s.parameters) for s in finest) == 2  # a weight and its bias
    encoder = ["attention.projection", "attention.output", "norm1", "fc1", "fc2", "norm2"]
    decoder = [*encoder[:3], "cross.projection", "cross.output", "norm2", "fc1", "fc2", "norm3"]
    for layer, want in (("encoder2", encoder), ("decoder2", decoder)):
        assert [s.name for s in finest if s.name.startswith(layer)] == [
            f"{layer}.{n}" for n in want
        ]


def test_transformers_have_the_parameters_that_their_layers_add_up_to() -> None:
    w, f, v = 128, 512, 256
    attention, norm = count_linear_weights(w, 3 * w) + count_linear_weights(w, w), 2 * w
    block = attention + count_linear_weights(w, f) + count_linear_weights(f, w) + 2 * norm
    untied = v * w + 64 * w + 4 * block + norm + v * w
    assert count_weights(build_on_meta(transformer.transformer_lm)) == untied == 867_072
    assert count_weights(build_on_meta(transformer.transformer_lm, tied=True)) == untied - v * w
    w, f, s, t = 512, 1024, 9000, 7000
    attention, norm = count_linear_weights(w, 3 * w) + count_linear_weights(w, w), 2 * w
    encoder = attention + norm + count_linear_weights(w, f) + count_linear_weights(f, w) + norm
    want = s * w + t * w + 6 * encoder + 6 * (encoder + attention + norm) + t * w
    assert (
        count_weights(
            build_on_meta(
                transformer.transformer_translation, source_vocabulary=s, target_vocabulary=t
            )
        )
        == want
    )


def test_a_tied_head_is_the_embeddings_weight_and_must_be_in_its_stage() -> None:
    model, x = transformer.transformer_lm(**LM, tied=True), torch.randint(11, (2, 8))
    assert model.head.weight is model.embedding.tokens.weight
    for one in (1, {"count": 1, "by": "parameters"}, {"finest": 1}):
        (stage,) = partition(model, x, one).stages
        assert list(stage.parameters) == [n for n, _ in model.named_parameters()]
    for stages, last in ((None, 3), (2, 1), (["block2"], 1), ("finest", 15)):
        assert list_faults(partition, model, x, stages) == [
            f"stages: embedding.tokens.weight on stage 0 and head.weight on stage {last} are one shared weight: "
            "both uses must be in one stage"
        ]


# ---- Transformers: outputs


def test_depth_attention_weighs_normalized_sources_and_begins_as_their_mean() -> None:
    sources = [torch.randn(2, 3, 8, dtype=torch.float64) * size for size in (0.1, 1, 30)]
    mix = transformer.DepthAttention(8).double()
    torch.testing.assert_close(mix(sources), sum(sources) / 3)
    with torch.no_grad():
        mix.query.normal_()
    for b, t in itertools.product(range(2), range(3)):
        values = [source[b, t] for source in sources]
        keys = [v / (sum(e * e for e in v) / 8 + 1e-6) ** 0.5 for v in values]
        odds = [math.exp((mix.query @ key).item()) for key in keys]
        want = sum(v * odd for v, odd in zip(values, odds)) / sum(odds)
        torch.testing.assert_close(mix(sources)[b, t], want)


def test_attention_residuals_read_the_sums_of_blocks_and_of_their_own_so_far() -> None:
    """Zero queries make each mean a plain one, so the sources can be counted."""
    model = make_seeded(transformer.attention_residual_lm, **RESIDUAL_LM, layers=3).double()
    x = torch.randint(11, (2, 8))
    seen: List[Any] = []
    for layer in (model.layer1, model.layer2, model.layer3):
        for mix in filter(None, (layer.mix1, layer.mix2)):
            mix.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    model.mix.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    outputs: List[torch.Tensor] = []
    for layer in (model.layer1, model.layer2, model.layer3):
        for end in (layer.attention.output, layer.fc2):
            end.register_forward_hook(lambda m, args, out: outputs.append(out))
    model(x)
    first, second = sum(outputs[:4]), sum(outputs[4:])
    embedded = model.embedding(x)
    assert [len(sources) for sources in seen] == [2, 2, 2, 2, 3, 3]
    torch.testing.assert_close(list(seen[2]), [embedded, sum(outputs[:3])])
    torch.testing.assert_close(list(seen[3]), [embedded, first])
    torch.testing.assert_close(list(seen[4]), [embedded, first, outputs[4]])
    torch.testing.assert_close(list(seen[5]), [embedded, first, second])


def test_attention_residuals_cross_all_later_stages() -> None:
    """Plain training, bit for bit, with the sums of earlier blocks sent through each stage."""
    data = [(torch.randint(11, (4, 8)), torch.randint(11, (4, 8))) for _ in range(3)]
    trained: List[Dict[str, Any]] = []
    for is_piped in (False, True):
        model = make_seeded(transformer.attention_residual_lm, **RESIDUAL_LM)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if is_piped:
            with Pipeline(model, F.cross_entropy, optimizer, "gpipe", microbatches=1) as pipe:
                for x, y in data:
                    pipe.step(x, y)
                assert len(pipe.partition) == 4 + 2
        else:
            for x, y in data:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        trained.append(model.state_dict())
    assert all(torch.equal(trained[0][name], value) for name, value in trained[1].items())


def copy_attention(mine: Any, torchs: nn.MultiheadAttention) -> None:
    mine.projection.weight.data, mine.projection.bias.data = (
        torchs.in_proj_weight.data,
        torchs.in_proj_bias.data,
    )
    mine.output.load_state_dict(torchs.out_proj.state_dict())


def copy_layer(mine: Any, torchs: Any) -> None:
    """Copy torch's layer into the same layer of ours, whose parts have other names."""
    copy_attention(mine.attention, torchs.self_attn)
    names = {
        "fc1": "linear1",
        "fc2": "linear2",
        "norm1": "norm1",
        "norm2": "norm2",
        "norm3": "norm3",
    }
    for ours, theirs in names.items():
        if hasattr(mine, ours):
            getattr(mine, ours).load_state_dict(getattr(torchs, theirs).state_dict())


def test_layers_equal_torchs() -> None:
    x, memory = torch.randn(3, 5, 16), torch.randn(3, 5, 16)
    padded = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]]).bool()
    keep, future = ~padded[:, None, None], ~torch.ones(5, 5).tril().bool()
    args: Dict[str, Any] = {"dim_feedforward": 64, "dropout": 0.0, "batch_first": True}

    theirs: Any = make_seeded(nn.TransformerEncoderLayer, d_model=16, nhead=2, **args)
    encoder = transformer.EncoderLayer(16, 2, 64, 0.0)
    copy_layer(encoder, theirs)
    torch.testing.assert_close(encoder(x, keep), theirs(x, src_key_padding_mask=padded))

    theirs = make_seeded(nn.TransformerDecoderLayer, d_model=16, nhead=2, **args)
    decoder = transformer.DecoderLayer(16, 2, 64, 0.0)
    copy_layer(decoder, theirs)
    copy_attention(decoder.cross, theirs.multihead_attn)
    want = theirs(x, memory, tgt_mask=future, memory_key_padding_mask=padded)
    torch.testing.assert_close(decoder(x, memory, keep), want)

    theirs = make_seeded(
        nn.TransformerEncoderLayer, d_model=16, nhead=2, norm_first=True, activation="gelu", **args
    )
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
    model, x = (
        make_seeded(transformer.transformer_translation, **TRANSLATION),
        make_token_pairs(2, 6),
    )
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
    model = make_seeded(transformer.transformer_translation, **TRANSLATION)
    x = make_token_pairs(2, 9, padded=3)
    longer = model(x)
    torch.testing.assert_close(longer[..., :6], model(x[..., :6]))
    with torch.no_grad():
        for embedding in (model.source_embedding, model.target_embedding):
            embedding.tokens.weight[transformer.PADDING] += 7
    torch.testing.assert_close(model(x)[..., :6], longer[..., :6])
    x[0, 0, 2] = transformer.PADDING  # in the middle of a source too
    before = model(x)[..., :6]
    model.source_embedding.tokens.weight.data[transformer.PADDING] -= 3
    torch.testing.assert_close(model(x)[..., :6], before)


def test_a_source_that_is_all_padding_gives_numbers_and_gradients() -> None:
    model, x = (
        make_seeded(transformer.transformer_translation, **TRANSLATION),
        make_token_pairs(3, 5),
    )
    x[1, 0] = transformer.PADDING
    x[2] = transformer.PADDING
    labels = torch.randint(1, 11, (3, 5))
    labels[2] = -100
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    assert bool(loss.isfinite()) and all(bool(p.grad.isfinite().all()) for p in model.parameters())
    pad = model.source_embedding.tokens.weight.grad[transformer.PADDING]
    assert not bool(pad.any())  # padding learns nothing


# ---- all


SMALL: Dict[str, Callable[[], nn.Module]] = {
    "vgg11, none": lambda: vgg.vgg11(width=8),
    "vgg16, group": lambda: vgg.vgg16(width=8, norm="group"),
    "preact_resnet50, group": lambda: resnets.preact_resnet50(10),
    "transformer_lm": lambda: transformer.transformer_lm(**{**LM, "dropout": 0.2}),
    "transformer_lm, tied": lambda: transformer.transformer_lm(**LM, tied=True),
    "transformer_lm, residuals": lambda: transformer.attention_residual_lm(11, 16, 2, 3, 2, 8, 0.2),
    "transformer_translation": lambda: transformer.transformer_translation(
        **{**TRANSLATION, "dropout": 0.2}
    ),
}


def make_small_example(name: str) -> List[torch.Tensor]:
    """Return one microbatch, x and y, for a model of `SMALL`."""
    torch.manual_seed(0)
    if name.startswith("transformer_lm"):
        return [torch.randint(11, (2, 8)), torch.randint(11, (2, 8))]
    if name == "transformer_translation":
        return [
            make_token_pairs(2, 6, padded=1),
            F.pad(torch.randint(1, 11, (2, 5)), (0, 1), value=-100),
        ]
    return [torch.randn(2, 3, 32, 32), torch.tensor([1, 7])]


@pytest.mark.parametrize("name", SMALL)
def test_gradients_reach_every_weight_and_the_seed_decides_the_weights(name: str) -> None:
    assert find_unreached_weights(SMALL[name], *make_small_example(name)) == []


@pytest.mark.parametrize("name", [name for name in SMALL if "preact" not in name])
def test_no_weight_is_derived_and_saved(name: str) -> None:
    model, (x, y) = SMALL[name](), make_small_example(name)
    assert observe_training(model, x, y, lambda x, y: F.cross_entropy(model(x), y)).derived == []


@pytest.mark.parametrize("make, args, message", [
    (vgg.vgg11, {"classes": 0}, "classes: 0: must be at least 1"),
    (vgg.vgg13, {"width": 0}, "width: 0: must be at least 1"),
    (vgg.vgg16, {"norm": "batch"}, "norm: batch: must be none or group"),
    (vgg.vgg16, {"norm": "group", "width": 3},
     "width: 3: must be even with norm group, its first groups hold two channels"),
    (vgg.vgg11, {"dropout": 1}, "dropout: 1: must be at least 0 and below 1"),
    (resnets.preact_resnet50, {"classes": 0}, "classes: 0: must be at least 1"),
    (resnets.preact_resnet50, {"norm": "none"}, "norm: none: must be batch or group"),
    (transformer.transformer_lm, {"blocks": 0}, "transformer_lm: blocks: 0: must be at least 1"),
    (transformer.transformer_lm, {"context": 0}, "transformer_lm: context: 0: must be at least 1"),
    (transformer.transformer_lm, {"heads": 3}, "transformer_lm: heads: 3: must divide the width, 128"),
    (transformer.transformer_lm, {"dropout": -0.1}, "transformer_lm: dropout: -0.1: must be at least 0 and below 1"),
    (transformer.attention_residual_lm, {"layers_per_block": 0},
     "attention_residual_lm: layers_per_block: 0: must be at least 1"),
    (transformer.transformer_translation, {"layers": 0}, "transformer_translation: layers: 0: must be at least 1"),
    (transformer.transformer_translation, {"source_vocabulary": -1},
     "transformer_translation: source_vocabulary: -1: must be at least 1"),
    (transformer.transformer_translation, {"width": 9, "heads": 3},
     "transformer_translation: width: 9: must be even, half sines and half cosines"),
])  # fmt: skip
def test_impossible_arguments_are_refused(
    make: Callable[..., nn.Module], args: Dict[str, Any], message: str
) -> None:
    assert list_faults(make, **args) == [message]


@pytest.mark.parametrize("make, shape, message", [
    (lambda: transformer.transformer_lm(**LM), (2, 9), "x: (2, 9): must be tokens (B, T), T at most the context, 8"),
    (lambda: transformer.transformer_lm(**LM), (2, 2, 4),
     "x: (2, 2, 4): must be tokens (B, T), T at most the context, 8"),
    (lambda: transformer.transformer_translation(**TRANSLATION), (2, 8),
     "x: (2, 8): must be (B, 2, T), source and shifted target tokens"),
])  # fmt: skip
def test_inputs_of_another_shape_are_refused(
    make: Callable[[], nn.Module], shape: Any, message: str
) -> None:
    assert list_faults(make(), torch.ones(shape, dtype=torch.int64)) == [message]
