"""PipeDream, randomized PipeDream and LocalSGD on objectives that are known exactly: the randomized PipeDream paper's experiments."""
