"""Launches of programs, in the island's total order (gang scheduling)."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from fairway import _native
from fairway.errors import LaunchOrderError
from fairway.host import messages
from fairway.host.apart import Apart
from fairway.host.backend import Backend
from fairway.host.executable import Executable, IssuedRun
from fairway.host.inputs import Feed
from fairway.host.objects import Deferred, Failed, Objects, error_text, resolve
from fairway.host.reporter import Reporter
from fairway.host.trace import Trace

UNFINISHED_LAUNCHES = 16
"""Most launches enqueued on the devices (flow control). Enqueued launches cannot be cancelled when
their client is lost; and from 33 launches over several devices on, XLA on CPUs deadlocks."""
ANSWER_TIMEOUT_S = 60.0
"""Timeout of the controller's answer to a report."""
AT_ONCE_NS = 1_000_000
"""A wait for a run that takes less than this found the run already ended."""

Array = Any


class Launcher:
    """Executes launches.

    Args:
        backend: this host's devices.
        objects: its buffers.
        programs: its programs.
        plane: its end of the data plane.
        report: sends reports to the controller.
        trace: records runs, if set.
    """

    def __init__(
        self,
        backend: Backend,
        objects: Objects,
        programs: dict[int, Executable | Feed],
        plane: _native.DataPlane,
        report: Reporter,
        trace: Trace | None,
    ) -> None:
        self._backend = backend
        self._plane = plane
        self._objects = objects
        self._programs = programs
        self._report = report
        self._trace = trace
        self._unfinished: collections.deque[tuple[int, Any]] = collections.deque()
        self._last_launch = 0
        self._last: tuple[Any, Any] = (None, None)
        self._apart = Apart(objects)
        self._finishes = _Finishes(report)
        self._begun_ns = 0
        self._waited_ns = 0
        self._scope: int | None = None

    def launch(self, command: messages.Launch) -> None:
        """Runs a program, if it is next in the island's order.

        Raises:
            LaunchOrderError: it is not; the hosts of the island have diverged in order.
        """
        self.begin(command.sequence, command.previous)
        self.run(command, command.args, command.first_result, command.client)
        self.end(command.acknowledge)

    def begin(self, sequence: int, previous: int) -> None:
        """Takes the next position in the island's order.

        Raises:
            LaunchOrderError: this launch is not next.
        """
        if previous != self._last_launch or sequence <= previous:
            self._order_broken(sequence, previous)
        self._last_launch = sequence
        if not self._begun_ns:
            self._begun_ns = time.monotonic_ns()

    @contextlib.contextmanager
    def part_of(self, first_buffer: int) -> Iterator[None]:
        """Runs functions as parts of a whole program's run, which has this first buffer."""
        self._scope = first_buffer
        try:
            yield
        finally:
            self._scope = None

    def end(self, acknowledge: messages.Acknowledge) -> None:
        """Ends a launch; reports it to the controller as ``acknowledge`` says."""
        token, output, self._last = *self._last, (None, None)
        if acknowledge is messages.Acknowledge.NO:
            return
        if acknowledge is messages.Acknowledge.ENQUEUED:
            self._report.send(messages.Finished(0))
        else:
            is_over = token is None or _is_ready(output)
            self._finishes.report(token, is_over, self._begun_ns + self._waited_ns)
        self._begun_ns = self._waited_ns = 0

    def report_end(self, _command: messages.ReportEnd) -> None:
        """Reports to the controller when all runs so far have ended.

        Runs that have ended already are reported without a time, since their end was not observed.
        """
        self._finishes.report_late(self.unfinished(None), self._begun_ns + self._waited_ns)
        self._begun_ns = self._waited_ns = 0

    @property
    def last_token(self) -> Any:
        """Token of the last run enqueued on the devices in this launch; None if there was none."""
        return self._last[0]

    def unfinished(self, client: int | None) -> Tokens:
        """Returns the runs that may not have finished yet, of which those of a client may fail."""
        runs = [*self._unfinished, *self._apart.last()]
        own = [token for one, token in runs if one == client]
        return Tokens(own, [token for one, token in runs if one != client])

    def run(
        self, launch: messages.Launch, arguments: list[int], first_result: int, client: int
    ) -> None:
        """Runs a function; an error becomes the state of its results.

        Args:
            launch: the command; in a run of a whole program its buffers are slots.
            arguments: the buffers of its arguments.
            first_result: the buffer of its first result.
            client: the client that issued it.
        """
        objects, executable, completion = self._objects.values, launch.executable, launch.completion
        try:
            program = self._programs[executable]
            inputs = [objects[number] for number in arguments]
            made = launch.results + (completion is not None)
            issued = IssuedRun(client, first_result, made, self._scope or first_result)
            is_apart = isinstance(program, Executable) and Apart.takes(program, inputs)
            failed = None
            if not is_apart and self._resolve(inputs):
                failed = self._stand_in(program, arguments, inputs, client)
            kept = launch.keep
            if not isinstance(program, Feed) and program.donated:
                kept = kept + self._still_read(program, arguments, kept)
            if isinstance(program, Feed):
                outputs = self._take(program, completion)
            elif is_apart:
                outputs = self._run_apart(program, launch, arguments, (issued, kept))
            else:
                self._copy_kept(inputs, kept)
                outputs = self._hand_over(program, inputs, completion, issued)
        except Exception as error:
            failed = self._failure(executable, error)
        if failed is not None:
            for number in range(first_result, first_result + launch.results):
                objects[number] = failed
            if completion is not None:
                objects[completion] = failed
            return
        number = first_result
        for output in outputs:
            objects[number] = output
            number += 1

    def _run_apart(
        self,
        program: Executable,
        launch: messages.Launch,
        arguments: list[int],
        run: tuple[IssuedRun, list[int]],
    ) -> list[Any]:
        """Lets a thread enqueue a run: see :mod:`fairway.host.apart`.

        Args:
            program: what runs.
            launch: the command.
            arguments: the buffers of its arguments.
            run: the run, and the arguments that it must not donate.
        """
        issued, kept = run

        def enqueue(inputs: list[Array]) -> tuple[list[Array], Any]:
            try:
                self._copy_kept(inputs, kept)
                return self._enqueue(program, inputs, issued)
            except Exception as error:
                raise self._failure(launch.executable, error) from None

        client_and_results = issued.client, launch.results
        outputs, token = self._apart.run(program, arguments, client_and_results, enqueue)
        if launch.completion is not None:
            self._objects.values[launch.completion] = token
        self._last = token, None
        return outputs

    def _resolve(self, inputs: list[Any]) -> bool:
        """Resolves inputs that were not ready, in place; returns whether one is an error."""
        has_failed = False
        for index, value in enumerate(inputs):
            if isinstance(value, (Deferred, Failed)):
                inputs[index] = value = self._wait_for(value)
                has_failed |= isinstance(value, Failed)
        return has_failed

    def _stand_in(
        self, program: Executable | Feed, arguments: list[int], inputs: list[Any], client: int
    ) -> Failed:
        """Puts zeros in place of inputs that are errors, where other hosts may have them.

        Those hosts would wait for this one in the program's collectives, which do not recover. What
        they compute from the zeros must not be seen: the controller notes it before it exists.

        Returns:
            The state of the results here.

        Raises:
            Failed: no host runs the program.
            StatusError: the controller has not answered.
        """
        found = {
            number: value
            for number, value in zip(arguments, inputs, strict=True)
            if isinstance(value, Failed)
        }
        first = next(iter(found.values()))
        if isinstance(program, Feed) or not program.is_shared:
            raise first
        if common := [failed for failed in found.values() if failed.is_common]:
            raise common[0]
        if new := [number for number, failed in found.items() if not failed.is_noted]:
            tag = oldest = min(new)  # no message has a buffer's number
            self._plane.expect(tag, _native.CONTROLLER)
            self._report.send(messages.BuffersLost(client, oldest, 1, tag, found[oldest].text))
            self._plane.take(tag, ANSWER_TIMEOUT_S)
            for number in new:
                found[number].is_noted = True
        for index, value in enumerate(inputs):
            if isinstance(value, Failed):
                inputs[index] = self._backend.zeros(program, index)
        return Failed(first.text, is_noted=True)

    def _hand_over(
        self,
        program: Executable,
        inputs: list[Array],
        completion: int | None,
        issued: IssuedRun,
    ) -> list[Any]:
        """Enqueues a run on the devices, once fewer than ``UNFINISHED_LAUNCHES`` are enqueued.

        Args:
            program: what runs.
            inputs: its arguments.
            completion: the buffer of its completion, if it is wanted.
            issued: the run.
        """
        if len(self._unfinished) >= UNFINISHED_LAUNCHES:
            _wait_quietly(self._unfinished.popleft()[1])
        outputs, token = self._enqueue(program, inputs, issued)
        self._unfinished.append((issued.client, token))
        if completion is not None:
            self._objects.values[completion] = token
        self._last = token, outputs[0] if outputs else None
        return outputs

    def _enqueue(
        self, program: Executable, inputs: list[Array], issued: IssuedRun
    ) -> tuple[list[Array], Any]:
        """Enqueues a run; returns its results and its token."""
        begun = time.monotonic_ns() if self._trace is not None else 0
        with program.calls.running(issued) if program.calls else contextlib.nullcontext() as run:
            raw = program.execute(inputs, with_tokens=True)
            token = raw.consume_token()
            outputs: list[Any] = raw.consume_with_handlers(program.handlers)
            if run is not None:
                run.ends_with(token, outputs[0] if outputs else None)
        if self._trace is not None:
            times_ns = (self._begun_ns or begun, begun)
            self._trace.run(token, times_ns, program.local, program.name, issued.client)
        return outputs, token

    def _take(self, program: Feed, completion: int | None) -> list[Any]:
        """Returns the next batch of an input, which is ready: the controller tracks batches."""
        outputs = program.source.take()
        if completion is not None:
            self._objects.values[completion] = _Batch(outputs)
        self._last = None, outputs[0]
        return outputs

    def announce(self, executables: Iterable[int]) -> None:
        """Makes inputs prefetch enough batches for one run that calls all these programs."""
        programs = [self._programs.get(executable) for executable in executables]
        sources = [program.source for program in programs if isinstance(program, Feed)]
        for source in sources:
            source.hold(sources.count(source))

    def _wait_for(self, value: Any) -> Array | Failed:
        """Resolves an input that was not ready; the wait is not counted as busy time."""
        begun = time.monotonic_ns()
        try:
            return resolve(value)
        except Failed as failed:
            return failed
        finally:
            self._waited_ns += time.monotonic_ns() - begun

    def _failure(self, executable: int, error: Exception) -> Failed:
        """Returns the state of the results of a launch that raised an error."""
        if isinstance(error, Failed):
            return Failed(error.text, error.is_common, error.is_noted)
        if isinstance(error, KeyError):
            return Failed(f"NOT_FOUND: this host has no program or buffer {error}")
        program = self._programs.get(executable)
        code, _, message = error_text(error).partition(": ")
        name = program.name if program else f"program {executable}"
        return Failed(f"{code}: {name}: {message}")

    def _still_read(self, program: Executable, arguments: list[int], keep: list[int]) -> list[int]:
        """Returns donated arguments that are still read after a grace period; they are copied.

        A transfer to a host that does not receive must not delay other clients.
        """
        given = [index for index in program.donated if index not in keep]
        late = self._objects.unfinished_uses([arguments[index] for index in given])
        return [index for index in given if arguments[index] in late]

    def _copy_kept(self, inputs: list[Array], keep: list[int]) -> None:
        for index in keep:
            array = inputs[index]
            local = self._backend.places(array)
            memory = self._backend.memory_kind(array)
            inputs[index] = self._backend.copy(array, local, memory)

    def _order_broken(self, sequence: int, previous: int) -> None:
        message = (
            f"launch {sequence} must follow launch {previous}, but launch "
            f"{self._last_launch} was the last; the hosts of the island have lost their order"
        )
        self._report.send(messages.OrderBroken(message))
        raise LaunchOrderError(message)


