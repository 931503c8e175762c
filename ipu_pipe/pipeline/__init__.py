"""The pipeline as one object: `Pipeline(model, loss, optimizer, method).step(x, y)`, in any loop.

pipeline    the object, and the updates that a step returns: `Pipeline`, `Update`
build       divides a model and makes its versions and rules, for a loop or a run: `build_job`
checks      the settings that cannot be combined, and models that cannot be trained
seam        what the caller changes between two calls: taken over, or refused by name: `Seam`
state       a saved state, read whole before anything of it is set: `parse_state`
absent      weights that are on other devices: hidden between calls: `AbsentWeights`
flow        the batches on their way: which were given, which have left, the cuts: `Flow`
batches, turns  divides a batch into microbatches; one call at a time: `take_turn`
gradients   the gradients in flight, lent to `p.grad` for a call: `OwnGradients`
optimizer   the caller's optimizer, shared with the one that steps: `OptimizerHandle`
sharding    lets a caller shard the stages of this rank: `prepare_stages`
arguments   the arguments that a config words otherwise
trace       the page of what the devices did
"""
