"""`python -m tokamak` is the command `tokamak`."""
import sys

from .tools.cli import main

sys.exit(main())
