"""``python -m quasidiag`` is the ``quasidiag`` command."""

from quasidiag.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
