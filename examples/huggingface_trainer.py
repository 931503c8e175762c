"""Hugging Face's Trainer over a pipeline, with LoRA adapters: python examples/huggingface_trainer.py [UPDATES]

The same file trains on processes: torchrun --nproc_per_node 2 examples/huggingface_trainer.py [UPDATES]
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from ipu_pipe.integrations.transformers import PipelineTrainer

updates = int(sys.argv[1]) if sys.argv[1:] else 200

torch.manual_seed(0)  # every process needs the same model and data
tokens = torch.randint(0, 64, (512, 16))
samples = [
    {"input_ids": row, "labels": row[0] // 32} for row in tokens
]  # is the first token in the upper half?

model = BertForSequenceClassification(
    BertConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=16,
        num_labels=2,
    )  # fmt: skip
)
model = get_peft_model(
    model, LoraConfig(r=8, target_modules=["query", "value"], modules_to_save=["classifier"])
)
trainer = PipelineTrainer(
    model,
    TrainingArguments(
        "runs/huggingface_trainer",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        max_steps=updates,
        learning_rate=5e-3,
        logging_steps=10,
        report_to=[],
        use_cpu=True,
    ),
    train_dataset=samples[:448],
    eval_dataset=samples[448:],
    compute_metrics=lambda found: {
        "right": float((found.predictions.argmax(-1) == found.label_ids).mean())
    },
    pipeline={"method": "pipedream_flush", "stages": 2},
)
result = trainer.train()
measured = {**result.metrics, **trainer.evaluate()}
trainer.save_model()  # the adapters alone
if trainer.is_world_process_zero():
    Path("runs/huggingface_trainer/summary.json").write_text(json.dumps(measured))
    print(f"right answers: {measured['eval_right']:.2f}")
    print(f"throughput: {measured['train_samples_per_second']} samples/sec")
