"""The race: the optimizer without a learning rate beside tuned peers, on many tasks (``quasidiag race``)."""
