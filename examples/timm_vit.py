"""A small vision transformer of timm on handwritten digits, with one block per stage: python examples/timm_vit.py [UPDATES]"""

import functools
import sys

import timm
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import ipu_pipe

updates = int(sys.argv[1]) if sys.argv[1:] else 300

digits = load_digits()  # 1,797 images of 8x8
x, y = (
    torch.tensor(digits.images, dtype=torch.float32)[:, None],
    torch.tensor(digits.target),
)  # (N, 1, 8, 8)
x = (x - x.mean()) / x.std()
train_set, test_set = TensorDataset(x[:1600], y[:1600]), TensorDataset(x[1600:], y[1600:])

model = timm.create_model(
    "vit_tiny_patch16_224",
    img_size=8,
    patch_size=2,
    in_chans=1,
    depth=4,
    embed_dim=64,
    num_heads=4,
    num_classes=10,
    global_pool="avg",
)
summary = ipu_pipe.train(
    ipu_pipe.configure(
        method="pipedream",
        stages=[f"blocks.{i}" for i in (1, 2, 3)],  # names of nested modules work too
        micro_batch_size=16,
        gradient_accumulation=2,
        steps=updates,
        lr_schedule={"name": "cosine", "warmup_steps": 10},
    ),
    "runs/timm_vit",
    model=model,
    data=ipu_pipe.from_loader(
        DataLoader(train_set, batch_size=16, shuffle=True, drop_last=True),
        DataLoader(test_set, batch_size=64),
    ),
    loss=torch.nn.functional.cross_entropy,
    optimizer=functools.partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.05),
    overwrite=True,
)
print(f"test accuracy {summary['final']['test_accuracy']:.3f}")
