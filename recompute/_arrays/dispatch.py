"""Functions that array libraries hand over (NEP 13, NEP 18), among them those that change an array (see `writes`)."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import lru_cache, wraps
from inspect import signature
from sys import maxsize
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from recompute import extend
from recompute._adapters.arrays import Outline
from recompute._arrays.operate import SCALARS, Fresh, call, operate, same_library
from recompute._arrays.sharing import Memory, Path, check_writable, memory_of
from recompute._arrays.writes import (
    Version,
    adapter_for,
    become,
    change,
    copied,
    is_changeable,
    is_dense,
    is_plain,
    shares,
)
from recompute._recomputable import Recomputable

if TYPE_CHECKING:
    from recompute._arrays.array import RecomputableArray

MUTATORS: Final = {
    "copyto": "dst",
    "fill_diagonal": "a",
    "place": "arr",
    "put": "a",
    "put_along_axis": "arr",
    "putmask": "a",
}
"""Functions that change their first argument, and its name."""

MUTATING_METHODS: Final = frozenset({"fill", "itemset", "partition", "put", "resize", "setfield", "sort"})

ONE_ARRAY: Final = frozenset(
    "all any argmax argmin argsort astype clip conj conjugate copy cumprod cumsum diagonal dot flatten max mean min "
    "prod ravel repeat reshape round squeeze std sum swapaxes take trace transpose var".split()
)
"""Methods that return one array, whatever their arguments."""

ABOUT: Final[dict[str, Callable[..., Any]]] = {
    "shape": lambda a: a.shape,
    "ndim": lambda a: a.ndim,
    "iscomplexobj": lambda x: x.dtype.kind == "c",
    "isrealobj": lambda x: x.dtype.kind != "c",
    "size": lambda a: a.size,
}
"""Functions that need no content."""

WRITERS: Final = frozenset({"dump", "save", "savetxt", "savez", "savez_compressed", "tofile"})
"""Functions and methods that write to a file: they run once, on plain arrays."""

TO_PYTHON: Final = frozenset({"dumps", "item", "tobytes", "tolist"})
"""Methods that give objects of Python, which are not remembered."""

SHARING: Final = frozenset({"may_share_memory", "shares_memory"})
"""Functions that ask about memory: they get arrays as they are, not copies."""

FILLED: Final = {"empty": "zeros", "empty_like": "zeros_like"}
"""Functions whose results have any content, and those that do the same, but twice alike."""

OF_DTYPES: Final = frozenset({"result_type", "can_cast", "finfo", "iinfo", "isdtype"})
"""Functions that take a dtype instead of an array."""


def array_function(
    array: RecomputableArray, function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any],
    caller: FrameType,
) -> Any:  # fmt: skip
    """A function of an array library, called with `array` somewhere among its arguments."""
    name = getattr(function, "__name__", "")
    if name in ABOUT and len(args) == 1 and not keywords and type(args[0]) is type(array):
        return ABOUT[name](args[0])
    if name in OF_DTYPES:
        cls = type(array)
        return function(*[argument.dtype if isinstance(argument, cls) else argument for argument in args], **keywords)
    if name in SHARING:
        return _share(function, args, keywords)
    if name in WRITERS:
        return function(*_plain(args), **dict(zip(keywords, _plain(tuple(keywords.values())), strict=True)))
    if name in MUTATORS:
        return change_first(array, function, args, keywords, caller)
    if name == "trim_zeros" and args and type(args[0]) is type(array) and args[0].ndim:
        part = _kept_part(args[0], function, args[1:], keywords)
        return call(type(array), array.cache, operator.getitem, (args[0], part), {}, caller)
    if name in FILLED:
        function = getattr(array._adapter.namespace(), FILLED[name])
    keywords.pop("overwrite_input", None)
    if len(args) > 1:
        if name == "nan_to_num":
            keywords |= zip(("copy", "nan", "posinf", "neginf"), args[1:], strict=False)
            args = args[:1]
        else:
            args = _with_named_out(function, args, keywords)
    if name == "nan_to_num" and not keywords.get("copy", True):
        target = args[0] if args else keywords.pop("x")
        known = target.dtype if isinstance(target, type(array)) else None
        if known is None or is_changeable(target._type, known):
            change_first(array, function, (target,), keywords, caller)
            return target if len(target.shape) else target[()]
        args = (target,)
    out = keywords.get("out")
    if out is None:
        return call(type(array), array.cache, function, args, keywords, caller)
    return _into(array, out, function, args, keywords, caller)


def _kept_part(
    array: RecomputableArray, function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[slice, ...]:
    """Which part of an array `trim_zeros` returns: a view of that, wherever zeros are after a write."""
    xp, content = array._adapter.namespace(), array.get()
    numbers = xp.arange(1, content.size + 1).reshape(content.shape)  # instead of what is not zero
    found = function(xp.where(content != 0, numbers, 0), *args, **keywords)
    begin = [0] * found.ndim
    if found.size and found.any():
        within = [int(axis[0]) for axis in found.nonzero()]
        whole = xp.unravel_index(int(found[tuple(within)]) - 1, content.shape)
        begin = [int(one) - other for one, other in zip(whole, within, strict=True)]
    return tuple([slice(start, start + length) for start, length in zip(begin, found.shape, strict=True)])


def _share(function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Whether two arrays share memory. Wrapped ones that are copies to the program do not, whatever holds them."""
    wrapped = [argument for argument in args[:2] if isinstance(argument, Recomputable)]
    if len(wrapped) == 2 and wrapped[0] is not wrapped[1]:
        memory = memory_of(wrapped[0])
        if memory is None or memory is not memory_of(wrapped[1]):
            return False
    return function(
        *[Recomputable.get(argument) if isinstance(argument, Recomputable) else argument for argument in args],
        **keywords,
    )


