"""The loop of plain_loop.py over a pipeline of four stages, in three new lines: python examples/own_loop.py [EPOCHS]"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ipu_pipe

epochs = int(sys.argv[1]) if sys.argv[1:] else 20

images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
train_set = TensorDataset(images[:1500], labels[:1500])

torch.manual_seed(0)
loader = DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True)
widths = [64, 128, 128, 128]
hidden = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in zip(widths, widths[1:])]
model = nn.Sequential(*hidden, nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
pipe = ipu_pipe.Pipeline(model, cross_entropy, optimizer, "pipemare", stages=4, microbatches=4)

for _ in range(epochs):
    for x, y in loader:
        pipe.step(x, y)
        scheduler.step()
pipe.close()

right = model(images[1500:]).argmax(dim=1) == labels[1500:]
print(f"test accuracy {right.float().mean():.3f}")
