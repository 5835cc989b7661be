"""The experiment bench: every figure and table of the paper, one command each.

``tasks`` lists the experiments as the paper's section does; ``train`` does one run, ``runs`` keeps it on disk,
``sweep`` finds the best step size of every algorithm, and ``report`` draws the figures.
"""
