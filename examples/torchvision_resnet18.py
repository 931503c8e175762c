"""A ResNet-18 of torchvision on handwritten digits, in four stages: python examples/torchvision_resnet18.py [UPDATES]"""

import functools
import sys

import torch
import torchvision
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import ipu_pipe

updates = int(sys.argv[1]) if sys.argv[1:] else 50

# 1,797 images of 8x8, converted to RGB of 16x16
digits = load_digits()
x = (
    torch.tensor(digits.images, dtype=torch.float32)[:, None].repeat(1, 3, 1, 1) / 16
)  # (N, 3, 8, 8)
x, y = torch.nn.functional.interpolate(x, size=16), torch.tensor(digits.target)
train_set, test_set = TensorDataset(x[:1600], y[:1600]), TensorDataset(x[1600:], y[1600:])

model = torchvision.models.resnet18(num_classes=10)
summary = ipu_pipe.train(
    ipu_pipe.configure(
        method="pipedream_2bw",
        stages=["layer2", "layer3", "layer4"],  # each begins a stage: four in all
        micro_batch_size=8,
        gradient_accumulation=4,
        steps=updates,
    ),
    "runs/torchvision_resnet18",
    model=model,
    data=ipu_pipe.from_loader(
        DataLoader(train_set, batch_size=8, shuffle=True, drop_last=True),
        DataLoader(test_set, batch_size=64),
    ),
    loss=torch.nn.functional.cross_entropy,
    optimizer=functools.partial(torch.optim.SGD, lr=0.005, momentum=0.9),
    overwrite=True,
)
for stage in summary["stages"]:
    print(
        f"stage {stage['index']}: {stage['parameters']:,} parameters, {stage['weight_copies']} copies of them"
    )
