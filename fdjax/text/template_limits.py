"""A Jinja environment that limits the memory and time of a template.

Each value that a template makes has a limited size. The size counts characters and items, also
those of nested values, as often as they appear. A value that would be too large is refused before
it is made. Loops, calls, filters and operators count as steps, and each step checks the time.
"""

import contextlib
import contextvars
import functools
import json
import math
import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any

from jinja2 import nodes
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Namespace
from jinja2.visitor import NodeTransformer

# Limits of a template without input. More input raises some of them, see `limited`.
MAX_SIZE = 2**24
_MAX_WORK = 2**28
_MAX_STEPS = 1_000_000
_MAX_SECONDS = 10.0
# Size of an item or a number, in characters.
_ITEM_SIZE = 16
_MAX_INT_BITS = 2**16
_MAX_COUNT = 100_000
# Limit for the input of filters and methods whose time grows faster than their input.
_MAX_SLOW_SIZE = 2**16
_SLOW_FILTERS = frozenset({"int", "pprint", "striptags", "urlize", "wordwrap", "xmlattr"})


class TemplateLimitError(Exception):
    """A template exceeded a limit. The message names the limit."""


class _Budget:
    """The steps, work and time that a template has left."""

    def __init__(self, inputs: Any):
        # Sizes of the input by id. Input never changes, so its values are counted only once.
        self.known: dict[int, int] = {}
        input_size = _input_size(inputs, self.known)
        self.max_size = MAX_SIZE + 8 * input_size
        self._work = _MAX_WORK + 256 * input_size
        self._max_steps = self._steps = _MAX_STEPS + input_size
        self._end = time.monotonic() + _MAX_SECONDS

    def step(self, work: int = 0) -> None:
        self._steps -= 1
        self._work -= work
        if self._steps < 0:
            raise TemplateLimitError(f"it takes more than {self._max_steps:,} steps")
        if time.monotonic() > self._end:
            raise TemplateLimitError(f"it takes longer than {_MAX_SECONDS:.0f} s")
        if self._work < 0:
            raise TemplateLimitError("it makes too many long texts or lists")

    def check(self, size: float) -> None:
        if size > self.max_size:
            raise TemplateLimitError(
                f"it makes a text or list of more than {self.max_size:,} characters, "
                f"where an item counts as {_ITEM_SIZE}"
            )

    def spend(self, value: Any) -> Any:
        _size(value, self)
        # Nested values were counted when they were made.
        self.step(len(value) if isinstance(value, str | bytes) else _ITEM_SIZE * _length(value))
        return value


_budget: contextvars.ContextVar[_Budget] = contextvars.ContextVar("template_budget")


@contextlib.contextmanager
def limited(inputs: Any) -> Iterator[None]:
    """Give all templates that are compiled and rendered inside this block one common budget.

    Args:
      inputs: JSON values that the template gets. Each character raises the limits: the size of a
        value by 8, the work by 256, the steps by 1.
    """
    token = _budget.set(_Budget(inputs))
    try:
        yield
    finally:
        _budget.reset(token)


def _input_size(value: Any, known: dict[int, int]) -> int:
    """The size of a JSON value. The sizes of its lists and dicts are stored in `known`, by id."""
    if isinstance(value, str):
        return _ITEM_SIZE + len(value)
    if not isinstance(value, list | dict):
        return _ITEM_SIZE
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    known[id(value)] = size = _ITEM_SIZE + sum(_input_size(one, known) for one in inner)
    return size


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple | dict) else 1


