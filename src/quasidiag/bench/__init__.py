"""``quasidiag bench``: the cost of a training step as a ratio to SGD's, beside the floor of its arithmetic.

Every contender trains a copy of the same network on the same batch; a full step is forward, backward and update. All
of them are timed in turns in one process, so the ratios survive a noisy machine.
"""
