"""The subcommands of ``quasidiag`` that belong to no other package, one per module."""