class _Finishes:
    """Reports to the controller, in order, that launches have ended, and their busy time.

    Args:
        report: sends reports to the controller.
    """

    def __init__(self, report: Reporter) -> None:
        self._report = report
        self._waiting: queue.SimpleQueue[tuple[Any, int, bool]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended_ns = 0
        self._queued = 0
        self._reported = 0

    def report(self, token: Any, is_over: bool, begun_ns: int) -> None:
        """Reports when ``token`` is ready; its work began at ``begun_ns``."""
        if is_over and self._queued == self._reported:
            self._report_now(begun_ns)
        else:
            self._queue(token, begun_ns, False)

    def report_late(self, token: Any, begun_ns: int) -> None:
        """Reports when ``token`` is ready; without a time if it is ready already."""
        self._queue(token, begun_ns, True)

    def _queue(self, token: Any, begun_ns: int, is_late: bool) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="fairway-end", daemon=True)
            self._thread.start()
        self._queued += 1
        self._waiting.put((token, begun_ns, is_late))

    def _follow(self) -> None:
        while True:
            token, begun_ns, is_late = self._waiting.get()
            asked_ns = time.monotonic_ns()
            if token is not None:
                _wait_quietly(token)
            was_over = is_late and time.monotonic_ns() - asked_ns < AT_ONCE_NS
            try:
                self._report_now(None if was_over else begun_ns)
            except OSError:
                return  # the controller is gone
            self._reported += 1

    def _report_now(self, begun_ns: int | None) -> None:
        """Reports an end; the busy time is 0 (unknown) without its beginning."""
        now = time.monotonic_ns()
        busy = 0 if begun_ns is None else now - max(begun_ns, self._ended_ns)
        self._ended_ns = now
        self._report.send(messages.Finished(max(busy, 0)))


