"""The error that a user can cause and can mend."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: a config, a file, a model or a reward function that cannot work.

    The message names the place (file, line, field) and what to do. The command line prints it without a traceback and
    exits with status 2. Raise it before any model loads wherever that is possible.
    """
