"""The experiment bench: every figure and table of the paper, one command each.

``tasks`` lists the paper's experiments; ``train`` does one run, ``runs`` keeps it on disk,
``sweep`` finds the best step size of every algorithm, and ``report`` draws the figures.
"""
