"""Stages on several processes, over torch.distributed.

launch, agreement   join the process group; compare the requests and models of all ranks
layout              places the stages on the ranks: `RankLayout`, `place`
engine              the backend: the job of one rank: `ProcessEngine`
interpreter         one loop over a rank's row of the schedule: `Interpreter`
stage, split        the passes of one stage, whole or split into I and W: `Stage`
gathering           the whole weights that FSDP2 gathers for passes: `Gathering`
mail, nccl          messages between ranks: `Mail`; channels for nccl, which has no tags
input_kinds         microbatches of other lengths than the first: `InputKinds`
update, ties        the update of a stage, and of weights that several stages use: `StageUpdate`
local               a stage with a local loss: `LocalBlock`
collect             collects weights, evaluations and reports from all ranks
trace, memory       the trace and the memory of one rank: `TraceRecorder`, `MemoryCounters`
lost_ranks          deadlines, the rank to blame, and the calls that each rank has made
"""
