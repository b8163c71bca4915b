"""``fairway.program``: traces Python that calls many jitted functions into one program.

Source: PATHWAYS §3 (Figure 2). The block is traced once: every call of a jitted function becomes a
node on that function's devices, every ``jax.device_put`` a transfer, and where a function takes an
array of other devices, a transfer is inserted. The program is compiled once and then dispatched
with one message, regardless of its number of nodes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from fairway import exchanges, mpmd
from fairway.errors import ProgramError
from fairway.propagation import propagate

__all__ = ["Compiled", "Lowered", "Wrapped", "program"]

ELEMENT_TYPES = {
    "bool": "i1",
    "bfloat16": "bf16",
    "complex64": "complex<f32>",
    "complex128": "complex<f64>",
}
"""MLIR's names of types, where they are not numpy's abbreviated."""
PROGRAMS_KEPT = 128
"""Compiled programs that one traced function caches, one per signature; the oldest is evicted."""


_struct: Any = jax.ShapeDtypeStruct
_partition: Any = PartitionSpec
_WHOLE = _partition()


def program(function: Callable[..., Any]) -> Wrapped:
    """Traces ``function`` into one program for each new signature of its arguments.

    Args:
        function: calls jitted functions (with shardings of their own, or on arrays that have one)
            and ``jax.device_put``; may take and return any pytrees of arrays. As under ``jax.jit``
            its Python runs only while it is traced.

    Returns:
        A callable with the same result that sends one message to the controller.

    Example:
        >>> @fairway.program
        ... def step(x):
        ...     return on_second_island(on_first_island(x))
    """
    return Wrapped(function)


class Wrapped:
    """A function that runs as one program."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._compiled: dict[Any, Compiled] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program asynchronously; the results may not be ready when this returns.

        Raises:
            ProgramError: the function cannot be traced into a program.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        key = (tree, tuple(_kind(leaf) for leaf in leaves))
        compiled = self._compiled.get(key)
        if compiled is None:
            if len(self._compiled) >= PROGRAMS_KEPT:
                self._compiled.pop(next(iter(self._compiled)))
            compiled = self._compiled[key] = self.lower(*args, **kwargs).compile()
        return compiled.run(leaves)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces the function with arguments of this signature, without compiling or running it.

        Raises:
            ProgramError: it cannot be traced into a program.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))

        def flat(*flat_leaves: Any) -> Any:
            given, named = jax.tree.unflatten(tree, flat_leaves)
            return self._function(*given, **named)

        avals = [_struct(np.shape(leaf), _dtype(leaf)) for leaf in leaves]
        jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(*avals)
        places = [leaf.sharding if _is_placed(leaf) else None for leaf in leaves]
        name = getattr(self._function, "__name__", "program")
        return _Builder(name, jaxpr, places).build(jax.tree.structure(shape))


def _dtype(leaf: Any) -> np.dtype[Any]:
    return np.dtype(jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(leaf)))


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.committed


def _kind(leaf: Any) -> Any:
    place = leaf.sharding if _is_placed(leaf) else None
    if isinstance(place, NamedSharding):  # trailing unsharded axes may be left out of the spec
        spec = list(place.spec)
        while spec and spec[-1] is None:
            spec.pop()
        place = place.mesh, tuple(spec), place.memory_kind
    return np.shape(leaf), _dtype(leaf), place


@dataclasses.dataclass(frozen=True)
class Value:
    """One array of a program: its type and sharding."""

    number: int
    aval: Any
    sharding: Any


