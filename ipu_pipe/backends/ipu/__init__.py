"""Graphcore IPUs through PopTorch 3.4 (not run on hardware).

backend                   the row of the table of backends
config, options           a config's settings, and poptorch.Options: `IpuConfig`, `make_options`
options.yaml              PopTorch's and PopART's options with their types, and former keys
unsupported               features that IPUs do not support: `check_config`, `check_model`
model_facts               what one forward shows about the model: `observe_model`
sdk, sdk.yaml             what a pod's SDK would refuse later: `predict_refusals`
placement                 the execution class, the IPU of each stage, the replicas: `Placement`
wrapping                  model and loss in the form that PopTorch compiles: `wrap`
optimizer                 the optimizer as PopTorch's, and its state
feed                      the batches of PopTorch's calls: `Feed`
executors                 the compiled training and inference models: `Executors`
engine                    runs updates, evaluations and checkpoints: `IpuEngine`, `PoptorchEngine`
blocks                    each block as a model of its own on its own IPU: `BlockEngine`
profile                   measurements of calls, and PopVision's profile
"""
