"""HOW weights change: which parameters a rule is about, several optimizers, clipping, frozen phases.

Goes in: what a Job says beside its network and loss. Comes out: small values that are read by name of a parameter and
number of a step, so that every rank decides alike, whatever shard of a parameter it holds.
"""