class Lowered:
    """A traced program.

    Attributes:
        devices: the devices that the numbers in the text refer to.
        nodes: computations and transfers.
    """

    def __init__(self, builder: _Builder, text: str, results: list[Value], tree: Any) -> None:
        self.devices: list[Any] = builder.devices
        self.nodes = builder.nodes
        self._text = text
        self._builder = builder
        self._results = results
        self._tree = tree

    def as_text(self) -> str:
        """Returns the program as IFRT IR."""
        return self._text

    def compile(self) -> Compiled:
        """Compiles every function for its devices.

        Raises:
            ProgramError: the program's devices are not of Fairway's islands.
            jax.errors.JaxRuntimeError: a function cannot be compiled.
        """
        if getattr(self.devices[0], "island", None) is None:
            raise ProgramError(
                f"cannot compile the program {self._builder.name!r} for "
                f"{self.devices[0].platform!r} devices of this process; expected islands of "
                "Fairway; try `fairway run SCRIPT`"
            )
        library = mpmd.library()
        with mpmd.context() as context:
            module = mlir.ir.Module.parse(self._text, context)
            executable = library.compile_mpmd(
                self.devices[0].client,
                module,
                self.devices,
                [result.aval for result in self._results],
                [result.sharding for result in self._results],
                library.get_compile_options(module, {}),
            )
        return Compiled(executable, self._builder, self._tree)


