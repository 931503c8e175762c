"""A small BERT of Hugging Face on random sentences, with attention masks: python examples/huggingface_bert.py [UPDATES]

Batches are dictionaries, as tokenizers and collators return them: all entries except the labels are keyword arguments of the
model. The model returns an object; the loss takes its `logits`.
"""

import functools
import sys

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import ipu_pipe

updates = int(sys.argv[1]) if sys.argv[1:] else 60

# Sentences of 4 to 16 words. The label says whether word 7 occurs.
generator = torch.Generator().manual_seed(0)
sentences = torch.randint(1, 32, (1400, 16), generator=generator)
lengths = torch.randint(4, 17, (1400,), generator=generator)
mask = (torch.arange(16) < lengths[:, None]).long()
sentences = sentences * mask
labels = (sentences == 7).any(dim=1).long()
samples = [
    {"input_ids": words, "attention_mask": seen, "labels": label}
    for words, seen, label in zip(sentences, mask, labels)
]

model = BertForSequenceClassification(
    BertConfig(
        vocab_size=32, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=16, num_labels=2,
    )
)  # fmt: skip
summary = ipu_pipe.train(
    ipu_pipe.configure(
        method="pipedream_flush",
        stages=[f"bert.encoder.layer.{i}" for i in (1, 2, 3)],
        micro_batch_size=16,
        gradient_accumulation=4,
        steps=updates,
    ),
    "runs/huggingface_bert",
    model=model,
    data=ipu_pipe.from_loader(
        DataLoader(samples[:1200], batch_size=16, shuffle=True, drop_last=True),
        DataLoader(samples[1200:], batch_size=50),
    ),
    output="logits",
    loss=torch.nn.functional.cross_entropy,
    optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
    overwrite=True,
)
print(f"test accuracy {summary['final']['test_accuracy']:.3f}")
