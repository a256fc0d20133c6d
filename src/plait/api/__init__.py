"""What Python can call: the functions behind the command line, with the same names and types.

In: jobs, plans and clusters as people write them. Out: values. Nothing here prints; `cli/` does.
"""
