"""`python -m hvd_adaptive`, the same as `hvd-adaptive`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
