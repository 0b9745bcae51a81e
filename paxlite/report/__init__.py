"""One page about one run or several: curves, evaluations, goodput, samples, and what differs.

Nothing here needs JAX, so that a report can be made wherever the folders of the runs are.
"""
