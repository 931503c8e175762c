"""Training loops of other libraries that drive a pipeline.

Each module needs its library, an optional extra of this one.

    transformers   Hugging Face's Trainer: `PipelineTrainer`
"""
