"""Cut a model where activations pass between devices: for processes, IPUs and blocks.

An update of the emulator never enters this folder, unless the model has blocks.

    recording           one forward, recorded as calls with the stage of each: `record_forward`
    crossing            the tensors that cross a cut, and their messages: `Crossing`, `TensorSpec`
    cutting             pieces that run their part of the recording: `cut_model`, `Piece`
    verification        verifies that the pieces compute the model: `verify_pieces`
    loss_verification   verifies that the stage with the loss computes it alone: `LossTrial`
    graphs              a stage's passes as graphs of ATen operations: `trace_stages`, `StageGraphs`
"""