class Compiled:
    """A program compiled for its devices."""

    def __init__(self, executable: Any, builder: _Builder, tree: Any) -> None:
        self._executable = executable
        self._inputs = builder.inputs
        self._constants = [
            jax.device_put(constant, value.sharding)
            for constant, value in zip(
                builder.constants, builder.inputs[: len(builder.constants)], strict=True
            )
        ]
        self._tree = tree

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs the program.

        Args:
            leaves: the flattened arguments, of the signature it was lowered for.

        Returns:
            The function's results.
        """
        placed = list(self._constants)
        for leaf, value in zip(leaves, self._inputs[len(placed) :], strict=True):
            if isinstance(leaf, jax.Array) and leaf.sharding == value.sharding:
                placed.append(leaf)
            else:
                placed.append(jax.device_put(np.asarray(leaf, value.aval.dtype), value.sharding))
        results = self._executable.execute(tuple(placed))
        return jax.tree.unflatten(self._tree, results)

    def as_text(self) -> str:
        """Returns the compiled program, as the controller has it."""
        return str(self._executable.get_hlo_text())


@dataclasses.dataclass
class _Call:
    """A function of the program, once for each signature."""

    name: str
    module: str
    inputs: list[Any]
    outputs: list[Any]
    donated: tuple[int, ...]


class _Builder:
    """Builds IFRT IR from the jaxpr of a function."""

    def __init__(self, name: str, jaxpr: Any, places: list[Any]) -> None:
        self.devices: list[Any] = []
        self.inputs: list[Value] = []
        self.constants: list[Any] = list(jaxpr.consts)
        self.nodes = 0
        self.name = name
        self._name = re.sub(r"\W", "_", name)
        self._jaxpr = jaxpr.jaxpr
        self._places = [_place_of(constant) for constant in jaxpr.consts] + places
        self._numbers: dict[Any, int] = {}
        self._values: dict[Any, Value] = {}
        self._unplaced: dict[Any, int] = {}
        self._count = 0
        self._lines: list[str] = []
        self._calls: dict[Any, _Call] = {}
        self._functions: dict[Any, _Call] = {}
        """By computation and devices, so that equal layers are compiled once."""
        self._moved: dict[tuple[int, Any], Value] = {}
        self._given: dict[int, str] = {}
        """Donated values, and the function that each was donated to."""
        self._free: dict[Any, tuple[Any, int]] = {}
        """Variables that depend on constants only: the operation, and the index of the result. They
        are computed wherever they are read."""
        self._loose: set[int] = set()
        """Values whose sharding was not requested, so that operations follow other arguments:
        results of a ``device_put`` without a target, as for gradients of transfers, and of calls
        on these."""

    def build(self, tree: Any) -> Lowered:
        variables = [*self._jaxpr.constvars, *self._jaxpr.invars]
        for index, (variable, place) in enumerate(zip(variables, self._places, strict=True)):
            if place is None:
                self._unplaced[variable] = index
            else:
                self._values[variable] = self._value(variable.aval, place)
        ordered: dict[int, Any] = dict(enumerate(variables))
        for equation in _needed(self._jaxpr):
            self._equation(equation)
        results = [self._result(variable) for variable in self._jaxpr.outvars]
        for variable in list(self._unplaced):  # not read by any operation
            self._place(variable, SingleDeviceSharding(self._default_device()))
        self.inputs = [self._values[ordered[index]] for index in range(len(variables))]
        return Lowered(self, self._text(results), results, tree)

    def _default_device(self) -> Any:
        return self.devices[0] if self.devices else jax.devices()[0]

    # Values

    def _value(self, aval: Any, sharding: Any) -> Value:
        _check_sharding(sharding)
        for device in _devices(sharding):
            if device not in self._numbers:
                self._numbers[device] = len(self.devices)
                self.devices.append(device)
        self._count += 1
        return Value(self._count - 1, aval, sharding)

    def _place(self, variable: Any, sharding: Any) -> Value:
        """Assigns a sharding to an argument that has none yet."""
        del self._unplaced[variable]
        value = self._values[variable] = self._value(variable.aval, sharding)
        return value

    def _read(self, atom: Any, sharding: Any) -> Value:
        """Returns the value of a variable, resharded to ``sharding`` if it has another one."""
        if atom in self._unplaced:
            return self._place(atom, sharding)
        if atom in self._free:
            equation, result = self._free[atom]
            self._call(equation, _whole(sharding))
            return self._move(self._values[equation.outvars[result]], sharding)
        return self._move(self._live(atom), sharding)

    def _live(self, variable: Any) -> Value:
        """Returns the value of a variable, unless it was donated."""
        value = self._values[variable]
        if value.number in self._given:
            raise ProgramError(
                f"an array is used after {self._given[value.number]} was given it to use up; leave "
                "it out of donate_argnums there, or use it before"
            )
        return value

    def _move(self, value: Value, sharding: Any) -> Value:
        if _same(value.sharding, sharding, value.aval.ndim):
            return value
        known = self._moved.get((value.number, sharding))
        if known is not None and known.number not in self._given:
            return known
        moved = self._value(value.aval, sharding)
        self._lines.append(
            f"%v{moved.number}, %c{self.nodes} = ifrt.Reshard(%v{value.number}) : "
            f"({self._type(value)}) -> {self._type(moved)}"
        )
        self.nodes += 1
        self._moved[value.number, sharding] = moved
        return moved

    def _result(self, variable: Any) -> Value:
        if isinstance(variable, core.Literal):
            raise ProgramError(
                "the program returns a constant; return what is computed, and keep constants in "
                "Python"
            )
        if variable in self._unplaced or variable in self._free:
            return self._read(variable, SingleDeviceSharding(self._default_device()))
        return self._live(variable)

    # Nodes

    def _equation(self, equation: Any) -> None:
        if equation.primitive.name == "device_put":
            self._device_put(equation)
        elif equation.primitive in exchanges.PRIMITIVES:
            self._exchange(equation)
        elif _holds_exchange(equation):
            self._inline(equation)
        elif equation.effects:
            raise ProgramError(
                f"{equation.primitive.name} has effects that cannot cross to other hosts: "
                f"{equation.effects}; leave it out of the program"
            )
        else:
            self._call(equation)

    def _device_put(self, equation: Any) -> None:
        targets = equation.params["devices"]
        for source, made, target in zip(equation.invars, equation.outvars, targets, strict=True):
            if isinstance(target, jax.Device):
                target = SingleDeviceSharding(target)
            if isinstance(source, core.Literal):
                self._put_literal(equation, made, target)
            elif target is None and source in self._free:
                self._free[made] = self._free[source]
            elif target is None:
                value = self._read(source, self._home(equation))
                self._loose.add(value.number)
                self._values[made] = value
            else:
                self._values[made] = self._read(source, target)

    def _put_literal(self, equation: Any, made: Any, target: Any) -> None:
        """Makes a literal at the target of its ``device_put``; without one, where it is read."""
        at = equation.outvars.index(made)
        semantics = equation.params["copy_semantics"][at : at + 1]
        nowhere = {"devices": (None,), "srcs": (None,), "copy_semantics": semantics}
        put = equation.replace(
            invars=equation.invars[at : at + 1],
            outvars=[made],
            params={**equation.params, **nowhere},
        )
        if target is None:
            self._call(put)
        else:
            self._call(put, _whole(target))
            self._values[made] = self._move(self._values[made], target)

    def _exchange(self, equation: Any) -> None:
        """Adds a node between devices of several meshes."""
        given, made = exchanges.shardings(equation)
        pairs = zip(equation.invars, given, strict=True)
        values = [self._read(atom, sharding) for atom, sharding in pairs]
        groups = exchanges.groups(equation)  # a node has them group by group
        inputs = [values[n] for at in range(groups) for n in range(at, len(values), groups)]
        text = exchanges.description(equation)
        kinds = [_tensor(atom.aval) for atom in (*inputs, *equation.outvars)]
        key = (text, tuple(kinds), tuple(given), tuple(made))
        if key not in self._calls:
            name = f"{equation.primitive.name}_{len(self._calls)}"
            module = _sparse_module(name, text, kinds[: len(inputs)], kinds[len(inputs) :])
            places = [value.sharding for value in inputs]
            self._calls[key] = _Call(name, module, places, made, ())
        self._emit(self._calls[key], inputs, equation)

    def _inline(self, equation: Any) -> None:
        """Adds the operations of a function with a custom gradient, one by one."""
        inner = equation.params["call_jaxpr"]
        names = dict(zip(inner.jaxpr.invars, equation.invars, strict=True))
        literal: Any = core.Literal
        for variable, constant in zip(inner.jaxpr.constvars, inner.consts, strict=True):
            names[variable] = literal(constant, variable.aval)

        def named(atom: Any) -> Any:
            return atom if isinstance(atom, core.Literal) else names.get(atom, atom)

        for operation in inner.jaxpr.eqns:
            self._equation(operation.replace(invars=[named(atom) for atom in operation.invars]))
        for outer, atom in zip(equation.outvars, inner.jaxpr.outvars, strict=True):
            self._values[outer] = self._live(named(atom))

    def _home(self, equation: Any) -> Any:
        """Returns a sharding over the devices of the arguments, if an operation names none."""
        atoms = (atom for atom in equation.invars if not isinstance(atom, core.Literal))
        known = [self._values[atom] for atom in atoms if atom in self._values]
        firm = [value for value in known if value.number not in self._loose]
        places = {_devices(value.sharding): value.sharding for value in firm or known[:1]}
        if len(places) > 1:
            names = " and ".join(str([device.id for device in place]) for place in places)
            raise ProgramError(
                f"{_title(equation)} takes arrays of devices {names} and says nothing of its own; "
                "give it in_shardings, or move its arguments with jax.device_put"
            )
        if not places:
            return SingleDeviceSharding(self._default_device())
        return next(iter(places.values()))

    def _call(self, equation: Any, home: Any = None) -> None:
        """Adds a node that runs a function.

        Args:
            equation: the function and its arguments.
            home: the devices, if all arguments are constants, which are computed where they are
                read.
        """
        arguments = [atom for atom in equation.invars if not isinstance(atom, core.Literal)]
        wanted = list(_wanted(equation))
        named = [sharding for sharding in wanted if sharding is not None]
        outputs = [_given(sharding) for sharding in equation.params.get("out_shardings", ())]
        outputs = outputs or [None] * len(equation.outvars)
        own = _home_of(equation, [*named, *(o for o in outputs if o is not None)])
        if own is None and home is None and all(atom in self._free for atom in arguments):
            pairs = enumerate(equation.outvars)
            self._free |= {variable: (equation, result) for result, variable in pairs}
            return
        is_loose = own is None and all(self._is_loose(atom) for atom in arguments)
        home = own or home or self._home(equation)
        inputs = []
        for atom, sharding in zip(arguments, wanted, strict=True):
            inputs.append(self._read(atom, sharding or self._stay(atom, home)))
        key = (
            _identity(equation),
            tuple((value.aval, value.sharding) for value in inputs),
            tuple(outputs),
            home if not inputs else None,
        )
        if key not in self._calls:
            shardings = [value.sharding for value in inputs]
            if len(_devices(home)) == 1 or not inputs:  # else the compiler decides
                outputs = [given or _whole(home) for given in outputs]
            self._calls[key] = self._function(equation, shardings, outputs)
        self._emit(self._calls[key], inputs, equation)
        if is_loose:
            self._loose |= {self._values[variable].number for variable in equation.outvars}

    def _is_loose(self, atom: Any) -> bool:
        value = self._values.get(atom)
        return atom in self._free or (value is not None and value.number in self._loose)

    def _stay(self, atom: Any, home: Any) -> Any:
        """Returns the sharding of an argument that has no named one: its own if possible."""
        value = self._values.get(atom)
        if value is not None and _devices(value.sharding) == _devices(home):
            return value.sharding
        if not isinstance(home, NamedSharding):
            return home
        if value is not None and isinstance(value.sharding, NamedSharding):
            sizes = dict(home.mesh.shape)
            if sizes == dict(value.sharding.mesh.shape):
                return NamedSharding(home.mesh, value.sharding.spec)
        return _whole(home)

    def _function(self, equation: Any, inputs: list[Any], outputs: list[Any]) -> _Call:
        arguments = [atom for atom in equation.invars if not isinstance(atom, core.Literal)]

        def run(*values: Any) -> list[Any]:
            left = iter(values)
            given = [
                atom.val if isinstance(atom, core.Literal) else next(left)
                for atom in equation.invars
            ]
            if "jaxpr" in equation.params and equation.primitive.name == "jit":
                return list(core.jaxpr_as_fun(equation.params["jaxpr"])(*given))
            made = equation.primitive.bind(*given, **equation.params)
            return list(made) if equation.primitive.multiple_results else [made]

        flags = equation.params.get("donated_invars", ())
        donated = tuple(index for index, flag in enumerate(flags) if flag)
        run.__name__ = re.sub(r"\W", "_", _title(equation))
        jitted = jax.jit(
            run,
            in_shardings=tuple(inputs),
            out_shardings=outputs if any(outputs) else None,
            donate_argnums=donated,
            keep_unused=True,
        )
        structs = [
            _struct(atom.aval.shape, atom.aval.dtype, sharding=sharding)
            for atom, sharding in zip(arguments, inputs, strict=True)
        ]
        lowered = jitted.lower(*structs)
        ir: Any = lowered.compiler_ir("stablehlo")
        computed = ir.operation.get_asm(use_local_scope=True)
        key = (computed, tuple(inputs), tuple(outputs), donated)
        if key in self._functions:
            return self._functions[key]
        if not all(outputs):
            named = [*inputs, *outputs, *_meshes(equation)]
            meshes: Any = {one.mesh: None for one in named if isinstance(one, NamedSharding)}
            outputs = propagate(ir, meshes) or list(lowered.compile().output_shardings)
        text = ir.operation.get_asm(use_local_scope=True)
        name = f"{run.__name__}_{len(self._calls)}"
        head, _, body = text.rstrip().removesuffix("}").partition("\n")
        given = head.partition(" attributes ")[2].removesuffix(" {")
        module = _private_module(name, body, given)
        made = self._functions[key] = _Call(name, module, inputs, outputs, donated)
        return made

    def _emit(self, call: _Call, inputs: list[Value], equation: Any) -> None:
        made = [
            self._value(variable.aval, sharding)
            for variable, sharding in zip(equation.outvars, call.outputs, strict=True)
        ]
        for variable, value in zip(equation.outvars, made, strict=True):
            self._values[variable] = value
        everywhere = {
            device: None
            for sharding in (*call.inputs, *call.outputs)
            for device in _devices(sharding)
        }
        devices = [self._numbers[device] for device in everywhere]
        self._given |= {inputs[index].number: _title(equation) for index in call.donated}
        results = ", ".join([*(f"%v{value.number}" for value in made), f"%c{self.nodes}"])
        donated = ", ".join(map(str, call.donated))
        give = f"donated_input_indices = array<i32: {donated}>, " if call.donated else ""
        kinds = ", ".join(self._type(value) for value in inputs)
        self._lines.append(
            f"{results} = ifrt.Call @{call.name}::@main"
            f"({', '.join(f'%v{value.number}' for value in inputs)}) on devices {devices} "
            f'{{{give}ifrt.mesh_name = "{"_".join(map(str, devices))}"}} : '
            f"({kinds}) -> ({', '.join(self._type(value) for value in made)})"
        )
        self.nodes += 1

    # Text

    def _type(self, value: Value) -> str:
        aval, sharding = value.aval, value.sharding
        numbers = [self._numbers[device] for device in _devices(sharding)]
        memory = f', memory_kind = "{sharding.memory_kind}"' if sharding.memory_kind else ""
        return (
            f"!ifrt.array<{_tensor(aval)}, "
            f"#ifrt.sharding_param<{_parameter(sharding, aval.ndim)}>, {numbers}{memory}>"
        )

    def _text(self, results: list[Value]) -> str:
        arguments = ", ".join(
            f"%v{value.number}: {self._type(value)}"
            + (" {ifrt.donated}" if value.number in self._given else "")
            for value in self.inputs
        )
        kinds = ", ".join(self._type(value) for value in results)
        returned = ", ".join(f"%v{value.number}" for value in results)
        body = "\n    ".join([*self._lines, f"return {returned} : {kinds}" if kinds else "return"])
        modules = "\n".join({call.name: call.module for call in self._calls.values()}.values())
        return (
            f"module @{self._name} {{\n  func.func public @main({arguments}) -> ({kinds}) "
            f"attributes {{ifrt.function}} {{\n    {body}\n  }}\n{modules}\n}}\n"
        )


def _needed(jaxpr: Any) -> list[Any]:
    """Returns operations with used results or effects (dead code elimination)."""
    used = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not used.isdisjoint(equation.outvars):
            kept.append(equation)
            used |= {atom for atom in equation.invars if not isinstance(atom, core.Literal)}
    return kept[::-1]


def _place_of(constant: Any) -> Any:
    return constant.sharding if _is_placed(constant) else None


def _given(sharding: Any) -> Any:
    """Returns a sharding that a jitted function names; None if it is unspecified."""
    return sharding if isinstance(sharding, jax.sharding.Sharding) else None


def _whole(home: Any) -> Any:
    """Returns the sharding that replicates an array on these devices, in their default memory."""
    if isinstance(home, NamedSharding):
        return NamedSharding(home.mesh, _WHOLE)
    return SingleDeviceSharding(*_devices(home)) if len(_devices(home)) == 1 else home


def _holds_exchange(equation: Any) -> bool:
    """Returns whether it is a function with a custom gradient that contains an exchange."""
    inner = equation.params.get("call_jaxpr")
    if equation.primitive.name != "custom_vjp_call" or inner is None:
        return False
    return any(
        one.primitive in exchanges.PRIMITIVES or _holds_exchange(one) for one in inner.jaxpr.eqns
    )


def _private_module(name: str, body: str, attributes: str = "") -> str:
    """Returns the text of a module with private visibility.

    It uses the generic form of operations, which every version of MLIR reads: newer versions reject
    the visibility among the attributes of a module in its custom form.
    """
    return (
        f'"builtin.module"() <{{sym_name = "{name}", sym_visibility = "private"}}> ({{\n'
        f"{body}\n}}) {attributes} : () -> ()"
    )


def _sparse_module(name: str, text: str, inputs: list[str], outputs: list[str]) -> str:
    """Returns a function that consists of one exchange, which hosts recognise."""
    arguments = ", ".join(f"%a{index}: {kind}" for index, kind in enumerate(inputs))
    given, made = ", ".join(inputs), ", ".join(outputs)
    operands = ", ".join(f"%a{index}" for index in range(len(inputs)))
    results = ", ".join(f"%r#{index}" for index in range(len(outputs)))
    return _private_module(
        name,
        f"func.func public @main({arguments}) -> ({made}) {{\n"
        f"%r:{len(outputs)} = stablehlo.custom_call @{mpmd.SPARSE_CALL}({operands}) "
        f'{{backend_config = "{text}"}} : ({given}) -> ({made})\n'
        f"return {results} : {made}\n}}",
    )


def _title(equation: Any) -> str:
    return str(equation.params.get("name", equation.primitive.name))


def _identity(equation: Any) -> Any:
    """Returns a key that is equal for two calls of the same function."""
    if "jaxpr" in equation.params and equation.primitive.name == "jit":
        flags = equation.params["donated_invars"]
        return id(equation.params["jaxpr"].jaxpr), flags, equation.params["name"]
    literals = [atom.val for atom in equation.invars if isinstance(atom, core.Literal)]
    return equation.primitive.name, str(equation.params), str(literals)


def _wanted(equation: Any) -> Iterator[Any]:
    """Yields the sharding that a function names for each argument; None where it is unspecified."""
    named = equation.params.get("in_shardings", ())
    inner = equation.params["jaxpr"].jaxpr if equation.primitive.name == "jit" else None
    for index, atom in enumerate(equation.invars):
        if isinstance(atom, core.Literal):
            continue
        sharding = _given(named[index]) if index < len(named) else None
        if sharding is None and inner is not None:
            sharding = _mapped(inner, index)
        yield sharding


def _mapped(jaxpr: Any, index: int) -> Any:
    """Returns the sharding of an argument that a function passes unchanged to a ``shard_map``."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map" and isinstance(equation.params["mesh"], Mesh):
            for atom, spec in zip(equation.invars, equation.params["in_specs"], strict=True):
                if atom is jaxpr.invars[index]:
                    return NamedSharding(equation.params["mesh"], spec)
    return None


