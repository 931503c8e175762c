"""The files of a run: its folder, its checkpoints, and how they are written so that no fault leaves a damaged one.

    folder       the run's folder: its lock, what may be in it, what a resumed run keeps
    manifest     what a checkpoint's manifest must hold
    checkpoint   read and write a checkpoint and other files of weights
    shards       a checkpoint of which each rank writes its part
    saving       write checkpoints in the background, and keep the newest and the best
"""
