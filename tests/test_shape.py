"""The check of the code's shape, on code that breaks each of its rules."""

from __future__ import annotations

import textwrap

import check_layers
import check_shape
import python_shape
import rust_shape
from shape import Edge, Function, circles


def dedented(text: str) -> str:
    return textwrap.dedent(text).lstrip()


def test_circles_are_found_and_chains_are_not():
    chain = {Edge("a", "b"), Edge("b", "c"), Edge("d", "c")}
    assert circles(chain) == []
    assert circles(chain | {Edge("c", "a")}) == [["a", "b", "c"]]


def test_imports_inside_functions_and_for_types_count():
    files = {
        "python/top/__init__.py": "from top.one import f\n",
        "python/top/one.py": "def f():\n    import top.two\n",
        "python/top/two.py": (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from top import one, other\n"
        ),
    }
    assert python_shape.imports(files, "python") == {
        Edge("top", "top.one"),
        Edge("top.one", "top.two"),
        Edge("top.two", "top.one"),
        Edge("top.two", "top"),
    }


def test_uses_count_for_the_module_that_defines_a_name():
    files = {
        "crates/one/src/lib.rs": "mod a;\nmod b;\npub use a::{Left, inner::Deep as Renamed};\n",
        "crates/one/src/a/mod.rs": "pub mod inner;\nuse crate::b::{self, Right};\n",
        "crates/one/src/a/inner.rs": "use super::super::b;\n// use crate::Left;\n",
        "crates/one/src/b.rs": dedented("""
            use crate::Renamed;
            fn f() -> &'static str { crate::Left::name("crate::a::inner") }
            #[cfg(test)]
            mod tests { use crate::a::inner; }
        """),
    }
    a, b, inner = (f"crates/one/src/{name}.rs" for name in ("a/mod", "b", "a/inner"))
    assert rust_shape.uses(files) == {Edge(a, b), Edge(inner, b), Edge(b, inner), Edge(b, a)}


def test_exports_of_children_are_no_circle():
    files = {
        "crates/one/src/lib.rs": "mod child;\npub use child::Child;\npub struct Parent;\n",
        "crates/one/src/child.rs": "use super::Parent;\npub struct Child(Parent);\n",
    }
    assert circles(rust_shape.uses(files)) == []


def test_python_functions_are_measured_without_docstring_and_receiver():
    text = dedented('''
        class Public:
            @decorated
            def method(self, a, *, b=1):
                """One.

                Two.
                """
                def inner(c): ...
                return a

            def _hidden(self): ...
    ''')
    found = {f.name: f for f in python_shape.functions("pkg/file.py", text)}
    assert found["pkg/file.py::Public.method"] == Function("pkg/file.py::Public.method", 3, 2, True)
    assert not found["pkg/file.py::Public._hidden"].is_public
    assert not found["pkg/file.py::Public.method.inner"].is_public
    hidden = python_shape.functions("pkg/_file.py", text)
    assert not any(f.is_public for f in hidden)


def test_rust_functions_are_measured_between_their_braces():
    text = dedented("""
        impl<T: Fn(u8) -> u8> Trait<T> for Owner<T> {
            pub fn made<F: Fn(u8, u8) -> u8>(&self, map: HashMap<u8, (u8, u8)>, f: F) -> Self {
                let text = "}";

                Self // }
            }
            fn declared(&mut self);
        }
        pub(crate) fn alone() {}
    """)
    found = list(rust_shape.functions("crates/one/src/lib.rs", text))
    assert found == [
        Function("crates/one/src/lib.rs::Owner.made", 3, 2, True),
        Function("crates/one/src/lib.rs::alone", -1, 0, False),
    ]
    assert all(f.is_public for f in rust_shape.functions("crates/py/src/lib.rs", text))


def test_limits_hold():
    found = {"short": 5, "as long": 10, "long": 12}
    assert check_shape.limit_errors("lines", found, 10) == [
        "long has 12 lines; expected at most 10"
    ]


def test_circles_are_errors():
    edges = [Edge("a", "b"), Edge("b", "a"), Edge("b", "c")]
    assert check_shape.circle_errors("modules", edges) == ["modules import each other: a, b"]


def test_public_functions_with_many_parameters_are_found():
    many = [Function("public", 60, 7, True), Function("private", 61, 7, False)]
    assert check_shape.function_errors(many) == [
        "private has 61 lines in a function; expected at most 60",
        "public has 7 parameters; expected at most 6",
    ]


def test_the_code_keeps_the_rules():
    assert check_shape.main() == 0


def test_studies_are_open_to_the_command_line_only():
    used = {"fairway.studies.workloads", "fairway.errors"}
    assert check_layers.closed_errors("fairway.cli.planning", used) == []
    assert check_layers.closed_errors("fairway.studies.reproduce", used) == []
    errors = check_layers.closed_errors("fairway.cluster.supervisor", used)
    assert [error.split(";")[0] for error in errors] == [
        "fairway.cluster.supervisor may not import fairway.studies.workloads"
    ]
