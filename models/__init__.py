"""Models that annotate their own stages: plain nn.Modules that do not know what trains them."""
