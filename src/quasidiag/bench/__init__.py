"""``quasidiag bench``: the cost of a training step as a ratio to SGD's, beside the least that its arithmetic can cost.

Every contender trains a copy of the same network on the same batch; a full step is forward, backward and update. All
of them are timed in turns in one process, so that the ratios are reliable on a noisy machine too.
"""
