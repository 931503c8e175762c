"""The files of a run: its folder, and checkpoints that no fault leaves damaged.

folder       its lock, what may be in it, what a resumed run keeps: `RunFolder`
manifest     what a checkpoint's manifest must hold
checkpoint   reads and writes a checkpoint and other files of weights: `Checkpoint`
shards       a checkpoint of which each rank writes its part: `ShardWriter`
saving       writes in the background, and keeps the newest and the best: `Saver`
"""
