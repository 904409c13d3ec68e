"""The one error of this program that a person, not a programmer, must mend."""


class SetupError(ValueError):
    """A data set, checkpoint or option that does not fit; says what to do about it.

    The command line prints its message without a traceback.
    """
