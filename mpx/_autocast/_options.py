"""Reading what a user says to `mpx.autocast` and to rules: checks of single options."""

from typing import Any

import numpy as np

from .._errors import describe
from .._quantize import AbstractRecipe


def is_recipe(value: Any) -> bool:
    """Whether a value is a recipe, or the class of recipes that one forgot to call."""
    return isinstance(value, AbstractRecipe) or is_recipe_class(value)


def is_recipe_class(value: Any) -> bool:
    """Whether a value is a class of recipes."""
    return isinstance(value, type) and issubclass(value, AbstractRecipe)


def as_written(recipe: Any) -> str:
    """A recipe or a class of recipes as one would write it: `mpx.DelayedScaling()`."""
    made = recipe if isinstance(recipe, type) else type(recipe)
    options = "" if isinstance(recipe, type) or recipe == _default(made) else "..."
    return f"mpx.{made.__name__}({options})"


def _default(made: type) -> Any:
    try:
        return made()
    except TypeError:  # one with arguments of a user's own
        return None


def read_recipe(recipe: Any, caller: str) -> AbstractRecipe | None:
    """Reads the option `recipe`.

    Args:
        recipe: What was given.
        caller: The public call to name in an error.

    Raises:
        TypeError: It is neither a recipe nor None.
    """
    if recipe is None or isinstance(recipe, AbstractRecipe):
        return recipe
    if is_recipe_class(recipe):
        raise TypeError(
            f"`recipe` of {caller} must be a recipe, not its class; got "
            f"{describe(recipe)}. Call it: `recipe={as_written(recipe)}`."
        )
    raise TypeError(
        f"`recipe` of {caller} must be a recipe such as "
        f"`mpx.Float8CurrentScaling()`, or None; got {describe(recipe)}."
    )


def refuse_recipe(value: Any, option: str, caller: str) -> None:
    """Raises where a recipe was given by position as something else.

    Args:
        value: What was given.
        option: What belongs at its place: "a function", "a dtype".
        caller: The public call to name in an error.

    Raises:
        TypeError: It is a recipe, or the class of one.
    """
    if is_recipe(value):
        raise TypeError(
            f"{caller} takes a recipe by its name; got {describe(value)} where "
            f"{option} belongs. Write `mpx.autocast(func, recipe={as_written(value)})`."
        )


def read_switch(name: str, value: Any, caller: str) -> bool:
    """Reads an option that is True or False.

    Args:
        name: What it is called.
        value: What was given.
        caller: The public call to name in an error.

    Raises:
        TypeError: It is neither. A text such as "no" would count as True.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"`{name}` of {caller} must be True or False; got {describe(value)}."
        )
    return bool(value)


def read_text(name: str, value: Any, caller: str, several: bool = False) -> None:
    """Checks an option that is a text with `*` and `?`, or perhaps several.

    Args:
        name: What it is called.
        value: What was given; None is nothing.
        caller: The public call to name in an error.
        several: Whether it may be a tuple of texts.

    Raises:
        TypeError: It is no text.
        ValueError: It is an empty one, which holds for nothing.
    """
    if value is None:
        return
    texts = value if several and isinstance(value, tuple) else (value,)
    for text in texts:
        if not isinstance(text, str):
            kind = "a text, or a tuple of texts" if several else "a text"
            raise TypeError(
                f"`{name}` of {caller} must be {kind}; got {_shown(value)}."
            )
    if not texts or "" in texts:
        raise ValueError(
            f"`{name}` of {caller} must not be empty; got {value!r}, which holds for "
            "nothing. Leave it out, or write `*` for all."
        )


def _shown(value: Any) -> str:
    """A short list as it was written, other things described."""
    if isinstance(value, tuple | list | set | frozenset) and len(repr(value)) < 80:
        return repr(value)
    return describe(value)