def _home_of(equation: Any, named: list[Any]) -> Any:
    """Returns a sharding over the devices that a function names: in its shardings or its body."""
    if named:
        return named[0]
    return next(_meshes(equation), None)


def _meshes(equation: Any) -> Iterator[Any]:
    """Yields shardings over the meshes that appear in an operation."""
    if isinstance(mesh := equation.params.get("mesh"), Mesh):
        yield NamedSharding(mesh, _WHOLE)
    if isinstance(sharding := equation.params.get("sharding"), NamedSharding) and isinstance(
        sharding.mesh, Mesh
    ):
        yield sharding
    for inner in equation.params.values():
        jaxpr = getattr(inner, "jaxpr", inner)
        for nested in getattr(jaxpr, "eqns", ()):
            yield from _meshes(nested)


def _devices(sharding: Any) -> tuple[Any, ...]:
    return tuple(sharding._device_assignment)


def _same(one: Any, other: Any, rank: int) -> bool:
    return bool(
        _devices(one) == _devices(other)
        and one.memory_kind == other.memory_kind
        and one.is_equivalent_to(other, rank)
    )


def _check_sharding(sharding: Any) -> None:
    if not isinstance(sharding, (NamedSharding, SingleDeviceSharding)):
        raise ProgramError(
            f"an array of the program is sharded by {sharding}; expected a NamedSharding; give the "
            "function that makes it out_shardings"
        )