def _plain(args: tuple[Any, ...]) -> list[Any]:
    return [argument.get() if isinstance(argument, Recomputable) else argument for argument in args]


def array_ufunc(
    array: RecomputableArray, ufunc: Any, method: str, args: tuple[Any, ...], keywords: dict[str, Any],
    caller: FrameType,
) -> Any:  # fmt: skip
    """A ufunc, or one of its methods, called with `array` somewhere among its arguments."""
    if method == "__call__" and not keywords and ufunc.nout == 1:  # mostly
        cache, cls = array.cache, type(array)
        values = []
        positional = []
        for argument in args:
            if type(argument) is cls and argument.cache is cache:
                values.append(argument._node)
                positional.append(argument._node)
            elif type(argument) in SCALARS:
                positional.append(argument)
            else:
                break
        else:
            if same_library(values):
                return operate(cls, cache, ufunc, tuple(positional), tuple(values), caller)
    function = ufunc if method == "__call__" else getattr(ufunc, method)
    if method == "at":
        return change_first(array, function, args, keywords, caller)
    if keywords.get("out") is None:
        return call(type(array), array.cache, function, args, keywords, caller)
    out = keywords["out"]
    return _into(array, out[0] if len(out) == 1 else out, function, args, keywords, caller)


def _with_named_out(function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments before `out`, if that is among them; it and those after it are `keywords` then."""
    place, names = _place_of_out(function)
    if place >= len(args) or len(names) < len(args) or args[place] is None:
        return args
    keywords |= zip(names[place:], args[place:], strict=False)
    return args[:place]


@lru_cache(1024)
def _place_of_out(function: Callable[..., Any]) -> tuple[int, list[str]]:
    """Where `out` stands among the parameters of a function, and their names; far away, if nowhere."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):  # made in another language; Cython's, such as CuPy's, are documented
        described = re.match(r"[\w.]+\(([^()]*)\)", getattr(function, "__doc__", None) or "")
        parts = filter(None, described[1].split(", ")) if described else ()
        names = [part.partition("=")[0].split()[-1] for part in parts]
    else:
        names = [
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    return names.index("out") if "out" in names else maxsize, names


def _into(
    array: RecomputableArray, out: Any, function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any],
    caller: FrameType,
) -> Any:  # fmt: skip
    """With `out=`: wrapped ones then refer to the result, plain ones are filled."""
    cls = type(array)
    several = isinstance(out, tuple)
    targets = out if several else (out,)
    seen = "where" in keywords  # the old content stays where it is not written to
    if len({id(target) for target in targets if target is not None}) < sum(target is not None for target in targets):
        raise ValueError("out has the same array twice")
    versions: dict[Memory, Version] = {}  # of a memory of which one target or more are views
    rooms: list[Any] = []
    ways: list[_Way | None] = []
    for target in targets:
        memory = None
        if isinstance(target, cls):
            extend.common_engine(array._engine, target)
            memory = shares(target)
            check_writable(target)
        if memory is None:
            room, way = _room(target, cls, seen=seen)
        else:
            version = versions[memory] = versions.get(memory) or Version(memory)
            path, inputs = version.path_to(target)
            room, way = (version.root, *inputs), _Way(path)
        rooms.append(room)
        ways.append(way)
    keywords = {**keywords, "out": tuple(rooms)}
    if getattr(function, "__name__", "") == "choose":
        function = _choosing(function)
    result = call(cls, array.cache, _Filling(function, several, ways), args, keywords, caller)
    returned = out
    if type(result) is list:
        result, returned = result
    for target, output in zip(targets, result if several else (result,), strict=True):
        memory = memory_of(target) if isinstance(target, cls) else None
        if memory is not None and memory in versions:
            versions[memory].arrive(output, caller)
        elif isinstance(target, cls):
            become(target, output)
        elif target is not None:
            target[...] = output.get()
    if several:
        return tuple([new if old is None else old for old, new in zip(targets, result, strict=True)])
    return returned


@lru_cache
def _choosing(choose: Callable[..., Any]) -> Callable[..., Any]:
    """`choose` with an `out` of any layout.

    NumPy's own writes to it as if its elements lay side by side, beyond its end too, unless an index may be an error.
    """

    @wraps(choose)
    def chosen(*args: Any, out: Any, **keywords: Any) -> Any:
        if keywords.get("mode", "raise") == "raise":
            return choose(*args, out=out, **keywords)
        result = choose(*args, **keywords)
        if result.shape != out.shape:
            raise TypeError("choose: invalid shape for output array.")
        out[...] = result
        return out

    return chosen


class _Way:
    """An `out` whose old content matters: a copy of that, or what the path leads to in a copy."""

    __slots__ = ("path",)

    def __init__(self, path: Path | None) -> None:
        self.path = path


def _room(target: Any, cls: type[RecomputableArray], *, seen: bool) -> tuple[Any, _Way | None]:
    """What stands for an `out` on memory of its own, and whether that is to be copied."""
    if target is None:
        return None, None
    known = target._outline() if isinstance(target, cls) else target
    adapter = adapter_for(known.cls if isinstance(known, Outline) else type(known))
    outline = known if isinstance(known, Outline) else adapter.outline(known)
    if seen or not is_plain(outline.cls, outline.dtype) or not is_dense(outline):
        return (target,), _Way(None)
    return Fresh(lambda: adapter.empty(outline)), None


class _Filling:
    """The function, writing into `out` or into copies of it; a list, if it then returns something else."""

    __slots__ = ("args", "func", "keywords", "several", "ways")

    def __init__(self, function: Callable[..., Any], several: bool, ways: list[_Way | None]) -> None:
        self.func = function
        self.args: tuple[Any, ...] = ()
        self.keywords: dict[str, Any] = {}
        self.several = several
        self.ways = ways

    def __call__(self, *args: Any, out: tuple[Any, ...], **keywords: Any) -> Any:
        roots: list[Any] = []  # what is returned instead of each `out`
        rooms: list[Any] = []
        copies: dict[int, Any] = {}  # several may be views of one root
        for given, way in zip(out, self.ways, strict=True):
            root = room = given
            if way is not None:
                old, *inputs = given
                root = room = copies[id(old)] = copies[id(old)] if id(old) in copies else copied(old)
                if way.path is not None:
                    room = way.path(root, *inputs)
            roots.append(root)
            rooms.append(room)
        if self.several:
            result = self.func(*args, out=tuple(rooms), **keywords)
            return tuple([new if root is None else root for root, new in zip(roots, result, strict=True)])
        result = self.func(*args, out=rooms[0], **keywords)
        return roots[0] if result is rooms[0] else [roots[0], result]


def change_first(
    array: RecomputableArray, function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any],
    caller: FrameType,
) -> None:  # fmt: skip
    if not args:
        args = (keywords.pop(MUTATORS[function.__name__]),)
    target = args[0]
    if not isinstance(target, type(array)):
        plain = [argument.get() if isinstance(argument, type(array)) else argument for argument in args[1:]]
        function(target, *plain, **{k: v.get() if isinstance(v, type(array)) else v for k, v in keywords.items()})
        return
    change(target, function, args[1:], keywords, caller, returns=False)
