"""Which parts of a host our modules use, and which of these the installed host lacks: both are read from source.

Nothing is imported, which may take seconds, change the process, or fail for a reason of its own. Uses are:

* every import from a host;
* attributes and calls, with their arguments, of what was imported, or of what is annotated with a host's class (under
  `TYPE_CHECKING` where that must not be imported);
* in a subclass of a host's class, and in a mixin that precedes one: attributes of `self` that are not ours; public names that
  are annotated without a value; the parameters of methods that call `super()`'s of their name or are marked `@override`;
* the parameters of a function of ours that is assigned to a host's attribute.

Nothing below `if hasattr(...)` is required, and nothing that `getattr` reads. What an expression stands for is known from
imports, base classes and annotations only: a use of anything else is not seen.
"""

import ast
import importlib.util
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HOSTS = ("verl", "vllm", "megatron", "transfer_queue")
OURS = "oar_plugin"
SUPER = "super()"  # the owner of a class that is looked up in its bases


class Feature(NamedTuple):
    """Modules of ours (names below `oar_plugin`) that are used together.

    If they have mixins: the mixins' names, and the host's class that they precede.
    """

    modules: tuple[str, ...]
    host: str = ""
    mixins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Thing:
    """A module, or a statement of one: a class, a function, an assignment. A class also represents its instances."""

    module: str
    node: ast.AST | None = None  # None: the module itself
    owner: str = ""  # name of the class that has it

    @property
    def name(self) -> str:
        bound = _bound(self.node) if self.node else []
        name = bound[0] if bound else getattr(self.node, "attr", "")
        return f"{self.owner}.{name}" if self.owner not in ("", SUPER) else name

    @property
    def of_host(self) -> bool:
        return _package(self.module) in HOSTS

    @property
    def signature(self) -> inspect.Signature | None:
        """None for what is not called. Methods come without their first parameter."""
        if not isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_marked(self.node, "property"):
            return None
        kind, arguments = inspect.Parameter, self.node.args
        by_place = [*arguments.posonlyargs, *arguments.args]
        required = len(by_place) - len(arguments.defaults)
        parameters = [
            kind(one.arg, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if place < required else None)
            for place, one in enumerate(by_place)
        ]
        if arguments.vararg:
            parameters.append(kind(arguments.vararg.arg, kind.VAR_POSITIONAL))
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            parameters.append(kind(one.arg, kind.KEYWORD_ONLY, default=None if default else kind.empty))
        if arguments.kwarg:
            parameters.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
        bound = self.owner and not _is_marked(self.node, "staticmethod")
        return inspect.Signature(parameters[1:] if bound else parameters)

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters, `*` and `**` for those that take any argument."""
        stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        signature = self.signature or inspect.Signature()
        return [stars.get(one.kind, one.name) for one in signature.parameters.values()]


Scope = Mapping[str, list[Thing]]
"""What each name in a function may stand for; empty where that cannot be told."""


@dataclass
class Requirements:
    """What a feature uses of the installed hosts, and a sentence for each use that one lacks or that takes other arguments."""

    modules: list[str] = field(default_factory=list)  # of the host, that ours import from
    uses: list[Thing] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@cache
def requirements(feature: Feature) -> Requirements:
    """A host that is not installed is not looked at."""
    reader = _Reader(feature)
    for module in (f"{OURS}.{name}" for name in feature.modules):
        reader.visit(module, tree(module), {}, None)
    return Requirements(list(dict.fromkeys(reader.modules)), reader.uses, list(dict.fromkeys(reader.faults)))


# ---- names in a module and in a class


def _package(module: str) -> str:
    return module.partition(".")[0]


@cache
def folders(package: str) -> tuple[Path, ...]:
    """Where a top package lies; empty where it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a stand-in among the imported modules
        return ()
    return tuple(map(Path, spec.submodule_search_locations or ())) if spec else ()


