"""What is done to a traced graph: its loss as (total, weight), no writes in place, random numbers by counters."""
