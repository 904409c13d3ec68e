"""The one state of a training step: a loss scaling, and what recipes need."""

from ._inference import inference as inference
from ._init import init_scaling as init_scaling
from ._recipe_scaling import RecipeScaling as RecipeScaling
