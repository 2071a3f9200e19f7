"""``python -m hybrid_ep``: the command line where its script ``hybrid-ep`` is not installed."""

import sys

from hybrid_ep_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
