"""When do programs share a row's prefixes (scans), block by block (`schedule.prefixes`)?"""
from __future__ import annotations

ROWS = 1.5              # contiguous rows to a multiprocessor at most
LONG = 32768            # elements of such a row at least


def few_long(rows: int, elements: int, target) -> bool:
    """Are there so few contiguous rows, of so many elements each, that one program a row would leave most of a GPU idle?"""
    return rows < ROWS * target.threads and elements >= LONG
