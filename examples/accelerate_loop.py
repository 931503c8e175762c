"""A loop with Accelerate over a pipeline: torchrun --nproc_per_node 2 examples/accelerate_loop.py [EPOCHS], or plain python

Accelerate has the device, the seeds, the trackers and what only rank 0 does. It prepares nothing: the ranks are the stages of one
pipeline, which read the same batches and step one scheduler each.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ipu_pipe

epochs = int(sys.argv[1]) if sys.argv[1:] else 15

accelerator = Accelerator(cpu=True)  # without cpu=True: GPUs, one a rank
set_seed(0)  # the same weights and the same order of samples on every rank
x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
x = x.float() / 16
train_loader = DataLoader(TensorDataset(x[:1500], y[:1500]), 32, shuffle=True, drop_last=True)
test_loader = DataLoader(TensorDataset(x[1500:], y[1500:]), 100)

model = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(train_loader))
backend = "distributed" if accelerator.num_processes > 1 else "emulator"
device = accelerator.device
pipe = ipu_pipe.Pipeline(
    model, cross_entropy, optimizer, "pipedream", stages=["2"], backend=backend, device=device
)

with pipe:
    for epoch in range(epochs):
        losses = []
        for batch_x, batch_y in train_loader:
            losses += [update.loss for update in pipe.step(batch_x, batch_y)]
            scheduler.step()
        measured = pipe.evaluate(test_loader, ["accuracy"])
        accelerator.print(
            f"epoch {epoch}: training loss {losses[-1]:.6f}, rate {scheduler.get_last_lr()[0]:.6f}"
        )
accelerator.print(f"test accuracy {measured['accuracy']:.3f}")
accelerator.end_training()
