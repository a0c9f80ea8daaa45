"""Runs a function in several threads at once."""

import threading
from concurrent.futures import ThreadPoolExecutor


def in_threads(count, work):
    """Run `work(i)` in `count` threads that begin together. Return the exceptions that they raised."""
    begin = threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(lambda i=i: (begin.wait(), work(i))) for i in range(count)]
    return [future.exception() for future in futures if future.exception()]