def _size(value: Any, budget: _Budget) -> int:
    """The size of a value with its items, in characters.

    Raises:
      TemplateLimitError: it is larger than the budget allows.
    """
    size, rest = 0, [value]
    while rest:
        value = rest.pop()
        if id(value) in budget.known:
            size += budget.known[id(value)]
            continue
        size += _ITEM_SIZE
        match value:
            case str() | bytes():
                size += len(value)
                inner: Iterable[Any] = ()
            case dict():
                inner = (*value.keys(), *value.values())
            case list() | tuple() | KeysView() | ValuesView() | ItemsView():
                inner = value
            case Namespace():
                inner = object.__getattribute__(value, "_Namespace__attrs").values()
            case Cycler():
                inner = value.items
            case _:
                continue
        budget.check(size + _ITEM_SIZE * len(inner))
        rest.extend(inner)
    budget.check(size)
    return size


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that runs templates within the budget of `limited`."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, **options: Any):
        super().__init__(**options, finalize=lambda value: _budget.get().spend(value))
        self.filters = {name: _limited_filter(name, f) for name, f in DEFAULT_FILTERS.items()}
        self.filters["tojson"] = _limited_filter("tojson", _to_json)
        self.tests = {name: _limited_test(test) for name, test in DEFAULT_TESTS.items()}
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _AddChecks().visit(super()._parse(source, name, filename))

    def step(self) -> str:
        """Count one pass of a loop."""
        _budget.get().step()
        return ""

    def made(self, value: Any) -> Any:
        """Count a list, dict or tuple that the template builds, and return it."""
        return _budget.get().spend(value)

    def join_texts(self, values: list[Any]) -> str:
        """The operator `~`: join the texts of values."""
        return self.concat(str(_budget.get().spend(value)) for value in values)

    def concat(self, parts: Iterable[str]) -> str:
        """Join pieces of output."""
        budget, size, kept = _budget.get(), 0, []
        for part in parts:
            size += len(part)
            budget.check(size)
            kept.append(part)
        budget.step(size)
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, unless the result would be too large."""
        budget = _budget.get()
        budget.check(_operator_size(operator, left, right, budget))
        return budget.spend(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Limit Jinja's replacement of `str.format`; None if `value` is not this method."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        @functools.wraps(formatted)
        def limited_format(*args: Any, **kwargs: Any) -> str:
            budget = _budget.get()
            budget.check(_format_size(value.__self__, [*args, *kwargs.values()], budget))
            return formatted(*args, **kwargs)

        return limited_format

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, unless it is a method of a text with a result that is too large."""
        subject = getattr(function, "__self__", None)
        if subject is self:
            return function(*args)
        budget = _budget.get()
        if isinstance(subject, str | bytes):
            name = getattr(function, "__name__", "")
            if name == "join":
                args = tuple(map(_listed, args))
            budget.check(_text_size(name, subject, args, kwargs, budget))
        elif isinstance(subject, int):
            _check_counts(args, kwargs)
        return budget.spend(super().call(context, function, *args, **kwargs))


class _AddChecks(NodeTransformer):
    """Adds checks to a template: loops count their passes, `~` and literals their sizes."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step")).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _call("join_texts", nodes.List(node.nodes)).set_lineno(node.lineno)

    def visit_Literal(self, node: Any) -> nodes.Expr:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or not list(node.find_all(nodes.Name)):
            return node
        return _call("made", node).set_lineno(node.lineno)

    visit_List = visit_Dict = visit_Tuple = visit_Literal


def _call(name: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    place = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def limited_filter(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        before, subject, rest = args[:place], args[place], args[place + 1 :]
        if name in ("join", "sum"):
            subject = _listed(subject)
            budget.spend(subject)
        if name in _SLOW_FILTERS and _size((subject, rest), budget) > _MAX_SLOW_SIZE:
            raise TemplateLimitError(
                f"its filter {name!r} gets more than {_MAX_SLOW_SIZE:,} characters"
            )
        if name in ("batch", "slice", "round", "truncate"):
            _check_counts(rest, kwargs, 300 if name == "round" else _MAX_COUNT)
        budget.check(_filter_size(name, subject, rest, kwargs, budget))
        return budget.spend(function(*before, subject, *rest, **kwargs))

    return limited_filter


def _limited_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def limited_test(*args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        return function(*args, **kwargs)

    return limited_test


def _operator_size(operator: str, left: Any, right: Any, budget: _Budget) -> float:
    """An upper bound for the size of an operator's result."""
    if isinstance(left, int) and isinstance(right, int):
        bits, factor = left.bit_length(), right.bit_length()
        needed = {"*": bits + factor, "**": bits * abs(right)}.get(operator, 0)
        if needed > _MAX_INT_BITS:
            raise TemplateLimitError(f"it makes a number of more than {_MAX_INT_BITS:,} bits")
        return 0
    if operator == "*":
        times, what = (left, right) if isinstance(left, int) else (right, left)
        if not isinstance(times, int):
            return 0
        return (len(what) if isinstance(what, str | bytes) else _size(what, budget)) * times
    if operator == "%" and isinstance(left, str | bytes):
        return _format_size(left, right, budget)
    return _size((left, right), budget)