@cache
def path_of(module: str) -> Path | None:
    """The source file of a module; None where there is none."""
    package, *names = module.split(".")
    places = (folder.joinpath(*names) for folder in folders(package))
    files = (file for place in places for file in (place / "__init__.py", place.with_name(f"{place.name}.py")))
    return next((file for file in files if file.is_file()), None)


@cache
def tree(module: str) -> ast.Module | None:
    """The parsed source of a module; None where there is none."""
    path = path_of(module)
    return ast.parse(path.read_text(encoding="utf-8")) if path else None


@cache
def _names(module: str) -> Mapping[str, ast.AST]:
    return _first_bound(_statements(getattr(tree(module), "body", ())))


@cache
def _members(cls: Thing) -> Mapping[str, ast.AST]:
    """What a class defines or declares, and the attributes that its methods set."""
    assert cls.node is not None
    statements = _statements(getattr(cls.node, "body", ()))
    defined = _first_bound(statement for statement in statements if not _declares(cls, statement))
    attributes = (part for part in ast.walk(cls.node) if isinstance(part, ast.Attribute))
    return {part.attr: part for part in attributes if isinstance(part.ctx, ast.Store)} | defined


def _first_bound(statements: Iterable[ast.AST]) -> dict[str, ast.AST]:
    """Each name with the first statement that binds it."""
    names: dict[str, ast.AST] = {}
    for statement in statements:
        names = dict.fromkeys(_bound(statement), statement) | names
    return names


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Those of a module or class, with those below `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(ast.iter_child_nodes(node))


def _bound(node: ast.AST) -> list[str]:
    """Names that a statement binds or declares."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [] if _is_marked(node, "overload") else [node.name]
    if isinstance(node, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name.replace("*", f"* {ast.unparse(node)}") for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = (part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
    return [name.id for name in names if isinstance(name.ctx, ast.Store)]


def _declares(cls: Thing, node: ast.AST) -> bool:
    """Whether a statement of a class of ours says that the host has an attribute."""
    bare = _package(cls.module) == OURS and isinstance(node, ast.AnnAssign) and not node.value
    return bare and "ClassVar" not in ast.unparse(node)


def _is_marked(node: ast.AST, decorator: str) -> bool:
    return any(decorator in ast.unparse(one) for one in getattr(node, "decorator_list", ()))


def find(module: str, name: str) -> Thing | None:
    """What a module's attribute stands for, followed through imports; None: there is none."""
    node = _names(module).get(name)
    if isinstance(node, ast.ImportFrom | ast.Import):
        return _imported(module, node, name)
    if node is not None:
        return Thing(module, node)
    if path_of(f"{module}.{name}"):
        return Thing(f"{module}.{name}")
    stars = [_source(module, node) for bound, node in _names(module).items() if bound.startswith("* ")]
    return next((thing for star in stars if (thing := find(star, name))), None)


def _imported(module: str, node: ast.ImportFrom | ast.Import, name: str, anywhere: bool = False) -> Thing | None:
    """What an import binds to a name; the statement itself where it comes from another package and not `anywhere`."""
    original = next(alias.name for alias in node.names if name == (alias.asname or alias.name))
    if isinstance(node, ast.Import):
        return Thing(original)
    source = _source(module, node)
    if source == module:  # a package that imports one of its own modules
        return Thing(f"{module}.{original}")
    known = anywhere or _package(source) in (*HOSTS, OURS)
    return find(source, original) if known and folders(_package(source)) else Thing(module, node)


def _source(module: str, node: Any) -> str:
    """Absolute name of the module that a statement imports from."""
    path, parts = path_of(module), module.split(".")
    up = node.level - (path is not None and path.name == "__init__.py")
    parts = (parts[:-up] if up > 0 else parts) if node.level else []
    return ".".join([*parts, node.module] if node.module else parts)


# ---- what our modules use


class _Reader:
    def __init__(self, feature: Feature) -> None:
        self.modules: list[str] = []
        self.uses: list[Thing] = []
        self.faults: list[str] = []
        self.mixins = feature.mixins
        module, _, name = feature.host.rpartition(".")
        self.host = self._import(module, name) if module else None

    def visit(self, module: str, node: ast.AST | None, scope: Scope, cls: Thing | None) -> None:
        """Note the uses in a node and below it. `cls`: the class around it."""
        children = list(ast.iter_child_nodes(node)) if node else []
        if isinstance(node, ast.If) and any(getattr(part, "id", "") == "hasattr" for part in ast.walk(node.test)):
            children = list(node.orelse)
        elif isinstance(node, ast.ImportFrom) and _package(node.module or "") in HOSTS:
            for alias in node.names:
                self._import(str(node.module), alias.name)
        elif isinstance(node, ast.ClassDef):
            cls = Thing(module, node)
            self._visit_class(cls, node)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            self._use(self._things(module, node.value, scope), node.attr)
        elif isinstance(node, ast.Call):
            self._visit_call(module, node, scope)
        elif isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Attribute):
            for ours in self._things(module, node.value, scope):
                if ours.signature and not ours.of_host:
                    self._compare(ours, self._use(self._things(module, target.value, scope), target.attr))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            scope = {**scope, **self._scope(module, node, cls)}
        for child in children:
            self.visit(module, child, scope, cls)

    def _import(self, module: str, name: str) -> Thing | None:
        if not folders(_package(module)):
            return None
        self.modules.append(module)
        thing = find(module, name)
        if thing:
            self.uses.append(thing)
        else:
            self.faults.append(f"{module}: {name} is not there" if path_of(module) else f"{module} is not there")
        return thing

    def _visit_class(self, cls: Thing, node: ast.ClassDef) -> None:
        for statement in node.body if self._host_of(cls) else ():
            name = next(iter(_bound(statement)), "_")
            above = [replace(cls, owner=SUPER)]
            if _declares(cls, statement) and not name.startswith("_"):
                self._use(above, name)
            elif _is_marked(statement, "override") or f"super().{name}" in ast.unparse(statement):
                self._compare(Thing(cls.module, statement, cls.name), self._use(above, name))

    def _use(self, owners: list[Thing], name: str) -> list[Thing]:
        """Note an attribute of what may be any of `owners`, and return what it stands for."""
        there = [member for owner in owners if (member := self._member(owner, name))]
        host = next((host for owner in owners if (host := self._host_of(owner))), None)
        if host and not there and not hasattr(object, name):
            self.faults.append(f"{host.module}: {f'{host.name}.' if host.node else ''}{name} is not there")
        self.uses += [thing for thing in there if thing.of_host]
        return there

    def _visit_call(self, module: str, node: ast.Call, scope: Scope) -> None:
        by_place = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        by_name = [keyword.arg for keyword in node.keywords if keyword.arg]
        for called in self._things(module, node.func, scope):
            thing: Thing | None = called
            if isinstance(called.node, ast.ClassDef) and called.owner != SUPER and self._host_of(called):
                thing = self._member(called, "__init__")
                for name in by_name if thing is None else ():  # a dataclass, say: its fields are the arguments
                    self._use([called], name)
            signature = thing.signature if thing and thing.of_host else None
            if thing is None or signature is None:
                continue
            whole = len(by_place) == len(node.args) and len(by_name) == len(node.keywords)
            try:
                (signature.bind if whole else signature.bind_partial)(*by_place, **dict.fromkeys(by_name))
            except TypeError as error:
                passed = ", ".join(["_"] * len(by_place) + [f"{name}=" for name in by_name])
                self._takes(thing, f"OAR calls it with ({passed}): {error}")

    def _compare(self, ours: Thing, things: Iterable[Thing]) -> None:
        """Note where a function of ours cannot be called like the host's, by place or by name."""
        own = ours.parameters
        named = [name for name in own if not name.startswith("*")]
        for thing in things:
            theirs = thing.parameters
            same = theirs == own if named == own else theirs[: len(named)] == named
            if thing.signature and not same:
                self._takes(thing, f"OAR's own takes ({', '.join(own)})")

    def _takes(self, thing: Thing, text: str) -> None:
        self.faults.append(f"{thing.module}: {thing.name} takes ({', '.join(thing.parameters)}); {text}")

    # ---- what an expression stands for

    def _scope(
        self, module: str, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, cls: Thing | None
    ) -> Scope:
        arguments = (one for one in ast.walk(function.args) if isinstance(one, ast.arg))
        scope = {one.arg: self._annotated(module, one.annotation) for one in arguments}
        if cls and function in getattr(cls.node, "body", ()) and scope and not _is_marked(function, "staticmethod"):
            scope[next(iter(scope))] = [cls]
            scope["super"] = [replace(cls, owner=SUPER)]
        below = list(ast.iter_child_nodes(function))
        for node in below:  # grows on the way
            for name in _bound(node):
                if isinstance(node, ast.AnnAssign):
                    scope[name] = self._annotated(module, node.annotation)
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    scope[name] = [thing] if (thing := _imported(module, node, name)) else []
                else:
                    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    scope.setdefault(name, [Thing(module, node)] if is_function else [])
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                below += ast.iter_child_nodes(node)
        return scope

    def _things(self, module: str, node: ast.AST | None, scope: Scope | None = None) -> list[Thing]:
        """What an expression may stand for; nothing where it cannot be told."""
        scope = scope or {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
            node = node.func
        if isinstance(node, ast.Name):
            thing = find(module, node.id) if node.id not in scope else None
            return [thing] if thing else list(scope.get(node.id, ()))
        if isinstance(node, ast.Attribute):
            owners = self._things(module, node.value, scope)
            declared = [one for owner in owners for one in self._declared(owner, node.attr)]
            return declared or [member for owner in owners if (member := self._member(owner, node.attr))]
        return []

    def _annotated(self, module: str, annotation: ast.AST | None) -> list[Thing]:
        """What an annotation says that something is: each part of a union."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            return self._annotated(module, annotation.left) + self._annotated(module, annotation.right)
        return self._things(module, annotation)

    def _declared(self, owner: Thing, name: str) -> list[Thing]:
        """What our own annotation says of an attribute of `owner`."""
        for statement in getattr(owner.node, "body", ()) if _package(owner.module) == OURS else ():
            if isinstance(statement, ast.AnnAssign) and name in _bound(statement):
                return self._annotated(owner.module, statement.annotation)
        return []

    def _member(self, owner: Thing, name: str) -> Thing | None:
        if owner.node is None:
            return find(owner.module, name) if owner.of_host else None
        if not isinstance(owner.node, ast.ClassDef):
            return None
        if name in ("__ray_metadata__", "modified_class") and _is_marked(owner.node, "ray.remote"):
            return owner
        above = (member for base in self._bases(owner) if (member := self._member(base, name)))
        if owner.owner == SUPER or name not in (members := _members(owner)):
            return next(above, None)
        return Thing(owner.module, members[name], owner.name)

    def _bases(self, cls: Thing) -> list[Thing]:
        bases = []
        for base in getattr(cls.node, "bases", ()):
            for thing in self._things(cls.module, base.value if isinstance(base, ast.Subscript) else base):
                if isinstance(thing.node, ast.ImportFrom) and isinstance(base, ast.Name):
                    thing = _imported(thing.module, thing.node, base.id, anywhere=True) or thing
                bases.append(thing)
        return [*bases, self.host] if self.host and cls.name in self.mixins else bases

    def _host_of(self, thing: Thing) -> Thing | None:
        """The host's module or class that something is, or is derived from."""
        if thing.node is None or (thing.of_host and isinstance(thing.node, ast.ClassDef)):
            return thing if thing.of_host else None
        return next((host for base in self._bases(thing) if (host := self._host_of(base))), None)
