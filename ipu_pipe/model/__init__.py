"""A user's model: its stages, one observer of its forward; how it is called, cast and restored.

stages        divides a model into stages: `begin_stage`, `partition`, `Partition`
balance       cuts a row of units into parts of nearly equal cost
observation   observes a training pass by operation: `Observation`, `ForwardEffects`
watching      the two ways to watch operations, for all who observe
flops         the FLOPs of operations
meta          runs a model on the meta device
timing        the seconds of the parts of a pass: `StageSeconds`
batch         batches as nests of tensors, and the call of a model with one: `call_model`
loss          losses, and the parts of outputs and batches that they take: `Loss`
devices       what a kind of device offers: `DeviceKind`
modes         training and evaluation modes
precision     converts a model to a run's precision, and back: `ModelPrecision`
randomness    seeds, and draws keyed by module: `KeyedRandomness`
restoring     undoes what a forward or a backward changed: `restore_all`
"""
