"""`python -m bin` is `headrace`."""

import sys

from bin.main import main

sys.exit(main())
