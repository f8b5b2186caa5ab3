"""Several threads at once."""
from __future__ import annotations

import threading
from typing import Callable, Iterable


def in_threads(work: Callable, arguments: Iterable[tuple]) -> None:
    """`work(*a)` in a thread for each of `arguments`, until all are done. What one of them raises is raised here."""
    raised: list[BaseException] = []

    def run(*a) -> None:
        try:
            work(*a)
        except BaseException as error:
            raised.append(error)
    threads = [threading.Thread(target=run, args=a) for a in arguments]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if raised:
        raise raised[0]
