"""Saver: the pair of saved-tensor hooks, wired to recognition, decision, transfer and read-ahead.

Guarantees:

1. Exact: what `unpack` returns is bit for bit what was saved, or an error that names the tensor.
2. The graph owns the memory: records live in the handles that autograd's nodes hold and die with them. The saver
   itself holds records only weakly; finalisers only append to a deque that the next hook drains. The hooks keep the
   saver alive for as long as a graph has them.
3. One lock guards all state. Waiting for data happens outside of it, waiting for room releases it.
4. What comes in while this thread has the lock already (a finaliser that a garbage collection runs, a trace function, a
   debugger) changes nothing: what it saves stays, what it asks for is given from where it is (`restore_apart`).
5. An exception that is not the engine's own and leaves it in the midst of a change (a trace function's, a debugger's)
   tears it: hooks pass through from then on, what is in memory or in the store still comes back, and the Offloader
   makes another. No signal does that (`io_backends.interrupts`).
6. In a forked child the saver is dead: hooks pass through, finalisers do nothing.

Assumption: one thread does not edit in place what another thread's graph has saved (a data race in PyTorch as well).
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import EllipsisType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from io_backends import ForkAware, Store, interrupts

from .._auto.acted import Acted
from .._auto.planner import Planner
from .._auto.rest import Rest
from .._compress.calls import SavedBy, unclassed
from .._compress.compressor import compressor
from .._config import OffloadConfig
from .._derive.derivations import Derivations
from .._derive.worth import Worth
from .._device import streams
from .._errors import OffloadError, OffloadWarning, edited_in_place
from .._group.node_share import NodeShare
from .._memory import shortage
from .._memory.ledger import Ledger
from .._plan.no_plan import NoPlan, no_plan
from .._plan.plan import Plan
from .._plan.policy import ASIDE, FITS
from .._record.plain import Shell, shown_bytes
from .._record.record import Record
from .._record.restore import restore_apart, restore_in_child
from .._record.sighting import Sizes
from .._record.user_code import Detached, goes_to_code, kept_for_code
from .._record.view import View
from .._stats import Counters, OffloadStats, Situation
from .._torch.foreign import SAVES_INPUTS, Caches
from .._torch.modes import quiet
from .._torch.private import current_graph_task_id, dispatch_mode_count, function_mode_count, never_compiled, sizes
from .._transfer.build import make_mover
from .._transfer.mover import ownership
from .._transfer.staging import DEVICE_PERIOD_S
from .footprint import Footprint
from .packing import Packed, Packing, as_it_is
from .pending import Pending
from .read_ahead import ReadAhead
from .readings import Readings
from .step import COUNTING, LIGHT, OFF, Step
from .steps import Steps
from .unpacking import Unpacking
from .write_behind import WriteBehind

_MOST_WAITING = 8  # comparisons in flight on a device: a few layers' worth, in no more memory than their tensors


class Saver(ForkAware):
    """Pair of hooks for `torch.autograd.graph.saved_tensors_hooks`, and the engine they work for.

    Calls between its parts run downward. Two parts get the hooks themselves, as they stand where autograd stands:

        Execution   -> pack, unpack    what a block saves that is tried, or recomputed
        Derivations -> unpack          the sources of a recipe
    """

    def __init__(
        self,
        config: OffloadConfig,
        model: Callable[[], nn.Module | None],
        open_store: Callable[[bool], Store],
        node: NodeShare,
        counters: Counters | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.came_back: Callable[[], bool] = ownership(self.lock)
        self.counters = Counters() if counters is None else counters
        self.dead = False
        self.torn = False
        self._saved_aside: deque[int] = deque()  # bytes of each tensor
        self.model = model  # gives it, or None
        self.mover = mover = make_mover(config, model(), self.lock, self.counters, open_store, node)
        self.recorder = mover.recorder
        limits, pressure, in_flight = mover.limits, mover.pressure, mover.staging
        self.ledger = ledger = Ledger(config, limits, pressure, in_flight, self.counters, self.recorder, model)
        self.write_behind = write_behind = WriteBehind(config, mover, ledger, self.counters)
        self.compressor = compressor(config.compress, config.rank, config.seed, self.counters)
        lossy = self.compressor is not None and self.compressor.lossy  # what it makes must not depend on timing
        self.worth = Worth(on_disk=config.tier == "nvme", leaves=not lossy)
        self.derivations: Derivations | None = None
        if config.derive and (self.compressor is not None or (config.tier == "auto" and config.policy == "budget")):
            most_waiting = 0 if self.compressor is None else _MOST_WAITING  # a plan has no room for them
            in_full = config.verify == "full"
            self.derivations = Derivations(self.unpack, self.worth, in_full=in_full, most_waiting=most_waiting)
        planner = None
        if config.tier == "auto":
            planner = Planner(
                config,
                model,
                lock=self.lock,
                ledger=ledger,
                cost=mover.cost,
                allowance=mover.allowance,
                in_flight_bytes=limits.staging_bytes,
                lossy=lossy,
                keep=self.pack,
                give=self.unpack,
            )
        self.planner = planner
        execution = None if planner is None else planner.execution
        self.pending = pending = Pending(
            write_behind=write_behind,
            counters=self.counters,
            compressor=self.compressor,
            derivations=self.derivations,
            execution=execution,
            cost=mover.cost,
        )
        self.rest = Rest.of(config, model)
        self.read_ahead = read_ahead = ReadAhead(
            mover=mover, write_behind=write_behind, pending=pending, execution=execution
        )
        self._sizes = Sizes.of(int(config.min_tensor_bytes))
        footprint = Footprint(self.counters, compresses=config.compress is not None)
        first = Step(0, 0, self._sizes, self.rest.fitted_bytes)
        self.steps = Steps(config.tier, self.counters, model, first, footprint)
        self._tier = config.tier
        self._caches = Caches(config.tier)
        self._readings = Readings(self.counters, mover, self.steps, read_ahead, self._caches, planner)
        self._packing = Packing(
            config=config,
            model=model,
            counters=self.counters,
            mover=mover,
            write_behind=write_behind,
            pending=pending,
            read_ahead=read_ahead,
            execution=execution,
        )
        self._unpacking = Unpacking(
            mover=mover,
            write_behind=write_behind,
            pending=pending,
            read_ahead=read_ahead,
            steps=self.steps,
            readings=self._readings,
            execution=execution,
            packing=self._packing,
        )
        self._tensor: Callable[..., Tensor] = self._unpacking.tensor

    # -- pack ----------------------------------------------------------------------------------------------------

    @never_compiled
    def pack(self, tensor: Tensor) -> Packed:
        """Pack a tensor that autograd saves."""
        if self.came_back():
            return self._keep_aside(tensor)
        try:
            frame = sys._getframe().f_back  # None on a thread of autograd's own
            if frame is not None and frame.f_code.co_filename in SAVES_INPUTS and self._caches.look(frame):
                with unclassed():  # others are computed from it
                    return self.pack(tensor)
            if dispatch_mode_count() or function_mode_count():  # here, as a context that does nothing costs as well
                with quiet():
                    packed = self._pack(tensor)
            else:
                packed = self._pack(tensor)
            # On a CPU nothing waits, so that this is no further call.
            if self.derivations is not None and self.derivations.waiting and self.derivations.crowded:
                self._await_comparisons(self.derivations)
            if self.mover.ended:
                self._catch_up()
            if interrupts.kept:
                interrupts.throw()
        except BaseException as error:
            self.left_by(error)
            raise
        if interrupts.pending:
            _ = [*interrupts.again]
        return packed

    def _pack(self, tensor: Tensor) -> Packed:
        if self.dead:
            return as_it_is(tensor)
        with self.lock:
            step = self.steps.current
            # Ahead of all that would launch, wait or look around.
            if not tensor.is_cpu and streams.capturing(tensor):
                if step.task == -1:
                    self._packing.turn(step, departs=False)  # what is captured may not wait for room
                return self._packing.keep(tensor, tensor.numel() * tensor.itemsize, "CUDA graph capture")
            if (step.task != -1 or step.begun_s is None) and current_graph_task_id() == -1:
                step = self._begin_step(step)
            if step.mode in LIGHT and (packed := self._packing.pass_light(tensor, step)) is not None:
                return packed
            return self._packing.pack(tensor, step)

    def _await_comparisons(self, derivations: Derivations) -> None:
        """Wait until a device has ended some of what it compares. The lock is free meanwhile, and nobody spins."""
        while derivations.crowded and not (self.dead or interrupts.pending or streams.capturing_here()):
            time.sleep(DEVICE_PERIOD_S)
            with self.lock, quiet():
                self.pending.settle(wait=False)

    def _keep_aside(self, tensor: Tensor) -> Packed:
        """Let a tensor stay that is saved in the midst of a change. It is counted by the next look at what has died."""
        with quiet():
            self._saved_aside.append(shown_bytes(tensor))
            return as_it_is(tensor)

    # -- unpack --------------------------------------------------------------------------------------------------

    @never_compiled
    def unpack(self, packed: Packed, asker: FrameType | EllipsisType | None = ...) -> Tensor:
        """Unpack a saved tensor for autograd, any number of times; `asker`: the innermost frame outside of the hook.

        Raises:
            RuntimeError: PyTorch's own, for a tensor that was edited in place.
            TransferError, ClosedError: its bytes could not be brought back; they are gone with the engine, or a fork.
        """
        of_any_kind: Any = packed
        first, second = of_any_kind
        if asker is ...:
            asker = sys._getframe().f_back
        if type(first) is not Record:
            if type(first) is Shell:
                return first.around(second, self.unpack, asker)
            step = self.steps.current
            looks = step.task == -1 or (step.course is not None and next(step.looks))
            if (looks or self.recorder.trace is not None) and not self.dead:
                self._ask_passed(current_graph_task_id())
            if first._version != second:
                raise edited_in_place(f"{first.type()} {list(sizes(first))}", first._version, second)
            if (first.requires_grad or type(packed) is Detached) and goes_to_code(
                current_graph_task_id(), asker, alike=step.mode in LIGHT
            ):
                return kept_for_code(packed, shared=self._derives)
            return first  # type: ignore[no-any-return]  # what `as_it_is` packed; a check would cost a lot
        if self.came_back() and not (self.derivations is not None and self.derivations.compares_here):
            return self._give_apart(first, second)
        try:
            task = current_graph_task_id()
            to_code = goes_to_code(task, asker)
            if dispatch_mode_count() or function_mode_count():
                with quiet():
                    tensor = self._tensor(first, second, task, to_code)
            else:
                tensor = self._tensor(first, second, task, to_code)
            if self.mover.ended:
                self._catch_up()
            if interrupts.kept:
                interrupts.throw()
        except BaseException as error:
            self.left_by(error)
            raise
        return tensor  # a pending signal strikes where backward has ended: nothing of the program runs before

    @property
    def _derives(self) -> bool:
        """Whether anything may have been derived."""
        return self.compressor is not None or (self.planner is not None and self.planner.execution.derives)

    def _give_apart(self, record: Record, view: View, *_: object) -> Tensor:
        with quiet():
            return restore_apart(record, view, self.mover.read_apart)

    def _ask_passed(self, task: int) -> None:
        if task != -1 and not self.came_back():
            try:
                if dispatch_mode_count() or function_mode_count():
                    with quiet():
                        self._unpacking.passed(task)
                else:
                    self._unpacking.passed(task)
            except BaseException as error:
                self.left_by(error)
                raise

    def left_by(self, error: BaseException) -> None:
        """Tell what becomes of the engine that an error leaves. Raises instead what a handler has raised in a wait."""
        interrupts.throw()
        if self.came_back():  # the call around this one is told of it too
            return
        own = isinstance(error, (OffloadError, OffloadWarning, torch.OutOfMemoryError, MemoryError))
        if not own and isinstance(error, RuntimeError) and not isinstance(error, RecursionError):
            own = shortage.lacks_memory(error) or not interrupts.is_foreign(error)  # of an edit in place
        if not own:
            self.tear()

    # -- around the hooks ----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `stop` was called: nothing is moved any more."""
        return self.mover.closed

    @property
    def expects(self) -> bool:
        """Whether something has been saved whose backward is still to come. One that has run may be a handler's own."""
        step = self.steps.current
        if self.torn or step.begun_s is None:
            return False
        return step.task == -1 or len(self.read_ahead.records) > len(self.read_ahead.remains)

    @property
    def nothing_came(self) -> bool:
        """Whether nothing worth moving has ever been saved but weights."""
        return not self._packing.numbers

    @property
    def watches(self) -> bool:
        """Whether it matters when a forward begins and ends."""
        return self.rest.possible or self.planner is not None

    def mode(self) -> SavedBy | None:
        """The torch-function mode to enter with the hooks, where `compress` needs one. Raises ConfigError."""
        return self.compressor.mode(self.model()) if self.compressor is not None else None

    def enter(self) -> bool:
        """Enter the context; whether the hooks are to be pushed."""
        self.steps.enter()
        return not self.rest.enter()

    def tie(self) -> None:
        """Note that the model's own forward enters from now on."""
        self.steps.tie()

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Begin a forward of the model; whether the hooks are to be off in it. Raises BudgetError."""
        if self.dead or self.came_back() or streams.capturing_here():
            return False
        with self.locked(), quiet():
            if self.steps.current.task != -1:
                self.end_step()
            elif self.steps.current.begun_s is not None:
                self.settle()
                self._begin_anew()
            key = self.rest.key(args, kwargs) if self.watches else None
        joins = self.planner is not None and self.planner.meet(key)
        with self.locked(), quiet():
            step, rest, asked = self.steps.current, self.rest, self.rest.counts and self.recorder.asked
            step.wake()
            room_bytes = self.ledger.look_at_room() if rest.looks(key) else 0
            rests = rest.begins(key, room_bytes=room_bytes, watched=asked or joins, step=self.counters.steps + 1)
            if rests and not rest.counts:
                step.rest()
            elif rests and (step.mode in LIGHT or self.ledger.has_room(rest.fitted_bytes or 0)):
                self._packing.count(step)
            if self.planner is not None and not (rests and step.mode in (OFF, *LIGHT)):
                self.planner.begin_forward(key, self.mover.capacity_bytes)
                # Where free memory decides, what stays has records: when there is less of it, the oldest goes.
                self._packing.follow(step, may=rest.counts and not asked)
        return step.mode is OFF

    def _begin_anew(self) -> None:
        """Forget what the step under way was, if all that it saved has died: nobody wanted that forward's gradients."""
        step = self.steps.current
        self._packing.pass_on(step, None)
        if step.over:  # waiting for room lets go of the lock: another thread has ended it
            return
        newest = next(reversed(self.read_ahead.records), -1)
        if newest < step.first_number and not self.ledger.graphs_live:
            if step.mode is COUNTING:  # which knows no weights; the full hooks may come next
                self._packing.mark_weights()
            self.steps.replace(step.anew())
            if self.planner is not None:
                self.planner.execution.forget()

    def leave(self, *, failed: bool, packed: bool, inside: bool) -> None:
        """Leave the context: by an exception if `failed`, with hooks on if `packed`, on a thread still `inside` it."""
        if self.planner is not None:
            self.planner.end_forward()
        self.rest.leave(failed=failed)
        if packed:
            self.end_packing(step_over=not inside)

    def end_packing(self, *, step_over: bool) -> None:
        """Pass on what is pending, as no operator of this thread runs; if `step_over`, end the micro-batch too."""
        if not (self.dead or self.came_back() or streams.capturing_here()):
            with self.locked(), quiet():
                self.pending.pass_on(None)
                self._packing.make_way(self.steps.current)
                self._packing.pass_on(self.steps.current, None)
                if step_over and self.steps.over:
                    self.end_step()

    def leave_to_graphs(self) -> None:
        """Know that saved tensors move within compiled graphs: what these leave to the hooks is no loss."""
        self._packing.leave_to_graphs()

    def begin_graph(self) -> None:
        """Begin a forward of a compiled graph that moves what it saves by itself, before a hook sees any of it."""
        if self.dead or self.came_back() or streams.capturing_here():
            return
        with self.locked(), quiet():
            step = self.steps.current
            if step.mode is not OFF and (step.task != -1 or step.begun_s is None):
                self._begin_step(step)

    def tell_of_foreign(self, name: str) -> None:
        """Say that another pair of hooks, of `name`, was innermost, if nothing has reached ours."""
        if self.nothing_came:
            self.steps.tell_of_foreign(name)

    def tell_if_idle(self) -> None:
        """Say once if the tier has had nothing to do."""
        if not (self.steps.told or self.dead):
            stats = self.stats(inside=False)
            self.steps.tell_if_idle(stats, forward_seen=self.steps.current.begun_s is not None)

    @interrupts.whole
    def flush(self, where: str) -> None:
        """Write what waits to be written, and wait for it. Raises StalledError, which names `where`."""
        if self.torn or self.came_back():
            return
        with self.locked(), quiet():
            self.pending.pass_on(None)
            if self.pending.waits:
                self.pending.settle(wait=True)
            self.write_behind.send_all()
            self.mover.await_writes(where)
            self.settle()

    @interrupts.whole
    def stats(self, *, inside: bool) -> OffloadStats:
        """Take a snapshot of the counters; `inside` the context a step may still go on."""
        if self.torn or self.came_back() or streams.capturing_here():
            return self._readings.as_counted(self._situation())
        with self.locked(), quiet():
            if self.steps.over and not inside:
                self.settle()
                if not self.read_ahead.records:
                    self.end_step()
            self.settle()
            self._readings.close_step()
            return self._readings.as_counted(self._situation())

    def _situation(self) -> Situation:
        rest, steps = self.rest, self.steps
        plan = self.planner.followed if self.planner is not None else None
        return Situation(
            tier=self._tier,
            entered=steps.entered or steps.tied,
            closed=self.closed,
            hooks=rest.hooks,
            since=rest.since,
            planned=steps.footprint.planned,
            step_ratio=plan.step_ratio if plan is not None else 0.0,
        )

    @property
    def plan(self) -> Plan | NoPlan:
        """The plan for the next steps, or why there is none."""
        planner, footprint, last = self.planner, self.steps.footprint, self.steps.last
        if planner is not None and planner.plan is not None:
            return planner.plan
        moved = last is not None and last.offloaded_bytes > 0
        return no_plan(
            self._tier,
            step_bytes=footprint.plain_bytes if moved else footprint.held_bytes,
            aside_bytes=footprint.aside_bytes,
            room_bytes=self.ledger.room_bytes,
            limited=self.ledger.limited,
            moved=moved,
            steps=self.counters.steps,
            hooks=self.rest.hooks,
        )

    def stop(self) -> bool:
        """Move nothing any more; False if that was so already."""
        came_back = self.came_back()
        with self.locked():
            if self.closed:
                return False
            if not (self.torn or came_back):
                self.settle()
            self.steps.give_up()
            if self.planner is not None:
                self.planner.leave()
            self.mover.stop()
        return True

    def close(self, store: Store | None) -> None:
        """Close the store in use, else `store`, and give memory back. Call `stop` before."""
        used, came_back = self.mover.store or store, self.came_back()
        if used is not None:
            (used.abandon if came_back else used.close)()
        if not (self.torn or came_back):
            with self.locked():
                self.settle()
        self.mover.close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, as all but the hooks do, and land afterwards what has ended meanwhile."""
        try:
            with self.lock:
                yield
        except BaseException as error:
            self.left_by(error)
            raise
        finally:
            self._catch_up()

    def _catch_up(self) -> None:
        """Land what has ended meanwhile. An error that breaks that off may leave the lock held, which tells nothing."""
        try:
            self.mover.catch_up()
        except BaseException:
            self.tear()
            raise

    # -- with the lock -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Settle what has died or ended meanwhile, and count what was saved in the midst of a change."""
        self.mover.land()  # all of it: what only costs are counted from too
        self.read_ahead.settle()
        while self._saved_aside:
            self.counters.kept_by_reason[ASIDE] += self._saved_aside.popleft()

    def _begin_step(self, step: Step) -> Step:
        """Begin a micro-batch, as something is saved outside of backward; the one before, `step`, may have to end."""
        if step.task != -1:
            self.end_step()
        step = self.steps.current
        if step.begun_s is None:
            self.steps.begin()
            if step.mode is not COUNTING:
                self._packing.mark_weights()
        return step

    def end_step(self) -> None:
        """End a micro-batch: learn from it, and have another take its place."""
        step, packing = self.steps.current, self._packing
        if step.begun_s is None:  # backward went on after its context had been left
            step.ask(-1)
            self.read_ahead.end_walks()
            return
        self.settle()
        self.read_ahead.end_walks()
        packing.pass_on(step, None)
        if step.over:  # waiting for room lets go of the lock: another thread has ended it
            return
        acted = self.planner.execution.acted if self.planner is not None else Acted()
        self.mover.take_share()  # first: the next plan is for the room of now
        self._learn(step, acted)
        self.write_behind.end_step()
        peaks = self.ledger.end_step()
        need_bytes = peaks.plain_bytes
        if self.planner is not None:  # what stays needs nothing; a step that moves has looked at how much may
            need_bytes = max(0, need_bytes - self.ledger.room_bytes) if self.mover.sent_bytes else 0
        self.mover.end_step(need_bytes)
        self._readings.take()
        following = Step(packing.numbers, packing.worth_bytes, self._sizes, self.rest.fitted_bytes)
        self.steps.end(following, self.mover.file_bytes(), peaks, acted)

    def _learn(self, step: Step, acted: Acted) -> None:
        """Tell what decides about later steps of one that ends."""
        mover, moved_bytes = self.mover, self.mover.sent_bytes
        worth_bytes = self._packing.worth_bytes - step.before_bytes + step.passed_bytes
        self.pending.end_step(self.worth, self._packing.numbers)
        self.counters.kept_by_reason[FITS] += step.passed_bytes
        if self.planner is not None:
            entries = step.written_down if moved_bytes <= self.ledger.expected.sent_bytes else None
            self.planner.end_step(
                whole=step.is_whole,
                course=entries,
                sent_bytes=moved_bytes,
                on_device=mover.copies.used,
                capacity_bytes=mover.capacity_bytes,
            )
        room_bytes = self.ledger.room_bytes
        if step.mode is not COUNTING:
            self.rest.end_step(
                planned=acted.planned,
                kept_bytes=max(0, worth_bytes - moved_bytes),
                moved_bytes=moved_bytes,
                failures=mover.failures.in_step,
                room_bytes=room_bytes,
            )
        self.rest.learn(step.counted_bytes, room_bytes, countable=step.countable)
        self._packing.end_step(worth_bytes, moved=moved_bytes > 0)

    def forget(self) -> None:
        """In a forked child: hooks pass tensors through, finalisers do nothing, stored bytes are gone."""
        self.dead = True
        self.steps.give_up()
        self._tensor = restore_in_child
        self.lock = threading.RLock()  # the old one may be held by a thread that does not exist here
        self.came_back = ownership(self.lock)
        if self.planner is not None:
            self.planner.go_on_in_child(self.lock)

    def let_go(self) -> None:
        """Let go of the lock, which this thread has and no code of ours: an exception has come in its stead."""
        self.tear()
        while self.came_back():
            self.lock.release()

    def tear(self) -> None:
        """Move and change nothing any more: the state is not to be relied on. Wants no lock."""
        self.torn = self.dead = True
        self._tensor = self._give_apart
        self.mover.tear()
