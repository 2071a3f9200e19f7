"""``python -m hybrid_ep_cli``: as ``python -m hybrid_ep``, without torch until a command runs."""

import sys

from hybrid_ep_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
