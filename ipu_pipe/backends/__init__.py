"""Where a job runs. One job in, one trace out; each backend says what it refuses before it starts.

interface   the functions of a backend and the records that it returns: `Backend`, `Engine`
table       the backends by name, and the steps that all share: `get_backend`, `launch`, `leave`
features    what some backend lacks, in one table: `FEATURES`, `list_lacking`
emulator    one process runs all stages, exactly
ranks       one process among several: rank 0 works for all, one rank reports a fault
world       the ranks of one pipeline, counted within its process group: `Column`
processes   one or several stages on each process, over torch.distributed
ipu         Graphcore IPUs through PopTorch
xla         XLA devices through jax
"""
