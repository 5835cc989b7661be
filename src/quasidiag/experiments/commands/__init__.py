"""The subcommands of ``quasidiag`` that have no better home, one a module."""
