"""The training loop: compiled steps, losses now and then, checkpoints, and an end in time."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from eggpu.train.progress import Display, Status
from eggpu.train.run import History, Result, Run
from eggpu.train.task import Task

_GUESS = 1000  # steps, before the first measurement of a run with a time limit


def fit(task: Task, run: Run, display: Display) -> Result:
    """Train to the end of the run. Ctrl-C ends it after the step under way, with a checkpoint.

    Raises TrainingError when the loss is not a number any more; the last checkpoint stays.
    """
    run.out.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    clock, history = Clock(run, task.start), History()
    i, saved = task.start, -1
    with interruptions(display) as stop, task:
        while i < (total := task.agreed(clock.total, bool(stop))):
            loss = task.advance(i, total)
            i += 1
            saving, first = i % run.save_every == 0, i == task.start + 1
            if saving or first or i % run.log_every == 0 or i >= clock.total:
                value = float(loss)
                if not math.isfinite(value):
                    raise task.broken(i, value, run.checkpoint if saved >= 0 else None)
                history.train.append((i, value))
                task.note(i, value)
                if first:
                    display.say(task.compiled)
                clock.tick(i)
                display.show(clock.status(i, value, task))
            if task.validates and i % run.eval_every == 0 and i < clock.total and not stop:
                history.valid.append((i, task.validate(i)))
                display.say(f"step {i}: validation loss {history.valid[-1][1]:.4f}")
                clock.restart(i)
            if saving:
                task.save(run.checkpoint, saved := i)
                clock.restart(i)
        seconds = clock.elapsed
        if saved != i:
            task.save(run.checkpoint, i)
        interrupted = task.agree(bool(stop))
        due = task.validates and not interrupted
        if due and (not history.valid or history.valid[-1][0] != i):
            history.valid.append((i, task.validate(i)))
        display.close()
        return Result(i, interrupted, history, run.checkpoint, task.model, seconds)


class Clock:
    """How many steps a run has in all: as asked, or as many as fit into its minutes.

    The first step compiles, so time counts from its end.
    """

    def __init__(self, run: Run, start: int) -> None:
        self._run = run
        self._first: tuple[float, int] | None = None  # time and steps at the end of the first step
        self._last: tuple[float, int] | None = None
        self.per_step = math.nan  # seconds, of late
        self.total = run.steps if run.steps is not None else start + _GUESS

    def tick(self, done: int) -> None:
        """Note that `done` steps have been finished, now."""
        now = time.perf_counter()
        if self._first is None or self._last is None:
            self._first = self._last = now, done
            return
        before, steps = self._last
        if done > steps:
            self.per_step = (now - before) / (done - steps)
        self._last = now, done
        if self._run.minutes is None:
            return
        began, first = self._first
        average = (now - began) / (done - first) if done > first else self.per_step
        fit_in = done + max(0, math.floor((self._run.minutes * 60 - (now - began)) / average))
        self.total = fit_in if self._run.steps is None else min(fit_in, self._run.steps)

    def restart(self, done: int) -> None:
        """Measure from now on, after something that was no step."""
        self._last = time.perf_counter(), done

    @property
    def elapsed(self) -> float:
        """Seconds from the end of the first step to the last tick."""
        return self._last[0] - self._first[0] if self._first and self._last else 0.0

    def status(self, done: int, loss: float, task: Task) -> Status:
        """This moment, to be shown."""
        rate, left = task.items / self.per_step, (self.total - done) * self.per_step
        return Status(done, self.total, loss, rate, task.unit, left)


class Stop:
    """True once the run was asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked


@contextmanager
def interruptions(display: Display) -> Iterator[Stop]:
    """Turns the first SIGINT or SIGTERM into a wish to stop; a second one interrupts at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        display.say("stopping after this step, with a checkpoint (again to stop at once)")

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(s, handle) for s in signals]
    try:
        yield stop
    finally:
        display.close()
        for s, handler in zip(signals, before, strict=True):
            signal.signal(s, handler)
