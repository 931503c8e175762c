"""A user's model: its stages, one observer of its forward; how it is called, cast and restored.

stages        divides a model into stages: `begin_stage`, `partition`, `Partition`
balance       cuts a row of units into parts of nearly equal cost
observation   observes a training pass by operation: `Observation`, `ForwardEffects`
watching      the two ways to watch operations, for all who observe
flops, meta   the FLOPs of operations; a model on the meta device
timing        the seconds of the parts of a pass: `StageSeconds`
batch         batches as nests of tensors, and the call of a model with one: `call_model`
loss          losses, and the parts of outputs and batches that they take: `Loss`
devices       what a kind of device offers: `DeviceKind`
modes, precision   training and evaluation modes; a model in a run's precision: `ModelPrecision`
shards        weights that a caller has sharded as DTensors: `Shards`
randomness    seeds, and draws keyed by module: `KeyedRandomness`
values        what modules and losses read beside weights: `list_values_of`
frames        the caller's line in a traceback: `find_user_frame`
restoring     undoes what a forward or a backward changed: `restore_all`
"""