class Tokens:
    """Tokens of several runs, which can be waited for together.

    Args:
        own: tokens of runs whose errors are raised.
        others: those of other runs.
    """

    def __init__(self, own: list[Any], others: list[Any]) -> None:
        self._own = own
        self._others = others

    def block_until_ready(self) -> None:
        """Waits until all have ended; raises the error of the first own one that failed."""
        found = None
        for token in self._others:
            _wait_quietly(token)
        for token in self._own:
            try:
                token.block_until_ready()
            except Exception as error:
                found = found or error
        if found is not None:
            raise found


class _Batch:
    """Arrays of an input; any that was spilled or donated had been computed before."""

    def __init__(self, arrays: list[Array]) -> None:
        self._arrays = arrays

    def block_until_ready(self) -> None:
        """Waits until all are computed; raises the error of an array that failed."""
        for array in self._arrays:
            try:
                array.block_until_ready()
            except Exception:
                if not array.is_deleted():
                    raise


def _is_ready(output: Any) -> bool:
    try:
        return output is not None and output.is_ready()
    except Exception:  # the error is raised where the output is used
        return True


def _wait_quietly(token: Any) -> None:
    """Waits for the end of a run; its error is raised where its results are used."""
    try:
        token.block_until_ready()
    except Exception:
        return
