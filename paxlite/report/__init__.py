"""One page about one or several runs: curves, evaluations, goodput, samples and differences.

Nothing here needs JAX, so that a report can be made wherever the folders of the runs are.
"""
