"""The error of a recipe with a state where nothing holds its scales."""

from .._loss_scaling import AbstractLossScaling


class MissingScales(ValueError):
    """A product asked for scales, and no state was provided.

    Attributes:
        recipe: The name of the recipe.
        where: The line of the product, as ` at model.py:41`; perhaps empty.
    """

    def __init__(self, recipe: str, where: str) -> None:
        """The message for a call outside of any training step."""
        super().__init__(
            f"`{recipe}`{where} needs a state, which only a training step has. Train "
            "with `mpx.filter_grad(func, scaling)` or the like and `scaling = "
            "mpx.init_scaling(func, model, ...)`; to evaluate, `mpx.inference(func, "
            "scaling)`; or use a recipe without a state, "
            "`mpx.Float8CurrentScaling()`."
        )
        self.recipe, self.where = recipe, where


def missing_from(
    scaling: AbstractLossScaling, call: str, recipe: str, where: str = ""
) -> ValueError:
    """The error of a call whose loss scaling holds no scales.

    Args:
        scaling: The loss scaling.
        call: The public call, in backticks.
        recipe: The name of the recipe.
        where: As in `MissingScales`.
    """
    given = type(scaling).__name__
    kept = (
        f"To keep your `{given}` as the loss scaling in it:\n"
        "    scaling = mpx.init_scaling(func, model, ...).with_loss(scaling)\n"
    )
    return ValueError(
        f"`scaling` of {call} must contain the scales of `{recipe}`{where}; got "
        f"`mpx.{given}`, which has none. Make it from the function and its "
        "arguments:\n"
        "    scaling = mpx.init_scaling(func, model, ...)\n"
        f"{kept * (not scaling._is_one)}Or use a recipe without a state: "
        "`mpx.Float8CurrentScaling()`."
    )
