"""PipeDream, randomized PipeDream and LocalSGD on known objectives: the randomized PipeDream paper's experiments."""
