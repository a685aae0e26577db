"""`python -m chunk_planner`: the command line where its script is not on the path."""

import sys

from chunk_planner.cli import main

if __name__ == "__main__":
    sys.exit(main())
