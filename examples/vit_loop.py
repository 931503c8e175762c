"""A loop with all that a longer one has: python examples/vit_loop.py [EPOCHS]

    a vision transformer    AdamW with two parameter groups, a schedule with warm-up, averaged weights
    every epoch             an evaluation, a probe of the gradients, a checkpoint, early stopping
    Ctrl-C                  ends it; the same command goes on after the last checkpoint, with the same numbers

On two processes it prints the same lines: torchrun --nproc_per_node 2 examples/vit_loop.py
"""

import math
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ipu_pipe

EPOCHS = int(sys.argv[1]) if sys.argv[1:] else 10
PATIENCE = 3
CHECKPOINT = Path("runs/vit_loop.pt")
on_ranks = torch.distributed.is_torchelastic_launched()


class Block(nn.Module):
    """Attention and a perceptron, each beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.mlp(self.norm2(x)))


class Patches(nn.Module):
    """Divide 8x8 pixels into 16 patches, each a token with its position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x).flatten(2).transpose(1, 2) + self.positions


class Head(nn.Module):
    """Classify the mean of all tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.norm(x).mean(dim=1))


def say(text: str) -> None:
    """Print on one process."""
    if not on_ranks or torch.distributed.get_rank() == 0:
        print(text, flush=True)


images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float().reshape(-1, 1, 8, 8) / 16
train_set = TensorDataset(images[:1500], labels[:1500])
test_batches = list(zip(images[1500:].split(99), labels[1500:].split(99)))

torch.manual_seed(0)
# the order of the data has a generator of its own, whose state is saved
order = torch.Generator().manual_seed(1)
loader = DataLoader(train_set, batch_size=60, shuffle=True, drop_last=True, generator=order)
model = nn.Sequential(Patches(32), *(Block(32, 4) for _ in range(4)), Head(32))
groups = [
    {"params": [p for p in model.parameters() if p.ndim > 1]},
    {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=4e-3, weight_decay=0.05)
warmup, total = len(loader), EPOCHS * len(loader)


def compute_share(k: int) -> float:
    """Return the share of the rate in update k: it rises, then falls as a cosine."""
    done = max(k - warmup, 0) / max(total - warmup, 1)
    return min((k + 1) / warmup, 1.0) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, compute_share)
pipe = ipu_pipe.Pipeline(
    model, cross_entropy, optimizer, "pipedream", stages=["3"], microbatches=2,
    clip=(1.0, "stage"), ema=0.9, backend="distributed" if on_ranks else "emulator",
    example=(images[:30], labels[:30]),
)  # fmt: skip

begin, best, waited = 0, 0.0, 0
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT, weights_only=True)
    pipe.load_state_dict(saved["pipe"])
    scheduler.load_state_dict(saved["scheduler"])
    order.set_state(saved["order"])
    begin, best, waited = saved["epoch"], saved["best"], saved["waited"]
    say(f"goes on after epoch {begin}")

try:
    for epoch in range(begin, EPOCHS):
        for x, y in loader:
            pipe.step(x, y)
            scheduler.step()
        measured = pipe.evaluate(test_batches, ["accuracy"])
        accuracy = measured["accuracy"] or 0.0
        # the probe is an ordinary backward on the whole model, whose gradients are the caller's
        with pipe.whole_model(everywhere=True) as whole:
            assert whole is not None
            # without dropout, whose random numbers a checkpoint would need; the mode comes back
            whole.eval()
            cross_entropy(whole(images[1500:]), labels[1500:]).backward()
            norm = nn.utils.get_total_norm(
                [p.grad for p in whole.parameters() if p.grad is not None]
            )
            whole.zero_grad()
        say(
            f"epoch {epoch + 1}: test loss {measured['loss']:.6f}, accuracy {accuracy:.4f}, "
            f"gradient norm {norm:.6f}"
        )
        waited = 0 if accuracy > best else waited + 1
        best = max(best, accuracy)
        state = {
            "pipe": pipe.state_dict(), "scheduler": scheduler.state_dict(), "order": order.get_state(),
            "epoch": epoch + 1, "best": best, "waited": waited,
        }  # fmt: skip
        if not on_ranks or torch.distributed.get_rank() == 0:
            CHECKPOINT.parent.mkdir(exist_ok=True)
            # a file that exists is whole, even if Ctrl-C comes now
            torch.save(state, CHECKPOINT.with_suffix(".new"))
            CHECKPOINT.with_suffix(".new").replace(CHECKPOINT)
        if waited == PATIENCE:
            say(f"no better for {PATIENCE} epochs")
            break
    pipe.close()
    right = model.eval()(images[1500:]).argmax(dim=1) == labels[1500:]
    say(f"best accuracy of the averages {best:.4f}, of the last weights {right.float().mean():.4f}")
    CHECKPOINT.unlink(missing_ok=True)
except KeyboardInterrupt:
    pipe.abort()
    say(f"interrupted: the same command goes on after {CHECKPOINT}")
    sys.exit(130)
