"""Rank configurations for given hardware by predicted throughput, with reasons.

candidates        the configurations to compare, and the layouts of their replicas: `Candidate`
prediction        the time and memory of one configuration on hardware: `Problem`, `Prediction`
batch_times       the time of a batch of any number of microbatches: `BatchTimes`
blocks            the costs of blocks with losses of their own
planner           the best configurations and their bottlenecks: `make_plan`, `search`
config_cut        the cut of a config's model by the planner: `choose_stages`
answer            the planner's answer as text, JSON or a config
tensor_parallel   Megatron's tensor parallelism in closed form, for comparison
"""
