"""A small GPT-2 of Hugging Face learns the letters of this file: python examples/huggingface_gpt2.py [UPDATES]

The embedding on the first stage and the output layer on the last stage share a weight. With pipedream_2bw all stages read one
version of the weights for a microbatch, so the training of the shared weight is exact, too.
"""

import functools
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import ipu_pipe

updates = int(sys.argv[1]) if sys.argv[1:] else 200

letters = torch.tensor(list(Path(__file__).read_bytes()))
windows = [
    {"input_ids": letters[i : i + 32], "labels": letters[i + 1 : i + 33]}
    for i in range(len(letters) - 32)
]

model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=128, n_positions=32, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0, use_cache=False,
        embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0,
    )
)  # fmt: skip
assert model.lm_head.weight is model.transformer.wte.weight
summary = ipu_pipe.train(
    ipu_pipe.configure(
        method="pipedream_2bw",
        stages=[f"transformer.h.{i}" for i in (1, 2, 3)],
        micro_batch_size=8,
        gradient_accumulation=4,
        steps=updates,
    ),
    "runs/huggingface_gpt2",
    model=model,
    data=ipu_pipe.from_loader(
        DataLoader(windows, batch_size=8, shuffle=True, drop_last=True),
        DataLoader(windows[::8], batch_size=50),
    ),
    output=lambda outputs: outputs.logits.transpose(1, 2),  # cross-entropy expects (B, classes, T)
    loss=torch.nn.functional.cross_entropy,
    optimizer=functools.partial(
        torch.optim.AdamW, lr=5e-4
    ),  # larger rates diverge with a delay of one update
    overwrite=True,
)
print(
    f"loss of the next letter {summary['initial']['test_loss']:.3f} -> {summary['final']['test_loss']:.3f}"
)
