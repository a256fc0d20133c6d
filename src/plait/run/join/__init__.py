"""Where this process is among those that an engine started: torchrun, Slurm, MPI, or whoever sets PLAIT_TASK."""
