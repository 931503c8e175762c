"""Compare methods on the same work.

comparing           methods on a loop of the caller's own: `compare`
trainings           the records: `MethodRow`, `Training`
recording           one training of the loop: `train_once`
processes           trainings in forked processes: `open_workers`
stage_times         the time of each stage's passes on devices: `StageTimes`
verdicts            how much sooner, by Student's t: `judge`
loop_comparison     the result: `LoopComparison`
kept_trainings      the folder from which a comparison continues: `KeptTrainings`
config_loop         the loop of a config: `ConfigLoop`
method_comparison   throughput, memory and traffic of each method: `compare_methods`
equal_time          two runs at equal samples and at equal time: `train_against`
"""
