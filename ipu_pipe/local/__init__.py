"""Local parallelism: blocks of a model that each have a loss of their own.

structures   the stages that form each block, for each method: `make_blocks`
heads        the auxiliary heads, from a block's activations to outputs of the model's form
blocks       the model with its blocks and heads, and their losses: `Blocks`, `get_blocks`
"""
