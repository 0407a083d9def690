"""A side in a process, which is stopped while others are timed.

Threads of one side that wait for work would take time from another.
"""

import multiprocessing
import os
import signal
import threading

from tqdm import tqdm

CONTEXT = multiprocessing.get_context("spawn")


def serve(connection, make, args):
    """Make a side in this process, and time what is asked for until nothing is."""
    # tqdm's own lock is also for processes: a semaphore, which nobody gives back when this one is
    # killed.
    tqdm.set_lock(threading.RLock())
    side = make(*args)
    connection.send(side.size)
    while (asked := connection.recv()) is not None:
        method, *numbers = asked
        # A call that is not counted wakes the threads and fills the caches.
        getattr(side, method)(*numbers)
        connection.send(getattr(side, method)(*numbers))


class Side:
    """A side in a process, which runs only while it is asked.

    Args:
        make: a function of a module, which returns what is timed, with its bytes as ``size``.
        args: of the function.

    Raises:
        EOFError: the process ended; it has printed why.
    """

    def __init__(self, make, *args):
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=serve, args=(theirs, make, args))
        self._process.start()
        theirs.close()  # so that a process that dies is the end of what it sends
        self.size = self._pipe.recv()
        os.kill(self._process.pid, signal.SIGSTOP)

    def seconds(self, *asked):
        """Return what a method of the side returns."""
        os.kill(self._process.pid, signal.SIGCONT)
        self._pipe.send(asked)
        found = self._pipe.recv()
        os.kill(self._process.pid, signal.SIGSTOP)
        return found

    def close(self):
        """End the process. It is killed: llama.cpp's server has no end."""
        self._process.kill()
        self._process.join()


def in_a_process(fn, *args):
    """Call a function of a module in a process, so that its memory is given back."""
    process = CONTEXT.Process(target=fn, args=args)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{fn.__name__} ended with status {process.exitcode}; see above.")
