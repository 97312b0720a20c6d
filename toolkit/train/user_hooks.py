"""Hooks of the configuration (``+hooks.NAME.target=my.package.Hook``), and how they end a run."""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.config.schema import RunConfig
from toolkit.config.user_objects import hook_ranks
from toolkit.engine.rank_sync import broadcast_value
from toolkit.errors import ConfigError, Problem
from toolkit.hooks import CompletedStep, Hook, HookContext
from toolkit.monitor.sink import Kind, Row, Sink
from toolkit.observe.context import RankContext
from toolkit.user_code import (
    UserObject,
    build_user_object,
    check_arguments,
    check_kind,
    describe_source,
    load_target,
    user_code,
    user_objects,
)

log = logging.getLogger(__name__)

EVENTS = (
    "on_start",
    "on_step",
    "on_eval",
    "on_checkpoint",
    "on_rollback",
    "on_exception",
    "on_end",
    "state_dict",
    "load_state_dict",
)
WINDOW_STEPS = 50  # steps over which the share of a hook's time is measured
SLOW_SHARE = 0.05  # of the time of these steps
SLOW_SECONDS = 10.0  # of a single call


class EndRequest:
    """Whether this rank asks to end the run early, and why. The ranks agree after the next step."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def request(self, reason: str) -> None:
        """The first reason counts."""
        self.reason = self.reason or reason


class UserHook(Hook):
    """Calls a hook of the user's own code: names it in errors and in reports of hangs, and warns if it is
    slow.

    Args:
        given: the key and target.
        hook: None on ranks on which the hook does not run.
        enter: receives the name of the event that the hook handles now, and then an empty string.
        first_rank: the lowest rank on which it runs, whose state is stored.
        broadcast: returns the value that ``first_rank`` passes, on all ranks. Collective.
    """

    def __init__(
        self,
        given: UserObject,
        hook: Hook | None,
        *,
        rank: int,
        enter: Callable[[str], None],
        first_rank: int = 0,
        broadcast: Callable[[Any, int], Any] = lambda value, source: value,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given, self._hook, self._rank, self._enter = given, hook, rank, enter
        self._first_rank, self._broadcast, self._clock = first_rank, broadcast, clock
        self._spent, self._since, self._steps = 0.0, clock(), 0
        self._warned = False

    def on_start(self, step: int) -> None:
        if self._hook is not None:
            with self._event("on_start"):
                self._hook.on_start(step)
        self._spent, self._since, self._steps = 0.0, self._clock(), 0

    def on_step(self, completed: CompletedStep) -> None:
        if self._hook is None:
            return
        with self._event("on_step"):
            self._hook.on_step(completed)
        self._steps += 1
        if self._steps == WINDOW_STEPS:
            self._check_share(completed.step)

    def on_eval(self, row: Row) -> None:
        if self._hook is not None:
            with self._event("on_eval"):
                self._hook.on_eval(row)

    def on_checkpoint(self, path: Path) -> None:
        if self._hook is not None:
            with self._event("on_checkpoint"):
                self._hook.on_checkpoint(path)

    def on_rollback(self, path: Path) -> None:
        if self._hook is not None:
            with self._event("on_rollback"):
                self._hook.on_rollback(path)

    def on_exception(self, error: Exception) -> None:
        if self._hook is None:
            return
        try:
            with self._event("on_exception"):
                self._hook.on_exception(error)
        except Exception as second:  # noqa: BLE001  the first error ends the run and is the one to report
            error.add_note(f"{self._given.key}.on_exception failed too: {type(second).__name__}: {second}")

    def on_end(self, step: int) -> None:
        if self._hook is not None:
            with self._event("on_end"):
                self._hook.on_end(step)

    def state_dict(self) -> Mapping[str, Any]:
        state: Any = {}
        if self._hook is not None and self._rank == self._first_rank:
            with self._event("state_dict"):
                state = self._as_json(self._hook.state_dict())
        return self._broadcast(state, self._first_rank) if self._first_rank else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._hook is not None:
            with self._event("load_state_dict"):
                self._hook.load_state_dict(state)

    @contextmanager
    def _event(self, name: str) -> Iterator[None]:
        key, start = f"{self._given.key}.{name}", self._clock()
        self._enter(key)
        try:
            with user_code(key, self._hook):
                yield
        finally:
            self._enter("")
            seconds = self._clock() - start
            self._spent += seconds
            if seconds > SLOW_SECONDS:
                self._warn(f"{key} took {seconds:.1f} s")

    def _check_share(self, step: int) -> None:
        now = self._clock()
        share = self._spent / max(now - self._since, 1e-9)
        if share > SLOW_SHARE:
            self._warn(f"{self._given.key} took {share:.0%} of the {WINDOW_STEPS} steps up to step {step}")
        self._spent, self._since, self._steps = 0.0, now, 0

    def _warn(self, seen: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                f"{seen} on rank {self._rank}, and all ranks wait for it ({describe_source(self._hook)}); "
                "do less in it, do it in fewer steps, or do it in a thread"
            )

    def _as_json(self, state: Any) -> Any:
        try:
            if not isinstance(state, Mapping):
                raise TypeError(f"a {type(state).__name__}")
            return json.loads(json.dumps(dict(state)))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                Problem(
                    f"{self._given.key}.target",
                    f"state_dict() of {self._given.key} ({describe_source(self._hook)}) returns what JSON "
                    f"cannot store: {error}",
                    "the state of a hook is a dictionary of dictionaries, lists, numbers, text, true, false "
                    "and null",
                    "return such a dictionary",
                )
            ) from error


def check_user_hooks(config: RunConfig) -> None:
    """Import the hooks of the configuration, and check them without building them.

    Raises:
        ConfigError: a target is not derived from ``toolkit.Hook``, does not accept its arguments, or has an
            event with another signature.
    """
    for given in (given for given in user_objects(config) if given.key.startswith("hooks.")):
        factory: Any = load_target(given)
        check_kind(given, factory, (Hook,))
        check_arguments(given, factory)
        if inspect.isclass(factory):
            _check_events(given, factory)


def _check_events(given: UserObject, hook: type) -> None:
    for name in EVENTS:
        method, expected = getattr(hook, name), inspect.signature(getattr(Hook, name))
        try:
            inspect.signature(method).bind(*expected.parameters)
        except TypeError as error:
            raise given.problem(
                f"its {name}{inspect.signature(method)} ({describe_source(method)}) does not fit: {error}",
                f"the toolkit calls {name}({', '.join([*expected.parameters][1:])})",
                f"write def {name}({', '.join(expected.parameters)})",
            ) from error


def build_user_hooks(
    context: RankContext, sink: Sink, end: EndRequest, step: Callable[[], int], enter: Callable[[str], None]
) -> dict[str, Hook]:
    """Build the hooks of ``hooks``, by name.

    Args:
        step: returns the number of completed steps.
        enter: as in :class:`UserHook`.

    Raises:
        ConfigError: a target cannot be imported, is not derived from ``toolkit.Hook``, or does not accept
            its arguments. Errors that its code raises pass with a note that names the line.
    """
    plan, rank = context.plan, context.rank
    hooks: dict[str, Hook] = {}
    for name, settings in plan.config.hooks.items():
        given = UserObject(f"hooks.{name}", settings["target"], settings.get("arguments") or {})
        ranks = hook_ranks(settings, context.ranks)
        hook: Hook | None = None
        if rank in ranks:
            hook = build_user_object(given, Hook)
            assert isinstance(hook, Hook)
            hook.context = HookContext(
                plan, rank, _metrics_logger(given.key, name, sink, step, ranks), _end_logger(given.key, end)
            )
        hooks[name] = UserHook(
            given, hook, rank=rank, enter=enter, first_rank=ranks[0], broadcast=broadcast_value
        )
    return hooks


def _metrics_logger(
    key: str, name: str, sink: Sink, step: Callable[[], int], ranks: tuple[int, ...]
) -> Callable[[Mapping[str, float]], None]:
    warned = False

    def log_metrics(metrics: Mapping[str, float]) -> None:
        nonlocal warned
        numbers = {metric: float(value) for metric, value in metrics.items()}
        sink.log(Kind.HOOK, {"step": step(), "hook": name, **numbers})
        if 0 not in ranks and not warned:
            warned = True
            log.warning(f"{key} logs metrics, but only rank 0 records them: write +{key}.ranks=first")

    return log_metrics


def _end_logger(key: str, end: EndRequest) -> Callable[[str], None]:
    def request_stop(reason: str) -> None:
        if end.reason is None:
            log.info(f"{key} ends the run after the next step: {reason}")
        end.request(f"{key}: {reason}")

    return request_stop
