"""The error that a person can mend."""


class BadInput(ValueError):
    """Something that was given is not what was expected; the message says what, and where.

    The command line ends with exit code 2 on it. Any other error is a fault of the program.
    """
