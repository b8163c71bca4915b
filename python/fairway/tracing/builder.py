"""Builds the IFRT IR of a program from the jaxpr of a function."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding, SingleDeviceSharding

from fairway import primitives
from fairway.errors import ProgramError
from fairway.propagation import propagate
from fairway.tracing.shardings import (
    check_sharding,
    devices_of,
    is_placed,
    is_same,
    meshes,
    named_home,
    named_inputs,
    named_sharding,
    replicated,
)
from fairway.tracing.text import exchange_module, private_module, sharding_parameter, tensor_type

_struct: Any = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Value:
    """One array of a program: its type and sharding."""

    number: int
    aval: Any
    sharding: Any


@dataclasses.dataclass
class Callee:
    """A function of the program, once for each signature."""

    name: str
    module: str
    inputs: list[Any]
    outputs: list[Any]
    donated: tuple[int, ...]


class Builder:
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
        self._calls: dict[Any, Callee] = {}
        self._functions: dict[Any, Callee] = {}
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

    def build(self) -> tuple[str, list[Value]]:
        """Returns the program's IFRT IR and its results."""
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
        return self._text(results), results

    def _default_device(self) -> Any:
        return self.devices[0] if self.devices else jax.devices()[0]

    # Values

    def _value(self, aval: Any, sharding: Any) -> Value:
        check_sharding(sharding)
        for device in devices_of(sharding):
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
            self._call(equation, replicated(sharding))
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
        if is_same(value.sharding, sharding, value.aval.ndim):
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
        elif equation.primitive in primitives.PRIMITIVES:
            self._exchange(equation)
        elif holds_exchange(equation):
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
            self._call(put, replicated(target))
            self._values[made] = self._move(self._values[made], target)

    def _exchange(self, equation: Any) -> None:
        """Adds a node between devices of several meshes."""
        given, made = primitives.shardings(equation)
        pairs = zip(equation.invars, given, strict=True)
        values = [self._read(atom, sharding) for atom, sharding in pairs]
        groups = primitives.groups(equation)  # a node has them group by group
        inputs = [values[n] for at in range(groups) for n in range(at, len(values), groups)]
        text = primitives.description(equation)
        kinds = [tensor_type(atom.aval) for atom in (*inputs, *equation.outvars)]
        key = (text, tuple(kinds), tuple(given), tuple(made))
        if key not in self._calls:
            name = f"{equation.primitive.name}_{len(self._calls)}"
            module = exchange_module(name, text, kinds[: len(inputs)], kinds[len(inputs) :])
            places = [value.sharding for value in inputs]
            self._calls[key] = Callee(name, module, places, made, ())
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
        places = {devices_of(value.sharding): value.sharding for value in firm or known[:1]}
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
        wanted = list(named_inputs(equation))
        named = [sharding for sharding in wanted if sharding is not None]
        outputs = [
            named_sharding(sharding) for sharding in equation.params.get("out_shardings", ())
        ]
        outputs = outputs or [None] * len(equation.outvars)
        own = named_home(equation, [*named, *(o for o in outputs if o is not None)])
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
            if len(devices_of(home)) == 1 or not inputs:  # else the compiler decides
                outputs = [given or replicated(home) for given in outputs]
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
        if value is not None and devices_of(value.sharding) == devices_of(home):
            return value.sharding
        if not isinstance(home, NamedSharding):
            return home
        if value is not None and isinstance(value.sharding, NamedSharding):
            sizes = dict(home.mesh.shape)
            if sizes == dict(value.sharding.mesh.shape):
                return NamedSharding(home.mesh, value.sharding.spec)
        return replicated(home)

    def _function(self, equation: Any, inputs: list[Any], outputs: list[Any]) -> Callee:
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
            named = [*inputs, *outputs, *meshes(equation)]
            known_meshes: Any = {one.mesh: None for one in named if isinstance(one, NamedSharding)}
            outputs = propagate(ir, known_meshes) or list(lowered.compile().output_shardings)
        text = ir.operation.get_asm(use_local_scope=True)
        name = f"{run.__name__}_{len(self._calls)}"
        head, _, body = text.rstrip().removesuffix("}").partition("\n")
        given = head.partition(" attributes ")[2].removesuffix(" {")
        module = private_module(name, body, given)
        made = self._functions[key] = Callee(name, module, inputs, outputs, donated)
        return made

    def _emit(self, call: Callee, inputs: list[Value], equation: Any) -> None:
        made = [
            self._value(variable.aval, sharding)
            for variable, sharding in zip(equation.outvars, call.outputs, strict=True)
        ]
        for variable, value in zip(equation.outvars, made, strict=True):
            self._values[variable] = value
        everywhere = {
            device: None
            for sharding in (*call.inputs, *call.outputs)
            for device in devices_of(sharding)
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
        numbers = [self._numbers[device] for device in devices_of(sharding)]
        memory = f', memory_kind = "{sharding.memory_kind}"' if sharding.memory_kind else ""
        return (
            f"!ifrt.array<{tensor_type(aval)}, "
            f"#ifrt.sharding_param<{sharding_parameter(sharding, aval.ndim)}>, {numbers}{memory}>"
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
    return constant.sharding if is_placed(constant) else None


def holds_exchange(equation: Any) -> bool:
    """Returns whether it is a function with a custom gradient that contains an exchange."""
    inner = equation.params.get("call_jaxpr")
    if equation.primitive.name != "custom_vjp_call" or inner is None:
        return False
    return any(
        one.primitive in primitives.PRIMITIVES or holds_exchange(one) for one in inner.jaxpr.eqns
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