def _tensor(aval: Any) -> str:
    extents = "".join(f"{extent}x" for extent in aval.shape)
    return f"tensor<{extents}{_element(aval.dtype)}>"


def _element(dtype: np.dtype[Any]) -> str:
    name = str(dtype)
    if name in ELEMENT_TYPES:
        return ELEMENT_TYPES[name]
    kind, bits = re.fullmatch(r"([a-z]+)(\w+)", name).groups()  # type: ignore[union-attr]
    return {"int": "i", "uint": "ui", "float": "f"}[kind] + bits.upper().replace("_", "")


def _parameter(sharding: Any, rank: int) -> str:
    """Returns a sharding as IFRT's ``ShardingParam``: ``2x1 to [0,1] on 2x4``.

    Tiles along each axis of the array; the axes of the device grid, the one along which tiles vary
    fastest first; and their sizes, the one that varies fastest in the device list first.
    """
    if isinstance(sharding, SingleDeviceSharding):
        return f"{'x'.join(['1'] * rank)} to [0] on 1"
    sizes = dict(sharding.mesh.shape)
    names = list(reversed(sizes))
    spec = (*sharding.spec, *[None] * (rank - len(sharding.spec)))
    cuts = [
        () if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec
    ]
    used = [name for cut in cuts for name in cut]
    copies = [name for name in names if name not in used]
    order = [names.index(name) for name in [*copies, *reversed(used)]]
    tiles = "x".join(str(math.prod(sizes[name] for name in cut)) for cut in cuts)
    grid = "x".join(str(sizes[name]) for name in names)
    return f"{tiles} to {order} on {grid}"
