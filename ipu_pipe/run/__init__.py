"""Train a config by a loop over the pipeline, and use the run that is left.

setup, build  what a config gives its pipeline: `set_up`; the run, with its length and stops: `build`
train       starts or resumes a run: `train`, `check`, `evaluate_checkpoint`
loop        updates, evaluations, checkpoints and callbacks: `TrainingLoop`
callbacks   the user's own code in a run: `Callback`, `Moment`, `Stop`, `EarlyStopping`
progress    the progress on the terminal, in metrics.jsonl and in TensorBoard
resume      chooses and checks a checkpoint, and loads it
planning    builds a job for its figures alone: `plan_config`
compiling   compiles a config's stages for devices that are not here: `compile_config`
compilers, blackhole   the compilers of TPUs and, in a process apart, Tenstorrent's: `find_topology`
proposal    proposes a config for a model on hardware: `suggest_config`
rehearsal   tries a run without its devices and data: `rehearse`
machine_check  small runs on this machine that must equal the emulator: `check_machine`
stability   the stability of a run by theory: `analyze_config`
predict     predictions of a model or of a run's weights: `predict`
export      a run's weights for use elsewhere: `export`
"""
