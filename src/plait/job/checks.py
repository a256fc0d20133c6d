"""Contradictions between a job, its data and the number of ranks.

Goes in: values that are each right by themselves. Comes out: every problem, one line each. Never raises,
never starts anything: the caller prints the list before any process starts.
"""

from plait.job.job import Job


def problems(job: Job, num_samples: int | None, ranks: int) -> list[str]:
    """All problems; an empty list when the job can run on this data with this many ranks.

    Shares may be unequal, and empty where a micro-batch has fewer samples than ranks; only a batch that leaves a rank
    without work in every step is refused.
    """
    found = []
    if ranks < 1:
        return [f"ranks={ranks} is not a number of processes; use 1 or more"]
    if job.batch < ranks:
        found.append(
            f"batch={job.batch} is smaller than ranks={ranks}: {ranks - job.batch} of them would never get a sample; "
            f"use batch >= {ranks}, or at most {job.batch} ranks"
        )
    if num_samples is not None and num_samples < 1:
        found.append("the data has 0 samples; check the path or the filter that selects them")
    elif num_samples is not None and num_samples < ranks:
        found.append(
            f"the data has {num_samples} samples, fewer than ranks={ranks}; use at most {num_samples} ranks"
        )
    if job.sampler is not None and num_samples is None:
        found.append("a sampler is given for a stream, which has its own order; leave sampler out")
    if job.drop_last and num_samples is not None and job.sampler is None and num_samples < job.batch:
        found.append(
            f"the data has {num_samples} samples, less than one batch of {job.batch}, and drop_last leaves them out; "
            "use a smaller batch, or drop_last=False"
        )
    for name, given in (("lengths", job.lengths), ("work", job.work)):
        if given is not None and num_samples is None:
            found.append(f"{name} is given for a stream, which has its own order; leave {name} out")
        elif given is not None and len(given) != num_samples:
            found.append(
                f"{name} has {len(given)} entries for {num_samples} samples; give one for each, in the data's order"
            )
    return found
