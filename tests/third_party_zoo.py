"""Build small models of torchvision, timm and transformers with random weights: the rows of `make
sweep`.

Image classifiers take (b, 3, size, size) and return (b, 5). Language models take words (b, 8)
and return scores (b, words, 8), or (b, 5) for a text; those with an encoder and a decoder take both as a mapping.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Mapping, NamedTuple, Tuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from ipu_pipe.data import DataSource, from_loader
from tests import vision_libraries as vision
from tests.third_party import transformers

CLASSES, WORDS, LENGTH, SAMPLES = 5, 50, 8, 16


def take_scores(output: Any) -> torch.Tensor:
    """Return the scores of a model's output: (b, classes) or (b, words, length)."""
    scores: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return scores.transpose(1, 2) if scores.dim() == 3 else scores


def take_scores_and_router_loss(output: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the scores (b, words, length), and the load balancing loss of all layers' routers."""
    return take_scores(output), output.aux_loss


def add_router_loss(outputs: Tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy plus a share of the routers' loss."""
    scores, router_loss = outputs
    return nn.functional.cross_entropy(scores, y) + 0.02 * router_loss


class ZooModel(NamedTuple):
    """A row: how to build a model, the `family` of its inputs, and the `size` of its images.
    `output` takes what the `loss` gets of the model's output.
    """

    build: Callable[[], nn.Module]
    family: str = "images"
    size: int = 32
    output: Callable[[Any], Any] = take_scores
    loss: Callable[..., torch.Tensor] = nn.functional.cross_entropy


def make_zoo_source(model: ZooModel) -> DataSource:
    """Return a data source of random samples that fit the model."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randint, generator=generator)
    words, following = (draw(1, WORDS, (SAMPLES, LENGTH)) for _ in range(2))
    label = draw(CLASSES, (SAMPLES,))
    inputs: Dict[str, torch.Tensor] = {"x": words}
    if model.family in ("images", "speech"):
        # or 8 bands of 16 frames
        shape = (3, model.size, model.size) if model.family == "images" else (8, 16)
        inputs = {"x": torch.randn(SAMPLES, *shape, generator=generator)}
    if model.family == "text classes":
        mask = (torch.arange(LENGTH) < draw(3, LENGTH + 1, (SAMPLES, 1))).long()
        inputs = {"input_ids": words * mask, "attention_mask": mask}
    elif model.family == "pairs of texts":
        inputs = {"input_ids": words, "decoder_input_ids": draw(1, WORDS, (SAMPLES, LENGTH))}
    elif model.family == "speech":
        inputs = {"input_features": inputs["x"], "decoder_input_ids": words}
    y = label if model.family in ("images", "text classes") else following
    samples: Any = list(zip(inputs.get("x", ()), y))
    if "x" not in inputs:
        columns = {**inputs, "labels": y}
        samples = [dict(zip(columns, row)) for row in zip(*columns.values())]
    return from_loader(DataLoader(samples, batch_size=2), DataLoader(samples[:4], batch_size=2))


# ---- torchvision: the published networks, narrower where the library allows it


def make_vision_row(name: str, *args: Any, size: int = 32, **settings: Any) -> ZooModel:
    """Return a row of a function or class of torchvision."""
    return ZooModel(
        lambda: getattr(vision.torchvision.models, name)(*args, num_classes=CLASSES, **settings),
        size=size,
    )


def _make_alexnet() -> nn.Module:
    model: nn.Module = vision.torchvision.models.alexnet(num_classes=CLASSES)
    model.classifier = nn.Sequential(
        nn.Dropout(), nn.Linear(256 * 6 * 6, 16), nn.ReLU(), nn.Linear(16, CLASSES)
    )
    return model


def _make_vgg(norm: bool) -> nn.Module:
    layers = vision.torchvision.models.vgg.make_layers(
        [8, "M", 16, "M", 16, 16, "M"], batch_norm=norm
    )
    model: nn.Module = vision.torchvision.models.VGG(layers, num_classes=CLASSES)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, CLASSES)
    )
    return model


def _make_vision_convnext() -> nn.Module:
    make = vision.torchvision.models.convnext.CNBlockConfig
    blocks = [make(8, 16, 2), make(16, None, 2)]
    return vision.torchvision.models.ConvNeXt(blocks, 0.1, num_classes=CLASSES)  # type: ignore[no-any-return]


def _make_vision_swin(version: str) -> nn.Module:
    swin: Any = vision.torchvision.models.swin_transformer
    others = (
        {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
        if version == "2"
        else {}
    )
    model: nn.Module = swin.SwinTransformer(
        [2, 2], 8, [2, 2], [1, 2], [4, 4], stochastic_depth_prob=0.1, num_classes=CLASSES, **others
    )
    return model


TORCHVISION: Dict[str, ZooModel] = {
    "alexnet": ZooModel(_make_alexnet, size=224),
    "convnext": ZooModel(_make_vision_convnext),
    "densenet": make_vision_row("DenseNet", 8, (2, 2), 8, drop_rate=0.1),
    "efficientnet_b0": make_vision_row("efficientnet_b0"),
    "googlenet": make_vision_row("googlenet", init_weights=False),
    "maxvit": make_vision_row("MaxVit", (32, 32), 16, 4, [16, 16], [1, 1], 8, 0.1),
    "mobilenet_v2": make_vision_row("mobilenet_v2", width_mult=0.25),
    "resnet18": make_vision_row("resnet18"),
    "squeezenet1_1": make_vision_row("squeezenet1_1"),
    "swin": ZooModel(lambda: _make_vision_swin("1")),
    "swin_v2": ZooModel(lambda: _make_vision_swin("2")),
    "vgg": ZooModel(lambda: _make_vgg(False)),
    "vgg_bn": ZooModel(lambda: _make_vgg(True)),
    "vit": make_vision_row("VisionTransformer", 32, 8, 4, 2, 16, 32, 0.1, 0.1),
}

# ---- timm


def _make_timm_row(name: str, size: int = 32, **args: Any) -> ZooModel:
    """Return a row of `timm.create_model`; pass a `size` among `args` too where timm requires
    it."""
    return ZooModel(lambda: vision.timm.create_model(name, num_classes=CLASSES, **args), size=size)


_VIT: Dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 16,
    "depth": 4,
    "num_heads": 2,
}
_FOUR: Dict[str, Any] = {"depths": (1, 1, 1, 1)}
_SWIN: Dict[str, Any] = {
    "img_size": 32,
    "embed_dim": 8,
    "depths": (1, 1),
    "num_heads": (1, 2),
    "window_size": 4,
}


def _make_mixer(layer: str, **args: Any) -> ZooModel:
    sizes: Any = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_blocks": 4}
    return ZooModel(
        lambda: vision.timm.models.MlpMixer(
            CLASSES, **sizes, mlp_layer=getattr(vision.timm.layers, layer), **args
        )
    )


def _make_resmlp() -> nn.Module:
    parts = vision.timm.models.mlp_mixer
    return _make_mixer(
        "Mlp", mlp_ratio=4, block_layer=parts.ResBlock, norm_layer=parts.Affine
    ).build()


TIMM: Dict[str, ZooModel] = {
    "beit": _make_timm_row("beit_base_patch16_224", **_VIT, drop_path_rate=0.1),
    "byobnet": _make_timm_row("test_byobnet"),
    "cait": _make_timm_row("cait_xxs24_224", **_VIT),
    "coatnet": _make_timm_row("test_coatnet", 32, img_size=32),
    "convmixer": ZooModel(lambda: vision.timm.models.ConvMixer(16, 4, 5, 4, num_classes=CLASSES)),
    "convnext": _make_timm_row("test_convnext", drop_path_rate=0.1),
    "crossvit": _make_timm_row("crossvit_9_240", 48, img_size=48, img_scale=(1.0, 1.0), patch_size=(12, 16), embed_dim=(16, 32),
                      num_heads=(2, 2)),
    "deit_distilled": _make_timm_row("deit_tiny_distilled_patch16_224", **_VIT),
    "densenet": _make_timm_row("densenet121", growth_rate=8, block_config=(2, 2)),
    "efficientnet": _make_timm_row("test_efficientnet", drop_rate=0.1),
    "eva02": _make_timm_row("eva02_tiny_patch14_224", **_VIT),
    "focalnet": ZooModel(lambda: vision.timm.models.FocalNet(embed_dim=8, **_FOUR, num_classes=CLASSES)),
    "gmixer": _make_mixer("GluMlp", mlp_ratio=(1.0, 4.0)),
    "hrnet": _make_timm_row("hrnet_w18_small"),
    "nfnet": _make_timm_row("test_nfnet"),
    "poolformer": ZooModel(lambda: vision.timm.models.MetaFormer(depths=(1, 1, 1, 1), dims=(8, 16, 16, 32), num_classes=CLASSES)),
    "resmlp": ZooModel(_make_resmlp),
    "resnet": _make_timm_row("test_resnet", drop_path_rate=0.1),
    "sequencer2d": _make_timm_row("sequencer2d_s", 32, img_size=32, layers=(1, 1, 1, 1), embed_dims=(16,) * 4,
                         hidden_sizes=(4,) * 4, patch_sizes=(4, 2, 1, 1)),
    "swin": _make_timm_row("swin_tiny_patch4_window7_224", **_SWIN),
    "swinv2": _make_timm_row("swinv2_tiny_window8_256", **_SWIN),
    "xcit": _make_timm_row("xcit_nano_12_p16_224", 32, img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2),
}  # fmt: skip

# ---- transformers

_TOKENS: Dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BERT: Dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 16, **_TOKENS,
}  # fmt: skip
_LLAMA: Dict[str, Any] = {**_BERT, "num_key_value_heads": 1}
_EXPERTS: Dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
_MOE: Dict[str, Any] = {**_LLAMA, **_EXPERTS, "moe_intermediate_size": 16}
_HEAD: Dict[str, Any] = {"head_dim": 8}
GPT: Dict[str, Any] = {
    "vocab_size": WORDS,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 4,
    "n_head": 2,
    **_TOKENS,
}
_T5: Dict[str, Any] = {
    "vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "pad_token_id": 0,
    "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
_BART: Dict[str, Any] = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 16,
    "decoder_start_token_id": 2, **_TOKENS,
}  # fmt: skip
IMAGE: Dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "intermediate_size": 32,
}  # fmt: skip
_TIED = {"tie_word_embeddings": True}


def _make_transformers_row(
    prefix: str, config: Mapping[str, Any] = {}, *, head: str, family: str, **extra: Any
) -> ZooModel:
    """Return a row of transformers, built from `prefix`Config and `prefix`For`head`."""

    def build() -> nn.Module:
        settings = {**config, **extra}
        if head in ("SequenceClassification", "ImageClassification"):
            settings = {"num_labels": CLASSES, **settings}
        else:
            settings = {"tie_word_embeddings": False, "use_cache": False, **settings}
        name = "GPT2LMHeadModel" if prefix == "GPT2" else f"{prefix}For{head}"
        # Gemma3Config is that of its model of texts and images
        config_name = "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
        model: nn.Module = getattr(transformers, name)(
            getattr(transformers, config_name)(**settings)
        )
        return model

    return ZooModel(build, family)


make_causal_row = functools.partial(_make_transformers_row, head="CausalLM", family="next words")
_make_text_row = functools.partial(
    _make_transformers_row, head="SequenceClassification", family="text classes"
)
_make_pair_row = functools.partial(
    _make_transformers_row, head="ConditionalGeneration", family="pairs of texts"
)
make_image_row = functools.partial(
    _make_transformers_row, head="ImageClassification", family="images"
)

TRANSFORMERS: Dict[str, ZooModel] = {
    "albert": _make_text_row("Albert", _BERT, embedding_size=16),
    "bart": _make_pair_row("Bart", _BART),
    "bart_tied": _make_pair_row("Bart", {**_BART, **_TIED}),
    "beit": make_image_row("Beit", IMAGE),
    "bert": _make_text_row("Bert", _BERT),
    "bloom": make_causal_row("Bloom", {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 4, "n_head": 2, **_TOKENS}),
    "convnext": make_image_row("ConvNext", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}),
    "deberta_v2": _make_text_row("DebertaV2", _BERT, relative_attention=True, pos_att_type=["p2c", "c2p"],
                         position_buckets=8),
    "deepseek_v3": make_causal_row("DeepseekV3", {**_MOE, "num_key_value_heads": 2}, n_routed_experts=4,
                       n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8,
                       qk_nope_head_dim=8,
                       qk_rope_head_dim=8, v_head_dim=8),
    "deit": make_image_row("DeiT", IMAGE),
    "dinov2": make_image_row("Dinov2", IMAGE),
    "distilbert": _make_text_row("DistilBert", vocab_size=WORDS, dim=16, n_layers=4, n_heads=2, hidden_dim=32,
                         max_position_embeddings=16, pad_token_id=0),
    "electra": _make_text_row("Electra", _BERT, embedding_size=16),
    "falcon": make_causal_row("Falcon", {**_BERT, "num_kv_heads": 2}),
    "gemma": make_causal_row("Gemma", _LLAMA, **_HEAD),
    "gemma2": make_causal_row("Gemma2", _LLAMA, **_HEAD),
    "gemma3": make_causal_row("Gemma3", _LLAMA, **_HEAD, sliding_window=4,
                   layer_types=["sliding_attention", "full_attention"] * 2),
    "gpt2": make_causal_row("GPT2", GPT),
    "gpt2_tied": make_causal_row("GPT2", {**GPT, **_TIED}),
    "gpt_neo": make_causal_row("GPTNeo", _BERT, num_layers=4, num_heads=2, attention_types=[[["global", "local"], 2]],
                       window_size=4),
    "gpt_neox": make_causal_row("GPTNeoX", _BERT),
    "gpt_oss": make_causal_row("GptOss", _MOE, **_HEAD, sliding_window=4),
    "gptj": make_causal_row("GPTJ", {**GPT, "rotary_dim": 4}),
    "llama": make_causal_row("Llama", _LLAMA),
    "llama_tied": make_causal_row("Llama", {**_LLAMA, **_TIED}),
    "mamba2": make_causal_row("Mamba2", _TOKENS, vocab_size=WORDS, hidden_size=16, num_hidden_layers=4, state_size=8,
                   num_heads=4, head_dim=8, expand=2, n_groups=1, chunk_size=4),
    "mistral": make_causal_row("Mistral", _LLAMA, sliding_window=4),
    "mixtral": make_causal_row("Mixtral", _MOE),
    "mixtral_router": make_causal_row("Mixtral", _MOE, output_router_logits=True)._replace(
        output=take_scores_and_router_loss, loss=add_router_loss
    ),
    "olmo2": make_causal_row("Olmo2", _LLAMA),
    "opt": make_causal_row("OPT", _TOKENS, vocab_size=WORDS, hidden_size=16, word_embed_proj_dim=16, num_hidden_layers=4,
                   num_attention_heads=2, ffn_dim=32, max_position_embeddings=16),
    "phi": make_causal_row("Phi", _LLAMA),
    "qwen3": make_causal_row("Qwen3", _LLAMA, **_HEAD),
    "qwen3_moe": make_causal_row("Qwen3Moe", _MOE, **_HEAD),
    "qwen3_next": make_causal_row("Qwen3Next", _MOE, **_HEAD, shared_expert_intermediate_size=16,
                       linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
                       layer_types=["linear_attention", "full_attention"] * 2),
    "roberta": _make_text_row("Roberta", _BERT),
    "swin": make_image_row("Swin", image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4),
    "t5": _make_pair_row("T5", _T5),
    "t5_tied": _make_pair_row("T5", {**_T5, **_TIED}),
    "vit": make_image_row("ViT", IMAGE),
    "whisper": _make_transformers_row("Whisper", _BART, head="ConditionalGeneration", family="speech", num_mel_bins=8,
                     max_source_positions=8,
                     max_target_positions=16),
    "xlnet": _make_text_row("XLNet", _TOKENS, vocab_size=WORDS, d_model=16, n_layer=4, n_head=2, d_inner=32),
}  # fmt: skip

LIBRARIES = {"torchvision": TORCHVISION, "timm": TIMM, "transformers": TRANSFORMERS}
MODELS: Dict[str, ZooModel] = {
    f"{library}-{name}": model
    for library, models in LIBRARIES.items()
    for name, model in models.items()
}
