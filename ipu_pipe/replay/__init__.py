"""What every backend computes, and nothing about where it runs.

replays    the unit of work, its sources and their check: `Replay`, `ReplayPlan`
run        what an engine reads: `Run`
work       the computation of a job, its sum of losses, and the jobs that are not exact: `Work`
weights    puts the weights that a pass reads in place: `WeightStore`, `make_weight_store`
replicas   replicas take turns on one model: `GradientReplicas`, `IndependentReplicas`
"""
