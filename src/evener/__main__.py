"""``python -m evener`` is the command ``evener``."""

import sys

from evener.cli import main

sys.exit(main())
