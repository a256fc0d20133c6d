"""What a learning rate follows that is lowered when nothing improves (torch's ReduceLROnPlateau).

Goes in: a job's `follow`. Comes out: the names that may stand there.
"""

TRAIN_LOSS = "train_loss"
"""The loss of every training step; all other names are of what evaluations measure."""