def _filter_size(name: str, subject: Any, args: Any, kwargs: Any, budget: _Budget) -> float:
    """An upper bound for the size of a filter's result; 0 if it cannot exceed the input's size."""
    match name:
        case "indent":
            text = str(subject)
            most = _largest([*args, *kwargs.values(), 4])
            return len(text) + (len(text.splitlines()) + 1) * most
        case "wordwrap":
            return (len(str(subject)) + 1) * (1 + _largest(["", *_texts(args, kwargs)]))
        case "center" | "replace" | "join" | "format" | "trim":
            if name == "join":
                args, subject = (subject,), args[0] if args else kwargs.get("d", "")
            return _text_size(name, str(subject), args, kwargs, budget)
    return 0


def _text_size(name: str, text: Any, args: Any, kwargs: Any, budget: _Budget) -> float:
    """An upper bound for the size of the result of a text's method."""
    given = [*args, *kwargs.values()]
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            return len(text) + _largest([*given, 80])
        case "expandtabs":
            return len(text) * (1 + _largest([*given, 8]))
        case "replace" if len(given) > 1:
            old, new = str(given[0]), str(given[1])
            return len(text) + str(text).count(old) * len(new)
        case "translate":
            return len(text) * _size(given, budget)
        case "join":
            return len(text) * len(given[0]) + _size(given[0], budget) if given else 0
        case "format" | "format_map":
            return _format_size(text, given, budget)
        case "strip" | "lstrip" | "rstrip" | "trim" if _largest(["", *given]) > _MAX_SLOW_SIZE:
            raise TemplateLimitError(f"it strips more than {_MAX_SLOW_SIZE:,} characters")
    return len(text)


def _format_size(form: str | bytes, values: Any, budget: _Budget) -> float:
    """An upper bound for the size of `form % values` and of `form.format(values)`."""
    form = form if isinstance(form, str) else form.decode("latin-1")
    fields = form.count("%") + form.count("{")
    widths = sum(float(digits) for digits in re.findall(r"\d+", form))
    starred = values if isinstance(values, tuple | list) else [values]
    if "*" in form or re.search(r"\{[^}]*\{", form):
        widths += fields * _largest([*starred, 0])
    return len(form) + widths + fields * _size(values, budget)


def _largest(values: Iterable[Any]) -> float:
    """The largest number or length of a text among the values."""
    return max(
        (
            abs(v) if isinstance(v, int) else len(v)
            for v in values
            if isinstance(v, int | str | bytes)
        ),
        default=0,
    )


def _texts(args: Any, kwargs: Any) -> list[str]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, str)]


def _check_counts(args: Any, kwargs: Any, most: float = _MAX_COUNT) -> None:
    numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, int | float)]
    if any(abs(v) > most or math.isnan(v) for v in numbers):
        raise TemplateLimitError(f"it asks for more than {most:,} of something")


def _listed(values: Any) -> Any:
    """The items of an iterator as a list. They were counted when they were made."""
    return list(values) if isinstance(values, Iterator) else values


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Unlike Jinja's own filter, this one does not escape characters for HTML.
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None and separators is None:
        return encoder.encode(value)
    budget, size, parts = _budget.get(), 0, []
    _check_counts([indent], {})
    for part in encoder.iterencode(value):
        size += len(part)
        budget.check(size)
        parts.append(part)
    return "".join(parts)
