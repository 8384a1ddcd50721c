"""``python -m driftlab``: the command line."""

from driftlab.cli import main

main()
