"""Jobs that run in a background thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class BackgroundJobs:
    """Jobs that a thread runs one at a time, in the order of their submission.

    The thread starts with the first job, and `join` ends it. After an error, jobs are dropped until `pop_error` is
    called.
    """

    def __init__(self, name: str, max_pending: int = 1) -> None:
        """Create a queue of at most `max_pending` jobs, including the running one. `name` is that of the thread."""
        self._name, self._max_pending = name, max_pending
        # The first one is running.
        self._pending: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._should_stop = False
        self._error: Exception | None = None
        self.has_failed = False
        """Whether a job has failed, and its error has not been popped yet."""

    def submit(self, job: Callable[[], object]) -> None:
        """Queue a job. Waits while the queue is full."""
        self._submit(job, None)

    def try_submit(self, job: Callable[[], object]) -> bool:
        """Queue a job, unless the queue is full. Return whether it was not full."""
        return self._submit(job, 0.0)

    def _submit(self, job: Callable[[], object], timeout_s: float | None) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._pending) < self._max_pending, timeout_s):
                return False
            if self.has_failed:
                return True
            self._pending.append(job)
            self._changed.notify_all()
        if self._thread is None:
            # A daemon, so that a job that never ends does not keep the process alive.
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs have ended. Return whether they have, within `timeout_s`. Raises no error of a job."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def join(self) -> None:
        """Wait until all jobs and the thread have ended. Raises no error of a job."""
        if self._thread is None:
            return
        with self._changed:
            self._should_stop = True
            self._changed.notify_all()
        self._thread.join()
        self._thread, self._should_stop = None, False

    def pop_error(self) -> Exception | None:
        """Return the error of a failed job, once. `None` if no job has failed."""
        with self._changed:
            error, self._error, self.has_failed = self._error, None, False
        return error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._should_stop)
                if not self._pending:
                    return
                job = self._pending[0]
            error = _error_of(job)
            del job  # It must not keep its data alive while the thread waits.
            with self._changed:
                if error is None:
                    self._pending.popleft()
                else:
                    self._pending.clear()
                    self._error, self.has_failed = error, True
                self._changed.notify_all()
            del error


def _error_of(job: Callable[[], object]) -> Exception | None:
    try:
        job()
    except Exception as error:
        return error
    return None
