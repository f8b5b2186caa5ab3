"""The language: index expressions, scalar expressions, graphs, and what is said and made of them."""
from . import normal  # noqa: F401 (an Index is divided by what it enters)
