"""Makes cases of rows: names of functions, kinds of input, and how they are called."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rigs.sweep.case import Case


@dataclasses.dataclass(frozen=True)
class Table:
    """Collects the cases of a library.

    Attributes:
        prefix: What the names of its functions begin with, such as `numpy`.
        module: Where functions are found by name.
        cases: The cases so far.
    """

    prefix: str
    module: ModuleType
    cases: list[Case] = dataclasses.field(default_factory=list)

    def add(
        self,
        names: str,
        kinds: str,
        *,
        arity: int = 1,
        domain: str = "real",
        **options: Any,
    ) -> None:
        """Adds functions that are called with arrays alone, and with `options`."""
        for name in names.split():
            function = getattr(self.module, name)

            call = functools.partial(function, **options)
            self.call(name, call, kinds, arity=arity, domain=domain)

    def each(
        self,
        names: str,
        how: Callable[..., Any],
        kinds: str,
        called: str = "{}",
        **options: Any,
    ) -> None:
        """Adds functions that are called by `how`, which gets the function first."""
        for name in names.split():
            function = operator.attrgetter(name)(self.module)
            call = functools.partial(how, function)
            self.call(called.format(name), call, kinds, **options)

    def call(
        self,
        name: str,
        call: Callable[..., Any],
        kinds: str,
        *,
        arity: int = 1,
        domain: str = "real",
        variant: str = "",
        init: Callable[..., Any] | None = None,
    ) -> None:
        """Adds one function with the way it is called.

        A second way without a `variant` of its own is called `2`, and so on.
        """
        names = {case.name for case in self.cases}
        for kind in kinds.split():
            function = f"{self.prefix}.{name}"
            case = Case(function, kind, call, arity, domain, init, variant)
            count = 2
            while case.name in names:
                case = dataclasses.replace(case, variant=f"{variant}{count}")
                count += 1
            self.cases.append(case)
