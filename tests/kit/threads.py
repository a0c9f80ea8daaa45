"""Work in several threads at once."""

import threading


def in_threads(count, work):
    """Run `work(i)` in `count` threads that begin together. Returns the exceptions that they raised."""
    errors, begin = [], threading.Barrier(count)

    def run(i):
        begin.wait()
        try:
            work(i)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
