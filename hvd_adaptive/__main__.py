"""Run `python -m hvd_adaptive`, which is the same as `hvd-adaptive`."""

from hvd_adaptive.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
